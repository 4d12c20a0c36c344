"""The gRPC lane: the bytes of a range as a server stream of raw messages, over the channel that agents have anyway.

A message is the bytes themselves, at most 1 MiB of them, and not a serialized `Chunk`, which would cost a copy on
each side.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
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
from replicator.ids import NodeAddress, ObjectVersion
from replicator.native import copy_crc32c
from replicator.rpc_errors import abort, error_from_rpc
from replicator.transfer.lane import OnBlocks, OnBytes, ServedObject, Source
from replicator.transfer.serve_limit import ServeLimit, TokenBucket
from replicator.v1 import data_pb2, types_pb2
from replicator.wire import object_to_pb

CHUNK_BYTES = 1 << 20
"""Of a message, and so the least that counts as progress on this lane."""
MAX_READS = 32
SERVICE = "replicator.v1.DataService"
METHOD = "Read"

ChannelOf = Callable[[NodeAddress], Awaitable[grpc.aio.Channel]]
"""Gives a channel to a node. Raises PeerUnavailableError."""
SenderOf = Callable[[ObjectVersion], types_pb2.Sender]
"""Says who asks for an object, and for which job and epoch."""


class GrpcLane:
    """See `Lane`. Used in one event loop; the channels belong to whoever gives them."""

    name = "grpc"

    def __init__(self, channel_of: ChannelOf, sender_of: SenderOf) -> None:
        self._channel_of = channel_of
        self._sender_of = sender_of

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
        if length == 0:
            return
        whom = f"node {source.node_id} (grpc lane, {source.node.grpc_address})"
        filler = _Filler(target[:length], offset // block_size, block_size, on_bytes, on_blocks)
        call: Any = None
        try:
            async with asyncio.timeout(progress_timeout_s):
                channel = await self._channel_of(source.node)
            # Without a deserializer the message is handed on as the bytes that came.
            read: Any = channel.unary_stream(
                f"/{SERVICE}/{METHOD}",
                request_serializer=data_pb2.ReadRequest.SerializeToString,
                response_deserializer=None,
            )
            request = data_pb2.ReadRequest(
                sender=self._sender_of(object), object=object_to_pb(object), offset_bytes=offset, length_bytes=length
            )
            call = read(request)
            while True:
                async with asyncio.timeout(progress_timeout_s):
                    chunk: Any = await call.read()
                if chunk is EOF:
                    break
                filler.add(chunk)
        except TimeoutError as error:
            if isinstance(error, ReplicatorError):
                raise TransferStalledError(f"{whom}: {error}") from None
            raise TransferStalledError(
                f"{whom}: no byte for {progress_timeout_s:.1f} s, after {filler.size} of {length} bytes"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise _meaning(error, whom, progress_timeout_s, filler.size, length) from None
        except grpc.aio.UsageError as error:
            raise TransferError(f"{whom}: the channel was closed: {error}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TransferError(f"{whom}: the channel was closed after {filler.size} of {length} bytes") from None
        finally:
            if call is not None:
                call.cancel()
        if filler.size != length:
            raise TransferError(f"{whom}: the stream ended after {filler.size} of {length} bytes")

    async def close(self) -> None:
        """See `Lane.close`."""


def _meaning(
    error: grpc.aio.AioRpcError, whom: str, progress_timeout_s: float, size: int, length: int
) -> ReplicatorError:
    meaning = error_from_rpc(error, "the bytes of an object", whom, progress_timeout_s)
    if isinstance(meaning, PeerUnavailableError):
        # A connection that broke on the way is not one that could not be made.
        return TransferError(f"after {size} of {length} bytes: {meaning}") if size else meaning
    if type(meaning) is ReplicatorError or isinstance(meaning, DeadlineExceededError):
        return TransferError(f"{whom}: {meaning}")
    return type(meaning)(f"{whom}: {meaning}")


class _Filler:
    """Copies chunks into the target one after the other, and reports each block that they complete."""

    def __init__(
        self, target: memoryview, first_block: int, block_size: int, on_bytes: OnBytes, on_blocks: OnBlocks
    ) -> None:
        self.size = 0
        self._target = target
        self._first_block = first_block
        self._block_size = block_size
        self._crc = 0
        self._on_bytes = on_bytes
        self._on_blocks = on_blocks

    def add(self, chunk: bytes) -> None:
        if len(chunk) > len(self._target) - self.size:
            raise TransferError(f"expected {len(self._target)} bytes, but the stream goes on")
        rest = memoryview(chunk)
        while rest:
            block, filled = divmod(self.size, self._block_size)
            piece = rest[: self._block_size - filled]
            self._crc = copy_crc32c(self._target[self.size :], piece, self._crc if filled else 0)
            self.size += len(piece)
            rest = rest[len(piece) :]
            if self.size % self._block_size == 0 or self.size == len(self._target):
                self._on_blocks(self._first_block + block, [self._crc])
        self._on_bytes(len(chunk))


OpenForRead = Callable[[data_pb2.ReadRequest], ServedObject]
"""Opens the object that a request names. Raises InvalidIdError, StaleEpochError, ObjectNotFoundError."""


def data_service(
    open_object: OpenForRead,
    *,
    max_reads: int = MAX_READS,
    send_timeout_s: float = 30.0,
    serve_limit: ServeLimit | None = None,
    is_background: Callable[[data_pb2.ReadRequest], bool] = lambda request: False,
) -> grpc.GenericRpcHandler:
    """The server's side, for `grpc.aio.Server.add_generic_rpc_handlers`.

    Args:
        open_object: called in the event loop for each request.
        max_reads: streams sent at a time; more wait, for at most `send_timeout_s`.
        send_timeout_s: a stream of which the client takes nothing for this long is given up.
        serve_limit: shared with whatever else sends; None: no limit.
        is_background: whether an answer counts against that limit's share for the background.
    """
    slots = asyncio.Semaphore(max_reads)
    limit = serve_limit or ServeLimit()

    async def read(
        request: data_pb2.ReadRequest, context: grpc.aio.ServicerContext[data_pb2.ReadRequest, bytes]
    ) -> None:
        try:
            try:
                async with asyncio.timeout(send_timeout_s):
                    await slots.acquire()
            except TimeoutError:
                raise TransferError(
                    f"all {max_reads} reads at a time are taken, for {send_timeout_s:.1f} s now; try another source"
                ) from None
            try:
                # The object stays open, and so its shared lock held, until its last byte was handed to gRPC.
                bucket = TokenBucket()
                with open_object(request) as served, limit.sending(bucket, is_background(request)):
                    for chunk in _chunks(served, request.offset_bytes, request.length_bytes):
                        await bucket.take(len(chunk))
                        async with asyncio.timeout(send_timeout_s):
                            await context.write(chunk)
            finally:
                slots.release()
        except TimeoutError:
            await abort(context, TransferStalledError(f"the client took nothing for {send_timeout_s:.1f} s"))
        except ReplicatorError as error:
            await abort(context, error)

    handler: Any = grpc.unary_stream_rpc_method_handler(
        read, request_deserializer=data_pb2.ReadRequest.FromString, response_serializer=None
    )
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})


def _chunks(served: ServedObject, offset: int, length: int) -> Iterator[bytes]:
    size = served.info.size
    end = offset + length
    if end > size:
        raise InvalidIdError(f"{served.info.object} has {size} bytes, but {length} from {offset} on were asked for")
    while offset < end:
        chunk = os.pread(served.fd, min(CHUNK_BYTES, end - offset), offset)
        if not chunk:
            raise TransferError(f"the file of {served.info.object} ends at {offset}, {end - offset} bytes too early")
        offset += len(chunk)
        yield chunk
