"""A process's link to the agent of its node, which outlives the agent.

It holds the client lock for life and listens to the agent's events in one daemon thread. When the agent is gone
that thread finds the next one, or starts it, and lets a subclass tell it what it missed.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from replicator.client import fork
from replicator.client.connection import Connection
from replicator.client.launch import LOG_FILE, AgentRecord, ensure_agent, find_agent
from replicator.errors import AgentUnavailableError, DeadlineExceededError, ReplicatorError
from replicator.ids import NodeAddress, NodeIdentity
from replicator.store.client_lock import ClientLock
from replicator.store.paths import open_root
from replicator.v1 import local_pb2
from replicator.version import version
from replicator.wire import labels_from_pb

logger = logging.getLogger("replicator.client")

# An agent that this library may start is started again when it has been away for this long.
RESTART_AFTER_S = 1.0
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0

ReplyT = TypeVar("ReplyT", bound=Message)


class AgentLink:
    """Thread-safe; in a forked child every method raises ForkedClientError.

    Args:
        root: the store's root; the agent's record is looked for there.
        deadline_s: the one knob for waits. A call that only this node takes part in gets a sixth of it.
        auto_start: start an agent when there is none, now and when it was killed later.

    Raises:
        AgentUnavailableError, DeadlineExceededError: no agent, or it does not answer.
        StoreRootError: the root cannot be used.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        deadline_s: float = 30.0,
        auto_start: bool = True,
        idle_exit_s: float | None = None,
    ) -> None:
        self._pid = os.getpid()
        self.root = Path(root)
        self.deadline_s = deadline_s
        self.call_deadline_s = deadline_s / 6
        self.client_id = uuid.uuid4().hex
        self._auto_start = auto_start
        self._idle_exit_s = idle_exit_s
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._quiet = True  # no call to a former agent is under way

        end = time.monotonic() + deadline_s
        first = self._open(deadline_s, may_start=auto_start)
        self.paths = open_root(self.root, create=False)
        self._lock = ClientLock(self.paths, self.client_id)
        self._lock.acquire()
        try:
            first = self._attach_first(first, end)
        except BaseException:
            self._lock.close()
            raise
        self._connection = first
        self._thread = threading.Thread(target=self._listen, args=(first,), name="replicator-events", daemon=True)
        fork.register(self)
        self._thread.start()
        atexit.register(self.close)

    def fork_parts(self) -> Iterable[object]:
        """For `fork.Forkable`."""
        connection = self._connection
        yield from (self.__dict__, self._lock, self._thread, self._changed)
        if connection is not None:
            yield from connection.parts()

    def close(self) -> None:
        """Detach. The agent goes on with what it was asked for. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid or self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        with self._changed:
            connection, self._connection = self._connection, None
            self._changed.notify_all()
        if connection is not None:
            connection.close()
        self._thread.join(timeout=self.call_deadline_s)
        self._lock.close()
        self._ended()

    # -- the agent behind it

    @property
    def node(self) -> NodeAddress:
        """This node as its peers reach it. Changes when the agent is restarted."""
        attached = self._attached
        return NodeAddress(
            NodeIdentity(attached.node.node_id, attached.node.incarnation),
            attached.grpc_address,
            labels_from_pb(attached.labels),
        )

    @property
    def connected(self) -> bool:
        """Whether an agent was there when last heard of."""
        connection = self._connection
        return connection is not None and not connection.lost.is_set()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def wait_connected(self, deadline_s: float) -> None:
        """Wait for an agent.

        Raises:
            AgentUnavailableError: none is there within `deadline_s`.
        """
        self.check()
        with self._changed:
            self._changed.wait_for(lambda: self.connected or self._closed.is_set(), deadline_s)
        self.check()
        if not self.connected:
            raise AgentUnavailableError(
                f"no agent answered in {self.root} for {deadline_s:.1f} s; see {self.root / LOG_FILE}, "
                f"or start replicator-agent --root {self.root}"
            )

    def check(self) -> None:
        """Whether this handle may be used.

        Raises:
            ForkedClientError: this process was forked from the one that made it.
            ReplicatorError: it is closed.
        """
        fork.check_owner(self._pid, "this session")
        if self._closed.is_set():
            raise ReplicatorError("this session is closed; call replicator.init() for a new one")

    def connection(self) -> Connection:
        """The connection now, or AgentUnavailableError at once."""
        self.check()
        connection = self._connection
        if connection is None or connection.lost.is_set():
            raise AgentUnavailableError(f"no agent is reachable in {self.root} at the moment")
        return connection

    def call(self, method: str, request: Message, reply_type: type[ReplyT], deadline_s: float | None = None) -> ReplyT:
        """A call that only this node takes part in. An agent that does not answer it is given up (see `connected`).

        Raises:
            AgentUnavailableError: no agent, now or before it answered.
            ReplicatorError: what the agent raised.
        """
        return self.call_on(self.connection(), method, request, reply_type, deadline_s)

    def call_on(
        self,
        connection: Connection,
        method: str,
        request: Message,
        reply_type: type[ReplyT],
        deadline_s: float | None = None,
    ) -> ReplyT:
        try:
            return connection.call(method, request, reply_type, deadline_s or self.call_deadline_s)
        except DeadlineExceededError as error:
            connection.close()
            raise AgentUnavailableError(f"{error}; it is not asked again before it answers Attach") from None

    def call_patiently(
        self, method: str, request: Message, reply_type: type[ReplyT], deadline_s: float, awaited: str
    ) -> ReplyT:
        """A call that may wait for peers, repeated when the agent is replaced meanwhile. It must be idempotent.

        Raises:
            AgentUnavailableError, DeadlineExceededError: no answer within `deadline_s`.
            ReplicatorError: what the agent raised.
        """
        end = time.monotonic() + deadline_s
        while True:
            self.wait_connected(max(end - time.monotonic(), 0.0))
            try:
                rest = max(end - time.monotonic(), 0.001)
                return self.connection().call(method, request, reply_type, rest, awaited)
            except AgentUnavailableError:
                if time.monotonic() >= end:
                    raise

    # -- for the subclass

    def _on_event(self, event: local_pb2.AttachEvent) -> None:
        """The agent says something. Called in the thread."""

    def _on_reply(self, reply: Message) -> None:
        """The agent answered a call. Called in the caller's thread, before it has the answer."""

    def _segments_in_use(self) -> list[str] | None:
        """The segments that this process has from agents. None: it cannot tell. Called in the thread."""
        return None

    def _prepare(self, connection: Connection) -> None:
        """A next agent is attached, and nothing else speaks to it yet. Called in the thread."""

    def _repeat(self, connection: Connection) -> None:
        """It is the agent now: what was asked or done until here saw none. Called in the thread."""

    def _still_away(self, since: float) -> None:
        """There has been no agent since then (monotonic). Called in the thread, again and again."""

    def _ended(self) -> None:
        """This link is closed."""

    # -- the thread

    def _attach_request(self) -> local_pb2.AttachRequest:
        request = local_pb2.AttachRequest(client_id=self.client_id, pid=self._pid, version=version(), batched=True)
        in_use = self._segments_in_use() if self._quiet else None
        if in_use is not None:
            request.tells_segments = True
            request.segments.extend(in_use)
        return request

    def _open(self, deadline_s: float, *, may_start: bool) -> Connection:
        """A connection to the agent that is published, or to one started now; not yet attached."""
        if may_start:
            record: AgentRecord | None = ensure_agent(self.root, deadline_s=deadline_s, idle_exit_s=self._idle_exit_s)
        else:
            record = find_agent(self.root)
        if record is None:
            raise AgentUnavailableError(f"no agent runs in {self.root}; start replicator-agent --root {self.root}")
        return Connection(record, self._on_reply)

    def _attach_first(self, connection: Connection, end: float) -> Connection:
        """Attach; when the agent that was found is just ending, to the next one, until the time is over."""
        while True:
            try:
                self._attached = connection.attach(self._attach_request(), max(end - time.monotonic(), 0.1))
                return connection
            except AgentUnavailableError:
                connection.close()
                if time.monotonic() >= end:
                    raise
            except BaseException:
                connection.close()
                raise
            time.sleep(_MIN_BACKOFF_S)
            connection = self._open(max(end - time.monotonic(), 0.1), may_start=self._auto_start)

    def _listen(self, connection: Connection | None) -> None:
        while connection is not None:
            for event in connection.events():
                try:
                    self._on_event(event)
                except Exception:
                    logger.exception("an event of the agent could not be understood")
            connection.close()
            # What it was told until now is all that it will ever be told by that agent.
            self._quiet = connection.wait_quiet(self.call_deadline_s)
            if not self._closed.is_set():
                logger.warning("lost %s; saves go on locally until it is back", connection.whom)
            connection = self._reconnect()

    def _reconnect(self) -> Connection | None:
        """The next connection, after back-off; None when this handle was closed."""
        lost_at = time.monotonic()
        backoff = _MIN_BACKOFF_S
        reason = ""
        while not self._closed.wait(backoff):
            try:
                may_start = self._auto_start and time.monotonic() - lost_at >= RESTART_AFTER_S
                connection = self._open(self.deadline_s, may_start=may_start)
                self._take_over(connection)
            except ReplicatorError as error:
                if str(error) != reason:
                    reason = str(error)
                    logger.warning("no agent yet: %s", reason)
                backoff = min(backoff * 2, _MAX_BACKOFF_S)
                self._still_away(lost_at)
                continue
            logger.warning("%s is there after %.1f s", connection.whom, time.monotonic() - lost_at)
            return connection
        return None

    def _take_over(self, connection: Connection) -> None:
        """Attach, tell the agent what it missed, and ask again for what is outstanding."""
        try:
            self._attached = connection.attach(self._attach_request(), self.call_deadline_s)
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        with self._changed:
            self._connection = connection
            self._changed.notify_all()
        if self._closed.is_set():
            connection.close()
        try:
            self._repeat(connection)
        except AgentUnavailableError:
            return  # its stream of events has ended as well
