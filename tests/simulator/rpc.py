"""gRPC without sockets: channels and servers for real stubs and real handlers, and messages that are really encoded.

What a call meets is what `Network` says; how it looks to the caller is what gRPC makes of it: UNAVAILABLE when a
connection is refused or breaks, DEADLINE_EXCEEDED when nothing comes, and a handler that is cancelled when nobody
listens any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc
import grpc.aio
from grpc.aio import EOF, AioRpcError, Metadata

from replicator.v1 import types_pb2

from .loop import Handle, Process
from .network import CONNECT_S, KEEPALIVE_S, Endpoint, Network
from .rpc_server import Reply, encoded, serve

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
# Payloads that have a checksum of their own; gRPC's frames are taken to be protected by TCP.
_RAW = ("/replicator.v1.DataService/Read", "/replicator.v1.DataService/ReadPacked")
_MANIFESTS = ("/replicator.v1.PeerService/PutManifest", "/replicator.v1.PeerService/GetManifest")


class SimChannel:
    """A channel of one process to one address. Stands for `grpc.aio.Channel`."""

    def __init__(self, network: Network, caller: Process, node: str, address: str) -> None:
        self.network = network
        self.caller = caller
        self.node = node
        self.address = address
        self.peer: Endpoint | None = None
        self.closed = False
        self._calls: dict[SimCall, None] = {}
        self._idle = asyncio.Event()
        caller.on_killed.append(self._caller_died)

    def _caller_died(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if self.closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        connected = self.peer is not None and self.peer.process.alive
        return grpc.ChannelConnectivity.READY if connected else grpc.ChannelConnectivity.IDLE

    def unary_unary(self, method: str, **coders: Any) -> Callable[..., SimCall]:
        return self._callable(method, False, **coders)

    def stream_unary(self, method: str, **coders: Any) -> Callable[..., SimCall]:
        return self._callable(method, True, **coders)

    def unary_stream(self, method: str, **coders: Any) -> Callable[..., SimCall]:
        return self._callable(method, False, **coders)

    def _callable(
        self, method: str, uploads: bool, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., SimCall]:
        def start(request: Any, timeout: float | None = None, metadata: Any = None, **_: Any) -> SimCall:
            if self.closed:
                raise grpc.aio.UsageError("Channel is closed.")
            call = SimCall(self, method, tuple(metadata or ()), response_deserializer)
            self._calls[call] = None
            call.start(request, uploads, request_serializer, timeout)
            return call

        return start

    def ended(self, call: SimCall) -> None:
        self._calls.pop(call, None)
        if not self._calls:
            self._idle.set()

    async def close(self, grace: float | None = None) -> None:
        """Calls that have not ended within `grace` are cancelled."""
        if grace and self._calls:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._idle.wait()
        self.closed = True
        for call in list(self._calls):
            call.cancel()


class SimCall:
    """One call as the caller has it. Everything that comes is in `_events` first, so that a reader sees it in order."""

    def __init__(
        self, channel: SimChannel, method: str, metadata: tuple[Any, ...], deserializer: Callable[[bytes], Any] | None
    ) -> None:
        self._channel = channel
        self._network = channel.network
        self._method = method
        self._metadata = metadata
        self._deserializer = deserializer
        self._events: deque[tuple[str, Any]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._server: Endpoint | None = None
        self._handlers: list[asyncio.Task[None]] = []
        self._arrived_at = 0.0
        self._over = False
        # A connection that lost something brings nothing that comes after it.
        self._is_lost = False
        self._cancelled = False
        self._timer: Handle | None = None

    # -- the caller's side

    def start(self, request: Any, uploads: bool, serializer: Any, timeout: float | None) -> None:
        loop = self._network.loop
        if timeout is not None:
            self._timer = loop.call_later(timeout, self._deadline, context=self._network.context)
        if uploads:
            loop.create_task(self._upload(request, serializer))
        else:
            self._connect([encoded(request, serializer)], uploads=False)

    async def _upload(self, requests: AsyncIterator[Any], serializer: Any) -> None:
        self._connect([encoded(request, serializer) async for request in requests], uploads=True)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._reply().__await__()

    async def _reply(self) -> Any:
        reply = await self.read()
        if reply is EOF:
            raise AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), "no reply", None)
        try:
            await self.read()
        except AioRpcError:
            raise
        return reply

    async def read(self) -> Any:
        """The next message, or EOF. Raises AioRpcError."""
        try:
            while not self._events:
                if self._cancelled:
                    raise asyncio.CancelledError
                self._waiter = self._network.loop.create_future()
                await self._waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        kind, value = self._events[0] if self._events[0][0] == "end" else self._events.popleft()
        if kind == "message":
            if self._deserializer is None:
                return value
            try:
                return self._deserializer(value)
            except Exception as error:
                raise AioRpcError(grpc.StatusCode.INTERNAL, Metadata(), Metadata(), f"bad message: {error}") from None
        code, details, trailing = value
        if code is grpc.StatusCode.OK:
            return EOF
        raise AioRpcError(code, Metadata(), Metadata(*trailing), details, None)

    def cancel(self) -> bool:
        """Give it up; the server hears of it a little later."""
        if self._over:
            return False
        self._cancelled = True
        self._finish_handlers()
        self._end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        self._events.clear()
        return True

    def _deadline(self) -> None:
        if not self._over:
            self._finish_handlers()
            self._end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _finish_handlers(self) -> None:
        """Nobody waits for the handlers any more."""
        server = self._server
        if server is None or not self._network.reaches(self._channel.node, server.node):
            return
        for task in self._handlers:
            self._network.later(self._network.delay_s(self._channel.node, server.node), _cancel, server.process, task)

    def _end(self, code: grpc.StatusCode, details: str, trailing: tuple[Any, ...] = ()) -> None:
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._channel.ended(self)
        if self._server is not None:
            self._server.calls.pop(self, None)
        self._put("end", (code, details, trailing))

    def _put(self, kind: str, value: Any) -> None:
        self._events.append((kind, value))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- on the way

    def _connect(self, requests: list[bytes], uploads: bool) -> None:
        network, me = self._network, self._channel.node
        peer = self._channel.peer
        if peer is not None and peer.process.alive:
            self._send(peer, requests, uploads)
            return
        self._channel.peer = None
        found = network.find(self._channel.address)
        host = found.node if found is not None else self._channel.address.partition(":")[0]
        if network.known_cut(me, host):
            network.later(CONNECT_S * (1 + network.rng.random()), self._broken, "connection attempt timed out")
        elif found is None or network.happens("refused", me, host):
            network.later(network.delay_s(me, host), self._broken, "connection refused")
        else:
            network.later(2 * network.delay_s(me, host), self._connected, found, requests, uploads)

    def _connected(self, peer: Endpoint, requests: list[bytes], uploads: bool) -> None:
        if not peer.process.alive:
            self._broken("connection reset")
            return
        self._channel.peer = peer
        self._send(peer, requests, uploads)

    def _send(self, peer: Endpoint, requests: list[bytes], uploads: bool) -> None:
        network, me = self._network, self._channel.node
        self._server = peer
        if self._method in _MANIFESTS and uploads:
            requests = [self._flip_manifest(data, me, peer.node) for data in requests]
        if network.happens("cut", me, peer.node):
            network.later(network.delay_s(me, peer.node), self._break_connection, "connection reset by peer")
            return
        if not network.reaches(me, peer.node) or network.happens("request_lost", me, peer.node):
            network.later(KEEPALIVE_S, self._break_connection, "keepalive watchdog timeout")
            return
        times = (
            2 if not self._method.endswith(("Offer", "Attach")) and network.happens("duplicated", me, peer.node) else 1
        )
        for copy in range(times):
            network.later(network.delay_s(me, peer.node), self._arrive, peer, requests, uploads, copy == 0)

    def _arrive(self, peer: Endpoint, requests: list[bytes], uploads: bool, is_heard: bool) -> None:
        if self._over and is_heard:
            return
        if not peer.process.alive:
            if is_heard:
                self._network.later(self._network.delay_s(peer.node, self._channel.node), self._broken, "socket closed")
            return
        reply = Reply(self, peer, is_heard)
        task = peer.process.spawn(serve(peer.service, self._method, self._metadata, requests, uploads, reply))
        if is_heard:
            self._handlers.append(task)
            peer.calls[self] = None

    def peer_died(self, peer: Endpoint) -> None:
        """The process at the other end is no more."""
        if self._over:
            return
        if self._network.reaches(peer.node, self._channel.node):
            self._network.later(self._network.delay_s(peer.node, self._channel.node), self._broken, "socket closed")
        else:
            self._network.later(KEEPALIVE_S, self._broken, "keepalive watchdog timeout")

    def _break_connection(self, details: str) -> None:
        self._channel.peer = None
        self._finish_handlers()
        self._broken(details)

    def _broken(self, details: str) -> None:
        self._end(UNAVAILABLE, details)

    def deliver(self, peer: Endpoint, kind: str, value: Any) -> None:
        """The server has sent something."""
        network, me = self._network, self._channel.node
        if self._over or self._is_lost:
            return
        if not network.reaches(peer.node, me) or (kind == "end" and network.happens("reply_lost", peer.node, me)):
            self._is_lost = True
            network.later(KEEPALIVE_S, self._break_connection, "keepalive watchdog timeout")
            return
        if network.happens("cut", peer.node, me):
            self._is_lost = True
            network.later(network.delay_s(peer.node, me), self._break_connection, "connection reset by peer")
            return
        if kind == "message" and self._method in _RAW:
            value = network.flip(value, peer.node, me)
        if kind == "message" and self._method in _MANIFESTS and self._method.endswith("GetManifest"):
            value = self._flip_manifest(value, peer.node, me)
        # In order, whatever the delay of each.
        at = max(network.loop.time() + network.delay_s(peer.node, me), self._arrived_at)
        self._arrived_at = at
        network.later(at - network.loop.time(), self._received, kind, value)

    def _received(self, kind: str, value: Any) -> None:
        if self._over:
            return
        if kind == "message":
            self._put(kind, value)
        else:
            self._end(*value)

    def _flip_manifest(self, data: bytes, sender: str, receiver: str) -> bytes:
        chunk = types_pb2.ManifestChunk.FromString(data)
        changed = self._network.flip(chunk.data, sender, receiver)
        if changed is chunk.data:
            return data
        chunk.data = changed
        return chunk.SerializeToString()


def _cancel(process: Process, task: asyncio.Task[None]) -> None:
    if process.alive:
        task.cancel()
