"""What only the gRPC lane does: its server's bounds, and errors that keep their type."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from transfer_support import Peer, eventually, fetch, some_bytes

from replicator.errors import InvalidIdError, ReplicatorError, StaleEpochError, TransferError
from replicator.ids import NodeIdentity
from replicator.rpc_errors import error_from_rpc
from replicator.rpc_options import server_options
from replicator.store.reader import ObjectReader, open_object
from replicator.store.trailer import ObjectInfo
from replicator.transfer.grpc_lane import CHUNK_BYTES, METHOD, SERVICE, GrpcLane, data_service
from replicator.transfer.lane import Lane
from replicator.v1 import data_pb2
from replicator.wire import Sender, object_from_pb, object_to_pb, sender_to_pb

DATA = some_bytes(3 * CHUNK_BYTES + 7)


async def read(address: str, info: ObjectInfo, offset: int, length: int) -> list[bytes]:
    """The messages of one call, as they come."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=data_pb2.ReadRequest.SerializeToString,
            response_deserializer=None,
        )
        request = data_pb2.ReadRequest(
            sender=sender_to_pb(Sender(NodeIdentity("tester", 1))),
            object=object_to_pb(info.object),
            offset_bytes=offset,
            length_bytes=length,
        )
        return [chunk async for chunk in call(request, timeout=10)]


async def test_messages_are_raw_and_of_bounded_size(peer: Peer) -> None:
    """F28: no message comes near gRPC's limit of 4 MiB."""
    info = peer.add("object", DATA)
    chunks = await read(peer.node.grpc_address, info, 0, len(DATA))
    assert b"".join(chunks) == DATA
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES] * 3 + [7]


@pytest.mark.parametrize(("offset", "length"), [(0, len(DATA) + 1), (len(DATA), 1), (2**63, 2**63)])
async def test_a_range_outside_the_object(peer: Peer, offset: int, length: int) -> None:
    info = peer.add("object", DATA)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(peer.node.grpc_address, info, offset, length)
    error = error_from_rpc(caught.value, "bytes", "node-a", 10)
    assert isinstance(error, InvalidIdError)
    assert f"has {len(DATA)} bytes" in str(error)


async def serve(open_it, **options: float) -> tuple[grpc.aio.Server, str]:  # type: ignore[no-untyped-def]
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((data_service(open_it, **options),))  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_what_the_other_side_raises_keeps_its_type(lanes: dict[str, Lane], peer: Peer) -> None:
    info = peer.add("object", DATA)

    def refuse(request: data_pb2.ReadRequest) -> ObjectReader:
        raise StaleEpochError("epoch 3 is over")

    server, address = await serve(refuse)
    source = peer.source(info.object)
    other = type(source)(type(source.node)(source.node.identity, address))
    with pytest.raises(StaleEpochError, match=r"node node-a \(grpc lane.*epoch 3 is over"):
        await fetch(lanes["grpc"], other, info)
    await server.stop(None)


def is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


async def test_a_reader_that_takes_nothing_is_given_up(peer: Peer) -> None:
    """Its slot and the object's lock are free again after the deadline, though its connection is up."""
    info = peer.add("object", some_bytes(1 << 20) * 64)
    server, address = await serve(
        lambda request: open_object(peer.paths, object_from_pb(request.object)), max_reads=1, send_timeout_s=0.4
    )
    refused = asyncio.Event()

    async def take_slowly(call: Any) -> None:
        """One piece at a time, so that the stream counts as alive until the second reader was refused."""
        while not refused.is_set():
            await call.read()
            await asyncio.sleep(0.05)

    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream(
                f"/{SERVICE}/{METHOD}",
                request_serializer=data_pb2.ReadRequest.SerializeToString,
                response_deserializer=None,
            )(data_pb2.ReadRequest(object=object_to_pb(info.object), length_bytes=info.size))
            await call.read()
            assert is_locked(peer.path(info))
            slow = asyncio.ensure_future(take_slowly(call))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(address, info, 0, 10)
            refused.set()
            await slow
            error = error_from_rpc(caught.value, "bytes", "node-a", 10)
            assert isinstance(error, TransferError)
            assert "all 1 reads at a time are taken" in str(error)
            assert await asyncio.to_thread(eventually, lambda: not is_locked(peer.path(info)))
            assert await read(address, info, 0, 10) == [some_bytes(1 << 20)[:10]]
    finally:
        # Without this a failure here would keep the process from ending: gRPC's thread waits for its server.
        await server.stop(None)


async def test_a_reader_that_goes_away_frees_the_object(peer: Peer) -> None:
    info = peer.add("object", some_bytes(1 << 20) * 64)
    async with grpc.aio.insecure_channel(peer.node.grpc_address) as channel:
        call = channel.unary_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=data_pb2.ReadRequest.SerializeToString,
            response_deserializer=None,
        )(data_pb2.ReadRequest(object=object_to_pb(info.object), length_bytes=info.size))
        await call.read()
        assert is_locked(peer.path(info))
        call.cancel()
    assert await asyncio.to_thread(eventually, lambda: not is_locked(peer.path(info)))


async def test_the_channel_cannot_be_had(peer: Peer) -> None:
    info = peer.add("object", DATA)

    async def never(node: object) -> grpc.aio.Channel:
        await asyncio.Event().wait()
        raise AssertionError

    lane = GrpcLane(never, lambda one: sender_to_pb(Sender(NodeIdentity("tester", 1))))
    with pytest.raises(ReplicatorError, match=r"no byte for 0\.2 s, after 0 of"):
        await fetch(lane, peer.source(info.object), info, timeout_s=0.2)
