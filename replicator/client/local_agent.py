"""What a trainer asks of the agent of its node, also over the agent's death.

Objects are created and published without the agent when it is away (`segments`), and the next agent is told of
them and asked again for everything that was not finished. Nothing here waits for a peer, except the calls that
say so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from google.protobuf.message import Message

from replicator.client.agent_link import AgentLink
from replicator.client.connection import Connection
from replicator.client.outstanding import CommitFutures, Outstanding, ReplicaInfo
from replicator.decide.types import Manifest
from replicator.errors import (
    AgentUnavailableError,
    NotFoundError,
    ReplicationError,
    ReplicatorError,
    StaleEpochError,
)
from replicator.faultpoints import reach
from replicator.ids import AgreedPlacement, NodeAddress, ObjectVersion
from replicator.parts import allowance_s
from replicator.v1 import local_pb2
from replicator.wire import manifest_to_pb, node_address_to_pb, object_to_pb, placement_from_pb, placement_to_pb

# Names of so many objects fit a message of gRPC's 4 MiB, however long they are.
MAX_OBJECTS_PER_CALL = 4096

logger = logging.getLogger("replicator.client")


class LocalAgent(AgentLink):
    """One per session. Thread-safe; in a forked child every method raises ForkedClientError.

    Arguments and errors are those of `AgentLink`.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        deadline_s: float = 30.0,
        auto_start: bool = True,
        idle_exit_s: float | None = None,
    ) -> None:
        # Events may come as soon as the link is there.
        self._outstanding = Outstanding()
        self._joins: dict[str, local_pb2.JoinJobRequest] = {}
        self._buddies: dict[str, tuple[str, ...]] = {}
        self._unadopted: dict[ObjectVersion, None] = {}
        self._unreleased: dict[str, None] = {}
        self._segments: dict[str, None] = {}  # in use by this process
        super().__init__(root, deadline_s=deadline_s, auto_start=auto_start, idle_exit_s=idle_exit_s)

    # -- the job

    def open_job(
        self,
        job: str,
        members: Sequence[NodeAddress],
        deadline_s: float,
        replicas: int | None = None,
        placement: AgreedPlacement | None = None,
    ) -> tuple[int, AgreedPlacement | None]:
        """The epoch of a new incarnation of the job, above all that any member knows, and where copies go in it.

        Waits for members. All ranks are to join with what is returned.

        Args:
            replicas, placement: what the job wants; None: what the agent is configured with.
        """
        request = local_pb2.OpenJobRequest(
            job=job,
            members=[node_address_to_pb(member) for member in members],
            deadline_ms=int(deadline_s * 1000),
            replicas=replicas,
            placement=None if placement is None else placement_to_pb(placement),
        )
        awaited = f"a new epoch of job {job}"
        wait_s = deadline_s + self.call_deadline_s
        reply = self.call_patiently("OpenJob", request, local_pb2.OpenJobReply, wait_s, awaited)
        return reply.epoch, placement_from_pb(reply.placement)

    def join_job(
        self,
        job: str,
        epoch: int,
        members: Sequence[NodeAddress],
        replicas: int,
        placement: AgreedPlacement | None = None,
    ) -> str:
        """Enter the epoch; a note about buddies, or "". Repeated by itself when the agent is restarted."""
        own = self.node
        nodes = [node_address_to_pb(own if member.node_id == own.node_id else member) for member in members]
        request = local_pb2.JoinJobRequest(
            job=job,
            epoch=epoch,
            members=nodes,
            replicas=replicas,
            placement=None if placement is None else placement_to_pb(placement),
        )
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

        Without an agent the futures wait for the next one, for at most `deadline_s`.

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

        Without an agent the commit waits for the next one, however long; it is lost when this process ends before. Its
        futures wait for at most `deadline_s`.

        Raises:
            ReplicatorError: the agent refused, for instance StaleEpochError or StoreFullError.
        """
        self.check()
        request = local_pb2.CommitRequest(
            client_id=self.client_id, manifest=manifest_to_pb(manifest), deadline_ms=int(self.deadline_s * 1000)
        )
        futures = self._outstanding.expect_commit(manifest.version, request)
        reach("commit.asking")
        try:
            self._ask_commit(request)
        except AgentUnavailableError as error:
            logger.warning("the commit of %s waits for the agent: %s", manifest.version, error)
        except ReplicatorError as error:
            self._outstanding.fail_commit(manifest.version, error)
            raise
        return futures

    def _ask_commit(self, request: local_pb2.CommitRequest) -> None:
        limit = self.call_deadline_s + allowance_s(request.ByteSize())
        self.call("Commit", request, local_pb2.CommitReply, limit)

    def _ask_replicas(self, objects: Sequence[ObjectVersion], epoch: int) -> tuple[str, ...]:
        buddies: tuple[str, ...] = ()
        for start in range(0, max(len(objects), 1), MAX_OBJECTS_PER_CALL):
            request = local_pb2.ReplicateRequest(
                client_id=self.client_id,
                epoch=epoch,
                objects=[object_to_pb(one) for one in objects[start : start + MAX_OBJECTS_PER_CALL]],
                deadline_ms=int(self.deadline_s * 1000),
            )
            buddies = tuple(self.call("Replicate", request, local_pb2.ReplicateReply).buddy_node_ids)
        return buddies

    # -- objects of this node

    def report_corrupt(self, one: ObjectVersion, reason: str) -> bool:
        """Tell of bytes that do not match their checksums; whether the agent finds so too, and set the copy aside.

        Raises:
            AgentUnavailableError: no agent within the deadline.
        """
        request = local_pb2.ReportCorruptRequest(client_id=self.client_id, object=object_to_pb(one), reason=reason)
        awaited = f"a check of {one}"
        reply = self.call_patiently("ReportCorrupt", request, local_pb2.ReportCorruptReply, self.deadline_s, awaited)
        return reply.quarantined

    def hold(self, segment: str) -> None:
        """This process uses a segment, until it is released or sealed: no agent may have it back."""
        with self._changed:
            self._segments[segment] = None

    def sealed(self, segment: str) -> None:
        """The segment holds an object now."""
        with self._changed:
            self._segments.pop(segment, None)

    def _on_reply(self, reply: Message) -> None:
        if isinstance(reply, local_pb2.ReserveReply):
            self.hold(reply.segment)

    def _segments_in_use(self) -> list[str] | None:
        with self._changed:
            return list(self._segments)

    def release(self, segment: str) -> None:
        """A reserved segment is not needed. Without an agent, the next one is told."""
        with self._changed:
            self._segments.pop(segment, None)
            self._unreleased[segment] = None
        try:
            self._release(self.connection())
        except AgentUnavailableError:
            pass

    def _release(self, connection: Connection) -> None:
        with self._changed:
            segments, self._unreleased = self._unreleased, {}
        while segments:
            segment = next(iter(segments))
            request = local_pb2.ReleaseRequest(client_id=self.client_id, segment=segment)
            try:
                self.call_on(connection, "Release", request, local_pb2.ReleaseReply)
            except AgentUnavailableError:
                with self._changed:
                    self._unreleased.update(segments)
                raise
            except ReplicatorError as error:
                logger.warning("segment %s cannot be given back: %s", segment, error)
            del segments[segment]

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
        for start in range(0, len(objects), MAX_OBJECTS_PER_CALL):
            some = objects[start : start + MAX_OBJECTS_PER_CALL]
            request = local_pb2.AdoptRequest(client_id=self.client_id, objects=[object_to_pb(one) for one in some])
            try:
                self.call_on(connection, "Adopt", request, local_pb2.AdoptReply)
            except NotFoundError as error:
                logger.warning("the agent did not find everything that was published while it was away: %s", error)
            with self._changed:
                for one in some:
                    self._unadopted.pop(one, None)

    # -- what a next agent is told

    def _on_event(self, event: local_pb2.AttachEvent) -> None:
        self._outstanding.on_event(event)

    def _still_away(self, since: float) -> None:
        self._outstanding.fail_late(
            since,
            self.deadline_s,
            lambda awaited: AgentUnavailableError(
                f"waited {self.deadline_s:.1f} s for an agent in {self.root}, which was to tell of {awaited}, in vain; "
                "nothing is lost on this node, and the next agent is asked again for commits"
            ),
        )

    def _ended(self) -> None:
        self._outstanding.fail_all(
            lambda awaited: ReplicationError(f"the session was closed before the agent told the outcome of {awaited}")
        )

    def _prepare(self, connection: Connection) -> None:
        for join in list(self._joins.values()):
            self._join_again(connection, join)
        self._adopt(connection)

    def _repeat(self, connection: Connection) -> None:
        self._adopt(connection)
        self._release(connection)
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
                self._ask_commit(request)
            except AgentUnavailableError:
                raise
            except ReplicatorError as error:
                self._outstanding.fail_commit(container, error)

    def _join_again(self, connection: Connection, join: local_pb2.JoinJobRequest) -> None:
        own = node_address_to_pb(self.node)
        for member in join.members:
            if member.identity.node_id == own.identity.node_id:
                member.CopyFrom(own)
        try:
            self.call_on(connection, "JoinJob", join, local_pb2.JoinJobReply)
        except StaleEpochError as error:
            # Said again, and raised, at the next save or load.
            logger.error("%s", error)
