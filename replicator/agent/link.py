"""One connection to one address, and who was found there. Only `PeerDirectory` uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc.aio import EOF

from replicator.errors import DeadlineExceededError, PeerUnavailableError
from replicator.ids import NodeAddress
from replicator.rpc_errors import KIND_KEY, error_from_rpc

_PACKAGE = "/replicator.v1."
# Metadata of every call but Hello: the process it is meant for. Another one at the same address refuses it.
MEANT_FOR_KEY = "replicator-meant-for"
# Trailing metadata of that refusal.
NOT_ME_KEY = "replicator-not-me"

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
_FAILURES = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError)


class LinkBrokenError(Exception):
    """The connection reaches nobody, or no longer the process that was greeted: a new one may help.

    Args:
        error: what to tell when it does not.
        unresolved: the name of the host was not found; it may be, later (F34).
    """

    def __init__(self, error: PeerUnavailableError, *, unresolved: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.unresolved = unresolved


class Link:
    """A gRPC channel to one address. It is thrown away, never mended, once a call on it found nobody (F45)."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.node: NodeAddress | None = None
        self.bulk_address = ""
        self.greeting = asyncio.Lock()
        self.calls = 0

    @property
    def greeted(self) -> bool:
        """Whether a Hello was answered on the connection that is still up."""
        return self.node is not None and self.channel.get_state() == grpc.ChannelConnectivity.READY

    @property
    def whom(self) -> str:
        """For messages: the node and its address."""
        return f"node {self.node.node_id} ({self.address})" if self.node else f"the agent at {self.address}"

    async def unary(
        self, method: str, request: Message, reply_type: type[ReplyT], awaited: str, seconds: float, deadline_s: float
    ) -> ReplyT:
        """One call of package replicator.v1, or any other when `method` begins with a slash.

        It may take `seconds` more; a message about it speaks of the whole `deadline_s`.

        Raises:
            LinkBrokenError: nobody, or another process, is there.
            ReplicatorError: what the peer raised, or DeadlineExceededError.
        """
        function: Any = self.channel.unary_unary(
            method if method.startswith("/") else _PACKAGE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        self.calls += 1
        try:
            reply: ReplyT = await function(request, timeout=max(seconds, 0.001), metadata=self._metadata())
            return reply
        except _FAILURES as error:
            raise self._meaning(error, awaited, deadline_s) from None
        finally:
            self.calls -= 1

    async def upload(
        self,
        method: str,
        requests: Iterable[RequestT],
        request_type: type[RequestT],
        reply_type: type[ReplyT],
        awaited: str,
        seconds: float,
        deadline_s: float,
    ) -> ReplyT:
        """A client-streaming call. Raises like `unary`."""
        function: Any = self.channel.stream_unary(
            _PACKAGE + method,
            request_serializer=request_type.SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        self.calls += 1
        try:
            reply: ReplyT = await function(
                _asynchronous(requests), timeout=max(seconds, 0.001), metadata=self._metadata()
            )
            return reply
        except _FAILURES as error:
            raise self._meaning(error, awaited, deadline_s) from None
        finally:
            self.calls -= 1

    async def stream(
        self, method: str, request: Message, reply_type: type[ReplyT], awaited: str, idle_s: float
    ) -> AsyncIterator[ReplyT]:
        """A server-streaming call; each message must come within `idle_s`. Raises like `unary`."""
        function: Any = self.channel.unary_stream(
            _PACKAGE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        self.calls += 1
        call: Any = None
        try:
            call = function(request, metadata=self._metadata())
            while True:
                async with asyncio.timeout(idle_s):
                    message: Any = await call.read()
                if message is EOF:
                    return
                yield message
        except TimeoutError:
            raise DeadlineExceededError.of(awaited, self.whom, idle_s) from None
        except _FAILURES as error:
            raise self._meaning(error, awaited, idle_s) from None
        finally:
            self.calls -= 1
            if call is not None:
                call.cancel()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((MEANT_FOR_KEY, str(self.node.identity)),) if self.node else ()

    def _meaning(self, error: BaseException, awaited: str, deadline_s: float) -> BaseException:
        """The exception to raise instead of `error`, which is one of _FAILURES."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return error
            return LinkBrokenError(
                PeerUnavailableError(f"{self.whom}: the connection was closed while {awaited} was awaited")
            )
        if not isinstance(error, grpc.aio.AioRpcError):
            return LinkBrokenError(PeerUnavailableError(f"{self.whom} cannot be asked for {awaited}: {error}"))
        metadata: Any = error.trailing_metadata() or ()
        keys = {key for key, _ in metadata}
        meaning = error_from_rpc(error, awaited, self.whom, deadline_s)
        if NOT_ME_KEY in keys or (KIND_KEY not in keys and isinstance(meaning, PeerUnavailableError)):
            details = error.details() or ""
            unresolved = "DNS" in details or "resolv" in details
            return LinkBrokenError(PeerUnavailableError(str(meaning)), unresolved=unresolved)
        return meaning


async def _asynchronous(items: Iterable[RequestT]) -> AsyncIterator[RequestT]:
    for item in items:
        yield item
