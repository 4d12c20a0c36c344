"""The bulk lane without sockets: a `Lane` that reads the holder's real file, by a ticket that this one really gave."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from replicator.agent.transport import OpenTicket
from replicator.errors import PeerUnavailableError, TransferError, TransferStalledError
from replicator.ids import ObjectVersion
from replicator.native import copy_crc32c
from replicator.transfer.lane import Lane, OnBlocks, OnBytes, Source
from replicator.transfer.serve_limit import ServeLimit

from .loop import Process
from .network import Endpoint, Network
from .rpc import SimChannel

PIECE_BYTES = 4096


class SimBulkEndpoint:
    """Where one agent serves its objects."""

    def __init__(self, network: Network, process: Process, node: str, port: int, open_ticket: OpenTicket) -> None:
        self.address = (node, port)
        self.open_ticket = open_ticket
        self._network = network
        self._endpoint = Endpoint(process, f"{node}:{port}", node, self)
        network.listen(self._endpoint)

    def stop(self) -> None:
        self._network.close(self._endpoint)


class SimBulkLane:
    """See `Lane`. What it does with a cut, mute or lying network is what `BulkLane` does."""

    name = "bulk"

    def __init__(self, network: Network, node: str) -> None:
        self._network = network
        self._node = node

    async def fetch(
        self,
        source: Source,
        object: ObjectVersion,
        offset: int,
        length: int,
        target: memoryview,
        *,
        block_size: int,
        progress_timeout_s: float,
        on_bytes: OnBytes,
        on_blocks: OnBlocks,
    ) -> None:
        """See `Lane.fetch`."""
        if not length:
            return
        network, me = self._network, self._node
        found = network.find(source.bulk_address)
        whom = f"node {source.node_id} (bulk lane, {source.bulk_address})"
        if found is None or network.happens("refused", me, source.node_id):
            await asyncio.sleep(network.delay_s(me, source.node_id))
            raise PeerUnavailableError(f"{whom}: connection refused")
        await self._travel(found.node, progress_timeout_s, whom)
        with found.process.call(found.service.open_ticket, source.ticket) as served:
            if served.info.object != object:
                raise TransferError(f"{whom}: the ticket is for {served.info.object}")
            done, crc = 0, 0
            while done < length:
                await self._travel(found.node, progress_timeout_s, whom)
                if not found.process.alive:
                    raise TransferError(f"{whom}: the connection was closed after {done} of {length} bytes")
                inside = done % block_size
                size = min(PIECE_BYTES, block_size - inside, length - done)
                piece = network.flip(os.pread(served.fd, size, offset + done), found.node, me)
                if len(piece) != size:
                    raise TransferError(f"{whom}: the file ends after {done} of {length} bytes")
                crc = copy_crc32c(target[done:], piece, crc if inside else 0)
                done += size
                on_bytes(size)
                if done % block_size == 0 or done == length:
                    on_blocks((offset + done - 1) // block_size, [crc])

    async def _travel(self, holder: str, timeout_s: float, whom: str) -> None:
        """The next bytes come, or not."""
        network, me = self._network, self._node
        delay = network.delay_s(holder, me)
        if network.happens("cut", holder, me):
            await asyncio.sleep(delay)
            raise TransferError(f"{whom}: the connection broke")
        if network.known_cut(me, holder) or network.happens("reply_lost", holder, me) or delay > timeout_s:
            await asyncio.sleep(timeout_s)
            raise TransferStalledError(f"{whom}: nothing came for {timeout_s:.1f} s")
        await asyncio.sleep(delay)

    async def close(self) -> None:
        """See `Lane.close`."""


class SimTransport:
    """See `replicator.agent.transport.Transport`."""

    def __init__(self, network: Network, process: Process, node: str, bulk_port: int) -> None:
        self._network = network
        self._process = process
        self._node = node
        self._bulk_port = bulk_port

    def channel(self, address: str) -> Any:
        return SimChannel(self._network, self._process, self._node, address)

    def bulk_lane(self) -> Lane:
        return SimBulkLane(self._network, self._node)

    def serve_bulk(self, open_ticket: OpenTicket, limit: ServeLimit) -> SimBulkEndpoint:
        return SimBulkEndpoint(self._network, self._process, self._node, self._bulk_port, open_ticket)
