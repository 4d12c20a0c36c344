"""The messages of packed objects: what is cut where, and that nothing else than such a message is taken for one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from replicator.errors import TransferError
from replicator.packs import (
    MAX_CALL_BYTES,
    MAX_CALL_OBJECTS,
    MAX_PIECE_BYTES,
    MAX_PIECE_OBJECTS,
    calls_of,
    pieces_of,
)
from replicator.transfer.grpc_lane import SERVICE
from replicator.transfer.packed import METHOD, decode_piece, encode_piece, read_packed
from replicator.v1 import data_pb2


def test_what_is_encoded_comes_back() -> None:
    for payloads in ([], [b""], [None], [b"a", None, b"", b"bcd" * 1000]):
        decoded = decode_piece(encode_piece(payloads))
        assert [None if one is None else bytes(one) for one in decoded] == payloads


def test_every_other_message_is_refused() -> None:
    """Bytes from a peer: cut, prolonged, changed, or none at all."""
    good = encode_piece([b"a" * 100, None, b"b" * 50])
    for message in (b"", b"\1", good[:-1], good + b"x", good[4:], b"\xff" * 16, good[:10]):
        with pytest.raises(TransferError):
            decode_piece(message)
    random.seed(7)
    for _ in range(2000):
        noise = bytearray(good[: random.randrange(len(good) + 1)])
        for _ in range(random.randrange(1, 4)):
            if noise:
                noise[random.randrange(min(len(noise), 16))] = random.randrange(256)
        try:
            payloads = decode_piece(bytes(noise))
        except TransferError:
            continue
        assert sum(len(one) for one in payloads if one is not None) == len(noise) - 4 - 4 * len(payloads)


def test_calls_and_messages_are_bounded_and_leave_nothing_out() -> None:
    random.seed(8)
    for _ in range(50):
        sizes = [random.choice((0, 10, 5000, 256 << 10)) for _ in range(random.randrange(0, 9000))]
        for cut, most, most_bytes in (
            (calls_of, MAX_CALL_OBJECTS, MAX_CALL_BYTES),
            (pieces_of, MAX_PIECE_OBJECTS, MAX_PIECE_BYTES),
        ):
            parts = [sizes[part] for part in cut(sizes)]
            assert [size for part in parts for size in part] == sizes
            assert all(0 < len(part) <= most and sum(part) <= most_bytes for part in parts)


def test_a_source_that_sends_messages_without_objects_is_given_up() -> None:
    """They are no progress, however many come."""

    async def main() -> None:
        async def answer(request: Any, context: Any) -> None:
            while True:
                await context.write(encode_piece([]))

        handler = grpc.unary_stream_rpc_method_handler(answer, response_serializer=None)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with asyncio.timeout(10), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(TransferError, match="without any"):
                    async for _ in read_packed(channel, data_pb2.ReadPackedRequest(names=["a"]), "n1", 1.0):
                        pass
        finally:
            await server.stop(None)

    asyncio.run(main())
