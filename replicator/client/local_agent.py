"""The trainer's handle on the agent of its node.

It holds the client lock for life, listens to the agent's events in one daemon thread, and outlives the agent:
when the agent is killed, objects are created and published through the store's own functions, and once an agent
is back it is told of them and asked again for everything it had not finished. Nothing here waits for a peer,
except the calls that say so.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from replicator.client import fork
from replicator.client.connection import Connection
from replicator.client.launch import LOG_FILE, ensure_agent, find_agent
from replicator.client.outstanding import CommitFutures, Outstanding, ReplicaInfo
from replicator.decide.types import Manifest
from replicator.errors import (
    AgentUnavailableError,
    DeadlineExceededError,
    NotFoundError,
    ReplicationError,
    ReplicatorError,
    StaleEpochError,
)
from replicator.ids import NodeAddress, NodeIdentity, ObjectVersion
from replicator.store.client_lock import ClientLock
from replicator.store.paths import open_root
from replicator.v1 import local_pb2
from replicator.version import version
from replicator.wire import manifest_to_pb, node_address_to_pb, object_to_pb

logger = logging.getLogger("replicator.client")

# An agent that this library may start is started again when it has been away for this long.
RESTART_AFTER_S = 1.0
_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0

ReplyT = TypeVar("ReplyT", bound=Message)


class LocalAgent:
    """One per process and store. Thread-safe; in a forked child every method raises ForkedClientError.

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
        self._outstanding = Outstanding()
        self._joins: dict[str, local_pb2.JoinJobRequest] = {}
        self._buddies: dict[str, tuple[str, ...]] = {}
        self._unadopted: dict[ObjectVersion, None] = {}

        first = self._open(deadline_s, may_start=auto_start)
        self.paths = open_root(self.root, create=False)
        self._lock = ClientLock(self.paths, self.client_id)
        self._lock.acquire()
        try:
            self._attached = first.attach(self._attach_request(), deadline_s)
        except BaseException:
            first.close()
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
        yield from (self.__dict__, self._outstanding, self._lock, self._thread, self._changed)
        if connection is not None:
            yield from connection.parts()

    def close(self) -> None:
        """Detach. What is being replicated goes on in the agent; futures not yet resolved fail. Idempotent."""
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
        self._outstanding.fail_all(
            lambda awaited: ReplicationError(f"the session was closed before the agent told the outcome of {awaited}")
        )

    # -- the agent behind it

    @property
    def node(self) -> NodeAddress:
        """This node as its peers reach it. Changes when the agent is restarted."""
        attached = self._attached
        return NodeAddress(NodeIdentity(attached.node.node_id, attached.node.incarnation), attached.grpc_address)

    @property
    def connected(self) -> bool:
        """Whether an agent was there when last heard of."""
        connection = self._connection
        return connection is not None and not connection.lost.is_set()

    def wait_connected(self, deadline_s: float) -> None:
        """Wait for an agent.

        Raises:
            AgentUnavailableError: none is there within `deadline_s`, or this handle is closed.
        """
        self.check()
        with self._changed:
            self._changed.wait_for(lambda: self.connected or self._closed.is_set(), deadline_s)
        if self._closed.is_set():
            raise AgentUnavailableError("this session is closed; call replicator.init() for a new one")
        if not self.connected:
            raise AgentUnavailableError(
                f"no agent answered in {self.root} for {deadline_s:.1f} s; see {self.root / LOG_FILE}, "
                f"or start replicator-agent --root {self.root}"
            )

    def check(self) -> None:
        """Raise ForkedClientError in a process that was forked from the one which made this handle."""
        fork.check_owner(self._pid, "this session")

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
        connection = self.connection()
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

    # -- the job

    def open_job(self, job: str, members: Sequence[NodeAddress], deadline_s: float) -> int:
        """The epoch of a new incarnation of the job: above all that any member knows. Waits for members."""
        request = local_pb2.OpenJobRequest(
            job=job, members=[node_address_to_pb(member) for member in members], deadline_ms=int(deadline_s * 1000)
        )
        awaited = f"a new epoch of job {job}"
        wait_s = deadline_s + self.call_deadline_s
        return self.call_patiently("OpenJob", request, local_pb2.OpenJobReply, wait_s, awaited).epoch

    def join_job(self, job: str, epoch: int, members: Sequence[NodeAddress], replicas: int) -> str:
        """Enter the epoch; a note about buddies, or "". Repeated by itself when the agent is restarted."""
        own = self.node
        nodes = [node_address_to_pb(own if member.node_id == own.node_id else member) for member in members]
        request = local_pb2.JoinJobRequest(job=job, epoch=epoch, members=nodes, replicas=replicas)
        reply = self.call_patiently(
            "JoinJob", request, local_pb2.JoinJobReply, self.deadline_s, f"entry into job {job}"
        )
        self._joins[job] = request
        self._buddies[job] = tuple(reply.buddy_node_ids)
        return reply.note

    def buddies(self, job: str) -> tuple[str, ...]:
        """The nodes that keep copies of this node's objects, as far as known."""
        return self._buddies.get(job, ())

    # -- replication and commit: told to the agent, outcomes through futures

    def replicate(self, objects: Sequence[ObjectVersion], epoch: int) -> dict[ObjectVersion, list[Future[ReplicaInfo]]]:
        """Start copying sealed objects of one job to the buddies; one future per object and buddy.

        Without an agent the futures wait for the next one.

        Raises:
            ReplicatorError: the agent refused, for instance StaleEpochError.
        """
        self.check()
        entries = self._outstanding.expect_replicas(objects, epoch)
        try:
            buddies = self._ask_replicas(objects, epoch)
        except AgentUnavailableError:
            buddies = self.buddies(objects[0].version.container.job) if objects else ()
        except ReplicatorError as error:
            self._outstanding.fail_replicas(entries, error)
            raise
        return self._outstanding.name_buddies(entries, buddies)

    def commit(self, manifest: Manifest) -> CommitFutures:
        """Store the manifest with the agent, which distributes it.

        Without an agent the commit waits for the next one; it is lost when this process ends before.

        Raises:
            ReplicatorError: the agent refused, for instance StaleEpochError or StoreFullError.
        """
        self.check()
        request = local_pb2.CommitRequest(
            client_id=self.client_id, manifest=manifest_to_pb(manifest), deadline_ms=int(self.deadline_s * 1000)
        )
        futures = self._outstanding.expect_commit(manifest.version, request)
        try:
            self.call("Commit", request, local_pb2.CommitReply)
        except AgentUnavailableError as error:
            logger.warning("the commit of %s waits for the agent: %s", manifest.version, error)
        except ReplicatorError as error:
            self._outstanding.fail_commit(manifest.version, error)
            raise
        return futures

    def _ask_replicas(self, objects: Sequence[ObjectVersion], epoch: int) -> tuple[str, ...]:
        request = local_pb2.ReplicateRequest(
            client_id=self.client_id,
            epoch=epoch,
            objects=[object_to_pb(one) for one in objects],
            deadline_ms=int(self.deadline_s * 1000),
        )
        return tuple(self.call("Replicate", request, local_pb2.ReplicateReply).buddy_node_ids)

    # -- objects published while no agent was there

    def adopt_later(self, one: ObjectVersion) -> None:
        """This process published an object itself: tell the agent, now or when there is one."""
        with self._changed:
            self._unadopted[one] = None
        try:
            self._adopt(self.connection())
        except AgentUnavailableError:
            pass

    def _adopt(self, connection: Connection) -> None:
        with self._changed:
            objects = list(self._unadopted)
        if not objects:
            return
        request = local_pb2.AdoptRequest(client_id=self.client_id, objects=[object_to_pb(one) for one in objects])
        try:
            connection.call("Adopt", request, local_pb2.AdoptReply, self.call_deadline_s)
        except NotFoundError as error:
            logger.warning("the agent did not find everything that was published while it was away: %s", error)
        with self._changed:
            for one in objects:
                self._unadopted.pop(one, None)

    # -- the thread

    def _attach_request(self) -> local_pb2.AttachRequest:
        return local_pb2.AttachRequest(client_id=self.client_id, pid=self._pid, version=version())

    def _open(self, deadline_s: float, *, may_start: bool) -> Connection:
        """A connection to the agent that is published, or to one started now; not yet attached."""
        if may_start:
            return Connection(ensure_agent(self.root, deadline_s=deadline_s, idle_exit_s=self._idle_exit_s))
        record = find_agent(self.root)
        if record is None:
            raise AgentUnavailableError(f"no agent runs in {self.root}; start replicator-agent --root {self.root}")
        return Connection(record)

    def _listen(self, connection: Connection | None) -> None:
        while connection is not None:
            for event in connection.events():
                try:
                    self._outstanding.on_event(event)
                except Exception:
                    logger.exception("an event of the agent could not be understood")
            connection.close()
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
                continue
            logger.warning("%s is there after %.1f s", connection.whom, time.monotonic() - lost_at)
            return connection
        return None

    def _take_over(self, connection: Connection) -> None:
        """Attach, tell the agent what it missed, and ask again for what is outstanding."""
        try:
            self._attached = connection.attach(self._attach_request(), self.call_deadline_s)
            for join in list(self._joins.values()):
                self._join_again(connection, join)
            self._adopt(connection)
        except BaseException:
            connection.close()
            raise
        with self._changed:
            self._connection = connection
            self._changed.notify_all()
        if self._closed.is_set():
            connection.close()
        try:
            # What was published or asked for until now saw no connection.
            self._adopt(connection)
            self._repeat()
        except AgentUnavailableError:
            return  # its stream of events has ended as well

    def _join_again(self, connection: Connection, join: local_pb2.JoinJobRequest) -> None:
        own = node_address_to_pb(self.node)
        for member in join.members:
            if member.identity.node_id == own.identity.node_id:
                member.CopyFrom(own)
        try:
            connection.call("JoinJob", join, local_pb2.JoinJobReply, self.call_deadline_s)
        except StaleEpochError as error:
            # Said again, and raised, at the next save or load.
            logger.error("%s", error)

    def _repeat(self) -> None:
        for (_, epoch), objects in self._outstanding.replications().items():
            entries = self._outstanding.expect_replicas(objects, epoch)
            try:
                self._outstanding.name_buddies(entries, self._ask_replicas(objects, epoch))
            except AgentUnavailableError:
                raise
            except ReplicatorError as error:
                self._outstanding.fail_replicas(entries, error)
        for container, request in self._outstanding.commits().items():
            try:
                self.call("Commit", request, local_pb2.CommitReply)
            except AgentUnavailableError:
                raise
            except ReplicatorError as error:
                self._outstanding.fail_commit(container, error)
