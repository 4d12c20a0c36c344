"""The bulk lane's client: ranges over kept TCP connections, a few to each peer, received by a bounded thread pool.

A connection is kept only after a whole answer came over it; after any trouble it is closed, and with it everything
that was kept to the same peer, so that the next request reaches whoever listens there now (F45).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from replicator.checksum import block_count
from replicator.config import split_address
from replicator.errors import ConfigError, ObjectNotFoundError, PeerUnavailableError, TransferError
from replicator.ids import ObjectVersion
from replicator.transfer.bulk_request import RangeRequest, StaleConnectionError, perform
from replicator.transfer.lane import OnBlocks, OnBytes, Source
from replicator.transfer.sockets import check_congestion, tune

MAX_THREADS = 16
# Shorter than the server keeps an idle connection, so that a request seldom meets one that is being closed.
MAX_IDLE_S = 20.0
# A range is not cut into pieces smaller than this.
MIN_STRIPE_BYTES = 8 << 20
_MAX_IDLE_PEERS = 256


@dataclass(slots=True)
class _Idle:
    sock: socket.socket
    since: float


@dataclass(slots=True)
class _Peer:
    """The connections to one address: at most as many at a time as `slots` has."""

    slots: asyncio.Semaphore
    idle: deque[_Idle] = field(default_factory=deque)
    users: int = 0

    def take(self) -> socket.socket | None:
        """A connection that was kept and is still good as far as this side can see."""
        while self.idle:
            kept = self.idle.pop()
            if time.monotonic() - kept.since <= MAX_IDLE_S and _is_quiet(kept.sock):
                return kept.sock
            kept.sock.close()
        return None

    def keep(self, sock: socket.socket) -> None:
        self.idle.append(_Idle(sock, time.monotonic()))

    def close_idle(self) -> None:
        while self.idle:
            self.idle.pop().sock.close()


def _is_quiet(sock: socket.socket) -> bool:
    """Nothing has come over a kept connection: neither bytes that nobody asked for, nor its end."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True, slots=True)
class _Fetch:
    """What the stripes of one fetch have in common."""

    source: Source
    object: ObjectVersion
    block_size: int
    progress_timeout_s: float
    on_bytes: OnBytes
    on_blocks: OnBlocks

    @property
    def whom(self) -> str:
        return f"node {self.source.node_id} (bulk lane, {self.source.bulk_address})"

    def range_request(self, offset: int, length: int) -> RangeRequest:
        return RangeRequest(
            host=self.source.bulk_address,
            ticket=self.source.ticket,
            object=str(self.object),
            offset=offset,
            length=length,
            block_size=self.block_size,
            progress_timeout_s=self.progress_timeout_s,
        )


class BulkLane:
    """See `Lane`. Used in one event loop.

    Args:
        connections: to one peer at a time; a large range is striped over as many.
        connect_timeout_s: for resolving the peer's name and connecting.
        congestion: TCP congestion control of its sockets; empty: the system's.
        max_threads: ranges received at a time, over all peers; more wait.

    Raises:
        ConfigError: this machine does not have that congestion control.
    """

    name = "bulk"

    def __init__(
        self,
        *,
        connections: int = 2,
        connect_timeout_s: float = 3.0,
        congestion: str = "",
        max_threads: int = MAX_THREADS,
    ) -> None:
        check_congestion(congestion)
        self._connections = connections
        self._connect_timeout_s = connect_timeout_s
        self._congestion = congestion
        self._threads = asyncio.Semaphore(max_threads)
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix="replicator-bulk-lane")
        self._peers: dict[str, _Peer] = {}

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
        """See `Lane.fetch`. When one of several connections fails, what the others bring is still brought."""
        fetch = _Fetch(source, object, block_size, progress_timeout_s, on_bytes, on_blocks)
        peer = self._peer(source.bulk_address)
        peer.users += 1
        stripes = [
            asyncio.ensure_future(self._stripe(peer, fetch, offset + begin, target[begin : begin + size]))
            for begin, size in cut(length, block_size, self._connections)
        ]
        try:
            await _all(stripes)
        finally:
            peer.users -= 1
            self._forget_idle_peers()

    async def close(self) -> None:
        """See `Lane.close`."""
        for peer in self._peers.values():
            peer.close_idle()
        self._peers.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.pop(address, None) or _Peer(asyncio.Semaphore(self._connections))
        self._peers[address] = peer
        return peer

    def _forget_idle_peers(self) -> None:
        """Close what has been unused for long, so that connections do not pile up with the peers once met."""
        now = time.monotonic()
        spare = len(self._peers) - _MAX_IDLE_PEERS
        for address, peer in list(self._peers.items()):
            while peer.idle and now - peer.idle[0].since > MAX_IDLE_S:
                peer.idle.popleft().sock.close()
            if not peer.users and (not peer.idle or spare > 0):
                peer.close_idle()
                del self._peers[address]
                spare -= 1

    async def _stripe(self, peer: _Peer, fetch: _Fetch, offset: int, target: memoryview) -> None:
        """Bring one contiguous part of a range over one connection."""
        async with peer.slots, self._threads:
            request = fetch.range_request(offset, len(target))
            sock = peer.take()
            try:
                if sock is not None:
                    try:
                        await self._perform(peer, fetch, sock, request, target, is_reused=True)
                        return
                    except StaleConnectionError:
                        peer.close_idle()
                sock = await self._connect(fetch)
                await self._perform(peer, fetch, sock, request, target, is_reused=False)
            except (TransferError, ObjectNotFoundError) as error:
                peer.close_idle()
                raise type(error)(f"{fetch.whom}: {error}") from None

    async def _perform(
        self,
        peer: _Peer,
        fetch: _Fetch,
        sock: socket.socket,
        request: RangeRequest,
        target: memoryview,
        *,
        is_reused: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        first_block = request.offset // request.block_size

        def report(count: int, block: int, crcs: Sequence[int]) -> None:
            loop.call_soon_threadsafe(_deliver, fetch, count, first_block + block, crcs)

        keep = False
        cancel_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            work = partial(perform, sock, request, target, cancel_fd, report, is_reused)
            future = loop.run_in_executor(self._pool, work)
            try:
                keep = await asyncio.shield(future)
            except asyncio.CancelledError:
                os.eventfd_write(cancel_fd, 1)
                await _settle(future)
                raise
        finally:
            os.close(cancel_fd)
            if keep:
                peer.keep(sock)
            else:
                sock.close()

    async def _connect(self, fetch: _Fetch) -> socket.socket:
        """A new connection; the name is resolved anew each time (F34)."""
        address = fetch.source.bulk_address
        loop = asyncio.get_running_loop()
        problem = "no address was found"
        try:
            host, port = split_address(address)
            async with asyncio.timeout(self._connect_timeout_s):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                for family, kind, protocol, _, where in found:
                    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
                    try:
                        tune(sock, fetch.progress_timeout_s, self._congestion)
                        await loop.sock_connect(sock, where)
                    except OSError as error:
                        sock.close()
                        problem = error.strerror or str(error)
                    except BaseException:
                        sock.close()
                        raise
                    else:
                        return sock
        except TimeoutError:
            problem = f"no connection within {self._connect_timeout_s:.1f} s"
        except (OSError, ConfigError) as error:
            problem = str(error)
        raise PeerUnavailableError(f"{fetch.whom} cannot be reached: {problem}")


def cut(length: int, block_size: int, most: int) -> list[tuple[int, int]]:
    """(begin, size) of at most `most` pieces of a range, of whole blocks each, none small without need."""
    if length == 0:
        return []
    pieces = max(1, min(most, length // MIN_STRIPE_BYTES))
    size = -(-block_count(length, block_size) // pieces) * block_size
    return [(begin, min(size, length - begin)) for begin in range(0, length, size)]


def _deliver(fetch: _Fetch, count: int, first_block: int, crcs: Sequence[int]) -> None:
    if crcs:
        fetch.on_blocks(first_block, crcs)
    if count:
        fetch.on_bytes(count)


async def _settle(future: asyncio.Future[Any]) -> None:
    """Wait until it has ended, come what may: it writes to memory that is not ours afterwards."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()


async def _all(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all, then raise what the first one raised. Cancelled, it cancels all and waits for them."""
    if not tasks:
        return
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        for task in tasks:
            await _settle(task)
        raise
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        raise errors[0]
