"""The limit on what a node serves: shares, the kernel's pacing, the bucket."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable

import grpc.aio
import pytest
from transfer_support import LANES, Peer, policy_for, some_bytes

from replicator.errors import TransferError
from replicator.ids import NodeAddress
from replicator.transfer.bulk_server import BulkServer
from replicator.transfer.grpc_lane import data_service
from replicator.transfer.lane import Lane
from replicator.transfer.pull import pull
from replicator.transfer.serve_limit import PacedSocket, ServeLimit, TokenBucket
from replicator.wire import object_from_pb

MIB = 1 << 20


def told(rates: list[int]) -> Callable[[int], None]:
    return rates.append


def test_all_who_send_share_evenly() -> None:
    limit = ServeLimit(900)
    first: list[int] = []
    second: list[int] = []
    with limit.sending(told(first)):
        with pytest.raises(TransferError), limit.sending(told(second)):
            raise TransferError("it broke")
        with limit.sending(told(second)), limit.sending(told([])):
            pass
    assert first == [900, 450, 900, 450, 300, 450, 900]
    assert second == [450, 450, 300, 450]


def test_without_a_limit_nobody_is_told() -> None:
    rates: list[int] = []
    with ServeLimit().sending(told(rates)):
        pass
    assert rates == []


def test_the_kernel_paces_a_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        PacedSocket(sock)(5 << 32)
        assert struct.unpack("L", sock.getsockopt(socket.SOL_SOCKET, 47, 8)) == (5 << 32,)
    PacedSocket(sock)(1)  # closed: no matter


async def test_a_bucket_follows_its_rate() -> None:
    bucket = TokenBucket()
    await bucket.take(1 << 40)  # no rate yet
    bucket = TokenBucket()
    bucket(10 * MIB)
    began = time.monotonic()
    for _ in range(5):
        await bucket.take(MIB)
    assert time.monotonic() - began > 0.2  # four MiB must have had their time, less a burst
    bucket(1)
    waiting = asyncio.ensure_future(bucket.take(MIB))
    await asyncio.sleep(0)
    bucket(1 << 40)
    await asyncio.wait_for(waiting, 30)


@pytest.mark.parametrize("lane", LANES)
async def test_two_pulls_together_take_their_time(lane: str, lanes: dict[str, Lane], peer: Peer) -> None:
    """16 MiB at 16 MiB/s over one lane, what is in buffers aside."""
    limit = ServeLimit(16 * MIB)
    served = BulkServer("127.0.0.1", 0, peer.open_by_ticket, serve_limit=limit)
    served.start()
    server = grpc.aio.server()
    try:
        port = server.add_insecure_port("127.0.0.1:0")
        handler = data_service(
            lambda request: peer.open_by_ticket(peer.tickets.issue(object_from_pb(request.object))[0]),
            serve_limit=limit,
        )
        server.add_generic_rpc_handlers((handler,))
        await server.start()
        peer.bulk_address = "{}:{}".format(*served.address)
        peer.node = NodeAddress(peer.node.identity, f"127.0.0.1:{port}")
        data = [some_bytes(MIB, seed) * 8 for seed in (1, 2)]
        infos = [peer.add(f"limited-{index}", one, MIB) for index, one in enumerate(data)]
        targets = [bytearray(len(one)) for one in data]
        began = time.monotonic()
        await asyncio.gather(
            *(
                pull(info, [peer.pull_source(info)], memoryview(target), lanes=lanes, policy=policy_for(lane))
                for info, target in zip(infos, targets, strict=True)
            )
        )
        assert time.monotonic() - began > 0.3
        assert targets == data
    finally:
        served.stop()
        await server.stop(0)
