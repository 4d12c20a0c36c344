"""Requests that are no messages: refused like any other wrong request, and not a failure of the agent with a trace."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from replicator.errors import InvalidIdError
from replicator.rpc_errors import abort

Handler = Any
"""A grpc.RpcMethodHandler, which grpc gives no types for."""


class DecodeGuard(grpc.aio.ServerInterceptor):
    """For every method of a server. Without it gRPC logs a trace for whatever bytes somebody sends to the port."""

    def __init__(self) -> None:
        self._guarded: dict[str, Handler] = {}  # by method; there are as many as the server has

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's handler, or None where there is none."""
        method: str = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is None:
            found = await continuation(handler_call_details)
            if found is None or found.request_deserializer is None:
                return found
            guarded = self._guarded[method] = _guarded(found, method)
        return guarded


def _guarded(found: Handler, method: str) -> Handler:
    decode = found.request_deserializer

    def refused(error: DecodeError) -> InvalidIdError:
        return InvalidIdError(f"the request of {method} cannot be decoded: {error}")

    def decode_part(data: bytes) -> Any:
        """Of a stream, which raises it where the method reads the stream."""
        try:
            return decode(data)
        except DecodeError as error:
            raise refused(error) from None

    def decode_whole(data: bytes) -> Any:
        """What is raised here gRPC takes for a failure of the server."""
        try:
            return decode(data)
        except DecodeError as error:
            return refused(error)

    if found.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler if found.response_streaming else grpc.stream_unary_rpc_method_handler
        )
        return make(found.stream_stream or found.stream_unary, decode_part, found.response_serializer)
    if not found.response_streaming:
        return grpc.unary_unary_rpc_method_handler(
            _or_abort(found.unary_unary), decode_whole, found.response_serializer
        )
    stream = found.unary_stream
    many = _or_abort_many(stream) if inspect.isasyncgenfunction(stream) else _or_abort(stream)
    return grpc.unary_stream_rpc_method_handler(many, decode_whole, found.response_serializer)


def _or_abort(function: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        if isinstance(request, InvalidIdError):
            await abort(context, request)
        return await function(request, context)

    return guarded


def _or_abort_many(function: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, InvalidIdError):
            await abort(context, request)
        async for reply in function(request, context):
            yield reply

    return guarded
