"""One connection to one agent process over its unix socket: typed calls with deadlines, and the Attach stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from replicator import parts
from replicator.client.launch import AgentRecord
from replicator.errors import AgentUnavailableError, DeadlineExceededError, ReplicatorError
from replicator.rpc_errors import error_from_rpc
from replicator.rpc_options import channel_options
from replicator.v1 import local_pb2

_SERVICE = "/replicator.v1.LocalService/"
# What a call to an agent that is gone, or was replaced, ends with.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

ReplyT = TypeVar("ReplyT", bound=Message)


class Connection:
    """To the agent that `record` describes. Thread-safe. `lost` is set once it is known not to work any more.

    Args:
        on_reply: called with every reply of `call` before the caller has it, in the caller's thread.
    """

    def __init__(self, record: AgentRecord, on_reply: Callable[[Message], None] = lambda reply: None) -> None:
        self.record = record
        self._on_reply = on_reply
        self._calls = 0
        self._ended = threading.Condition()
        self.lost = threading.Event()
        self._channel = grpc.insecure_channel(f"unix:{record.socket}", options=channel_options())
        self._events: Any = None

    @property
    def whom(self) -> str:
        return f"the agent of this node ({self.record.node_id}, pid {self.record.pid})"

    def parts(self) -> Iterable[object]:
        """For `fork.Forkable`."""
        return (self, self._channel, self._events, self._ended)

    def attach(self, request: local_pb2.AttachRequest, deadline_s: float) -> local_pb2.Attached:
        """Open the stream of events; `events` gives what follows the first.

        Raises:
            AgentUnavailableError, DeadlineExceededError: it was not opened.
        """
        stream = self._channel.unary_stream(
            _SERVICE + "Attach",
            request_serializer=local_pb2.AttachRequest.SerializeToString,
            response_deserializer=local_pb2.AttachEvent.FromString,
        )
        self._events = stream(request, wait_for_ready=False)
        timer = threading.Timer(deadline_s, self._events.cancel)
        timer.daemon = True
        timer.start()
        started = time.monotonic()
        try:
            first = next(self._events)
        except grpc.RpcError as error:
            if time.monotonic() - started >= deadline_s:
                raise DeadlineExceededError.of("its answer to Attach", self.whom, deadline_s) from None
            raise self._error(error, "its answer to Attach", deadline_s) from None
        except StopIteration:
            raise AgentUnavailableError(f"{self.whom} closed the connection at once; see its log") from None
        finally:
            timer.cancel()
        if first.WhichOneof("event") != "attached":
            raise AgentUnavailableError(f"expected the first event of {self.whom} to be 'attached', found another one")
        attached: local_pb2.Attached = first.attached
        return attached

    def events(self) -> Iterator[local_pb2.AttachEvent]:
        """Blocks between events; ends when the connection is lost or closed."""
        try:
            yield from self._events
        except grpc.RpcError:
            pass
        self.lost.set()

    def call(
        self, method: str, request: Message, reply_type: type[ReplyT], deadline_s: float, awaited: str = ""
    ) -> ReplyT:
        """One call with one request and one reply, which may travel in parts.

        Args:
            method: of LocalService, or `Service/Method`.
            method: of the local service, or "<service>/<method>" of another one.
            awaited: what the reply is, for the error message.

        Raises:
            AgentUnavailableError: the agent is gone. The call may or may not have taken effect.
            DeadlineExceededError: it does not answer. The same.
            ReplicatorError: what the agent raised.
        """
        if self.lost.is_set():
            raise AgentUnavailableError(f"{self.whom} is not reachable; a new connection is being tried")
        path = method if "/" in method else f"LocalService/{method}"
        function = parts.stub(self._channel, path, type(request), reply_type)
        with self._counted():
            try:
                reply = function(request, deadline_s)
            except grpc.RpcError as error:
                raise self._error(error, awaited or f"its answer to {method}", deadline_s) from None
            except ValueError:
                raise self._closed_error() from None
            self._on_reply(reply)
        return reply

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._ended:
            self._calls += 1
        try:
            yield
        finally:
            with self._ended:
                self._calls -= 1
                self._ended.notify_all()

    def wait_quiet(self, deadline_s: float) -> bool:
        """Wait until no call is under way; after `close` none begins any more. False when one still is."""
        with self._ended:
            return self._ended.wait_for(lambda: not self._calls, deadline_s)

    def stream(
        self, method: str, request: Message, reply_type: type[ReplyT], idle_s: float, awaited: str
    ) -> Iterator[ReplyT]:
        """Messages of a server-streaming call, each of which must come within `idle_s` of the one before.

        Raises:
            The errors of `call`.
        """
        function = self._channel.unary_stream(
            _SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        try:
            replies: Any = function(request)
        except ValueError:
            raise self._closed_error() from None
        watch = _IdleWatch(idle_s, replies.cancel)
        try:
            for reply in replies:
                watch.touch()
                yield reply
        except grpc.RpcError as error:
            if watch.fired:
                raise DeadlineExceededError.of(awaited, self.whom, idle_s) from None
            raise self._error(error, awaited, idle_s) from None
        finally:
            watch.stop()
            replies.cancel()

    def close(self) -> None:
        """End the stream of events and all calls. Idempotent."""
        self.lost.set()
        if self._events is not None:
            self._events.cancel()
        self._channel.close()

    def _closed_error(self) -> AgentUnavailableError:
        """Another thread closed this connection between its being taken and the call: gRPC says so by a ValueError.

        A request that cannot be sent for any other reason is found when it is made.
        """
        return AgentUnavailableError(f"the connection to {self.whom} was closed, because it went away; try again")

    def _error(self, error: grpc.RpcError, awaited: str, deadline_s: float) -> ReplicatorError:
        if error.code() in _LOST:
            self.lost.set()
            return AgentUnavailableError(f"{self.whom} went away while {awaited} was awaited")
        return error_from_rpc(error, awaited, self.whom, deadline_s)


class _IdleWatch:
    """Calls `on_idle` once when `touch` was not called for `idle_s`."""

    def __init__(self, idle_s: float, on_idle: Any) -> None:
        self._idle_s = idle_s
        self._on_idle = on_idle
        self._last = time.monotonic()
        self._stopped = threading.Event()
        self.fired = False
        threading.Thread(target=self._run, name="replicator-idle-watch", daemon=True).start()

    def touch(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            rest = self._last + self._idle_s - time.monotonic()
            if rest <= 0:
                self.fired = True
                self._on_idle()
                return
            self._stopped.wait(rest)
