"""The side of the server in simulated gRPC: real handlers, found by their method, run in the process that has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

import grpc
from grpc.aio import AbortError

from .loop import Process
from .network import Endpoint, Network


class Call(Protocol):
    """The caller's side of a call, where its messages go."""

    def deliver(self, peer: Endpoint, kind: str, value: Any) -> None: ...


class SimServer:
    """A gRPC server of one process. Stands for `grpc.aio.Server` where services are registered."""

    def __init__(self, network: Network, process: Process, address: str, node: str) -> None:
        self.endpoint = Endpoint(process, address, node, self)
        self._network = network
        self._generic: list[Any] = []
        self._methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, method in handlers.items():
            self._methods[f"/{service}/{name}"] = method

    async def start(self) -> None:
        """Accept calls."""
        self._network.listen(self.endpoint)

    def method(self, name: str) -> Any:
        """The handler of a method, or None."""
        if name not in self._methods:
            details = _Details(name)
            found = (handler.service(details) for handler in self._generic)
            self._methods[name] = next((one for one in found if one is not None), None)
        return self._methods[name]


class _Details:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class Reply:
    """Where a handler's messages go; nowhere for one that does a call for the second time."""

    def __init__(self, call: Call, peer: Endpoint, is_heard: bool) -> None:
        self._call = call
        self._peer = peer
        self._is_heard = is_heard

    def message(self, data: bytes) -> None:
        if self._is_heard:
            self._call.deliver(self._peer, "message", data)

    def end(self, code: grpc.StatusCode, details: str = "", trailing: tuple[Any, ...] = ()) -> None:
        if self._is_heard:
            self._call.deliver(self._peer, "end", (code, details, trailing))


class SimContext:
    """What a handler sees of its call. Stands for `grpc.aio.ServicerContext`."""

    def __init__(self, metadata: tuple[Any, ...], serializer: Any, reply: Reply) -> None:
        self._metadata = metadata
        self._serializer = serializer
        self._reply = reply
        self.aborted: tuple[grpc.StatusCode, str, tuple[Any, ...]] | None = None

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._metadata

    def peer(self) -> str:
        return "sim"

    async def write(self, message: Any) -> None:
        self._reply.message(encoded(message, self._serializer))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.aborted = (code, details, tuple(trailing_metadata))
        raise AbortError(details)


async def serve(
    server: SimServer, name: str, metadata: tuple[Any, ...], requests: list[bytes], uploads: bool, reply: Reply
) -> None:
    method = server.method(name)
    if method is None:
        reply.end(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return
    context = SimContext(metadata, method.response_serializer, reply)
    decode = method.request_deserializer or (lambda data: data)
    try:
        if method.response_streaming:
            function = method.stream_stream if method.request_streaming else method.unary_stream
            result = function(_asynchronous(requests, decode) if uploads else decode(requests[0]), context)
            if hasattr(result, "__aiter__"):
                async for message in result:
                    await context.write(message)
            else:
                await result
        else:
            function = method.stream_unary if method.request_streaming else method.unary_unary
            message = await function(_asynchronous(requests, decode) if uploads else decode(requests[0]), context)
            reply.message(encoded(message, method.response_serializer))
    except AbortError:
        assert context.aborted is not None
        reply.end(*context.aborted)
    except asyncio.CancelledError:
        reply.end(grpc.StatusCode.CANCELLED, "the server gave it up")
        raise
    except Exception as error:
        reply.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        raise
    else:
        reply.end(grpc.StatusCode.OK)


async def _asynchronous(requests: list[bytes], decode: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    for data in requests:
        yield decode(data)


def encoded(message: Any, serializer: Callable[[Any], bytes] | None) -> bytes:
    return bytes(message) if serializer is None else serializer(message)
