"""Small objects, many in one call: the gRPC connection carries them in messages that are whole in themselves.

What an object of 4 KiB costs is the round trip for a ticket and the one for its bytes, so neither is made. The
receiver names what it wants of one container, and knows from elsewhere what each object must be.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF

from replicator.errors import (
    DeadlineExceededError,
    InvalidIdError,
    PeerUnavailableError,
    ReplicatorError,
    TransferError,
    TransferStalledError,
)
from replicator.packs import MAX_CALL_OBJECTS
from replicator.rpc_errors import abort, error_from_rpc
from replicator.transfer.grpc_lane import SERVICE
from replicator.transfer.serve_limit import ServeLimit, TokenBucket
from replicator.v1 import data_pb2

METHOD = "ReadPacked"
MAX_READS = 8

_ABSENT = 0xFFFFFFFF

Payloads = Sequence[memoryview | None]
"""Of consecutive objects; None for one that the source does not have."""


def encode_piece(payloads: Sequence[bytes | None]) -> bytes:
    """One message."""
    sizes = [_ABSENT if payload is None else len(payload) for payload in payloads]
    head = struct.pack(f"<{len(sizes) + 1}I", len(sizes), *sizes)
    return b"".join((head, *(payload for payload in payloads if payload)))


def decode_piece(message: bytes) -> Payloads:
    """The payloads in one message, of which they are views. Raises TransferError for what is no such message."""
    view = memoryview(message).toreadonly()
    try:
        (count,) = struct.unpack_from("<I", view)
        if count > MAX_CALL_OBJECTS:
            raise TransferError(f"expected at most {MAX_CALL_OBJECTS} objects in a message, found {count}")
        sizes = struct.unpack_from(f"<{count}I", view, 4)
    except struct.error:
        raise TransferError(f"expected a message of packed objects, found {len(view)} bytes without a head") from None
    payloads: list[memoryview | None] = []
    at = 4 + 4 * count
    for size in sizes:
        payloads.append(None if size == _ABSENT else view[at : at + size])
        at += 0 if size == _ABSENT else size
    if at != len(view):
        raise TransferError(f"expected {at} bytes in a message of {count} packed objects, found {len(view)}")
    return payloads


async def read_packed(
    channel: grpc.aio.Channel, request: data_pb2.ReadPackedRequest, whom: str, progress_timeout_s: float
) -> AsyncIterator[Payloads]:
    """Ask a source for objects; their payloads as they come, in the order of `request.names`, nothing verified.

    Raises:
        TransferStalledError: nothing came for `progress_timeout_s`.
        PeerUnavailableError: there is no connection.
        TransferError: the connection broke, or something else came than was asked for.
        UnsupportedError: the source does not pack objects.
        ReplicatorError: what the source raised, for instance StaleEpochError.
    """
    # Without a deserializer the message is handed on as the bytes that came.
    read: Any = channel.unary_stream(
        f"/{SERVICE}/{METHOD}",
        request_serializer=data_pb2.ReadPackedRequest.SerializeToString,
        response_deserializer=None,
    )
    call: Any = None
    count = 0
    awaited = len(request.names)
    try:
        call = read(request)
        while True:
            async with asyncio.timeout(progress_timeout_s):
                message: Any = await call.read()
            if message is EOF:
                break
            payloads = decode_piece(message)
            if not payloads:
                raise TransferError(f"{whom}: expected objects, found a message without any")
            count += len(payloads)
            if count > awaited:
                raise TransferError(f"{whom}: expected {awaited} objects, found more")
            yield payloads
    except TimeoutError as error:
        if isinstance(error, ReplicatorError):
            raise
        raise TransferStalledError(
            f"{whom}: no byte for {progress_timeout_s:.1f} s, after {count} of {awaited} objects"
        ) from None
    except grpc.aio.AioRpcError as error:
        meaning = error_from_rpc(error, f"{awaited} small objects", whom, progress_timeout_s)
        if (count and isinstance(meaning, PeerUnavailableError)) or isinstance(meaning, DeadlineExceededError):
            meaning = TransferError(f"after {count} of {awaited} objects: {meaning}")
        raise meaning from None
    except grpc.aio.UsageError as error:
        raise TransferError(f"{whom}: the channel was closed: {error}") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise TransferError(f"{whom}: the channel was closed after {count} of {awaited} objects") from None
    finally:
        if call is not None:
            call.cancel()
    if count != awaited:
        raise TransferError(f"{whom}: the stream ended after {count} of {awaited} objects")


OpenPacked = Callable[[data_pb2.ReadPackedRequest], Iterator[Callable[[], bytes]]]
"""Checks a request, and gives what reads one message of the answer after the other, each in any thread.

Raises InvalidIdError, StaleEpochError."""


def packed_service(
    open_packed: OpenPacked,
    *,
    max_reads: int = MAX_READS,
    send_timeout_s: float = 30.0,
    serve_limit: ServeLimit | None = None,
    is_background: Callable[[data_pb2.ReadPackedRequest], bool] = lambda request: False,
) -> grpc.GenericRpcHandler:
    """The server's side, for `grpc.aio.Server.add_generic_rpc_handlers`.

    Args:
        open_packed: called in the event loop for each request.
        max_reads: calls served at a time; more wait, for at most `send_timeout_s`.
        send_timeout_s: a call of which the client takes nothing for this long is given up.
        serve_limit: shared with whatever else sends; None: no limit.
        is_background: whether an answer counts against that limit's share for the background.
    """
    slots = asyncio.Semaphore(max_reads)
    # One thread at a time: more of them would only wait for each other in the interpreter.
    reading = asyncio.Lock()
    limit = serve_limit or ServeLimit()

    async def answer(
        request: data_pb2.ReadPackedRequest, context: grpc.aio.ServicerContext[data_pb2.ReadPackedRequest, bytes]
    ) -> None:
        try:
            if not 0 < len(request.names) <= MAX_CALL_OBJECTS:
                raise InvalidIdError(f"expected 1 to {MAX_CALL_OBJECTS} names, found {len(request.names)}")
            async with contextlib.AsyncExitStack() as held:
                async with asyncio.timeout(send_timeout_s):
                    await held.enter_async_context(slots)
                bucket = TokenBucket()
                held.enter_context(limit.sending(bucket, is_background(request)))
                for read in open_packed(request):
                    async with reading:
                        message = await asyncio.to_thread(read)
                    await bucket.take(len(message))
                    async with asyncio.timeout(send_timeout_s):
                        await context.write(message)
        except TimeoutError as error:
            if isinstance(error, ReplicatorError):
                await abort(context, error)
            await abort(context, TransferStalledError(f"nothing could be sent for {send_timeout_s:.1f} s"))
        except ReplicatorError as error:
            await abort(context, error)

    handler: Any = grpc.unary_stream_rpc_method_handler(
        answer, request_deserializer=data_pb2.ReadPackedRequest.FromString, response_serializer=None
    )
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
