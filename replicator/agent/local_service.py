"""LocalService: what this node's trainers ask of the agent. Each handler validates, then lets a room do the work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from replicator import parts, wire
from replicator.agent import batches, logs
from replicator.agent.abandon import MAX_TOLD
from replicator.agent.clients import ClientRegistry
from replicator.agent.core import AgentCore
from replicator.agent.rpc import deadline_s, handler
from replicator.agent.seal_many import seal_many
from replicator.agent.windows import WindowWanted
from replicator.errors import (
    InvalidIdError,
    ObjectExistsError,
    ObjectNotFoundError,
    ReplicatorError,
    StoreError,
)
from replicator.ids import AgreedPlacement, ContainerVersion, NodeAddress, ObjectVersion
from replicator.v1 import local_pb2, local_pb2_grpc
from replicator.version import version

if TYPE_CHECKING:
    from replicator.store.pool import Reservation
    from replicator.v1 import types_pb2

    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)


class LocalServicer(local_pb2_grpc.LocalServiceServicer):
    """Serves the unix socket. Errors leave as statuses that carry their kind (`rpc_errors.abort`)."""

    def __init__(self, core: AgentCore, clients: ClientRegistry) -> None:
        self._core = core
        self._clients = clients

    # -- the client's stream

    @handler
    async def Attach(self, request: local_pb2.AttachRequest, context: Context) -> None:
        """Events of one trainer process, until it goes away or another stream of it comes."""
        stream = self._clients.attach(request.client_id, request.pid)
        try:
            if request.tells_segments:
                await self._free_unknown(request.client_id, request.segments)
            attached = local_pb2.Attached(
                node=wire.identity_to_pb(self._core.identity),
                root=str(self._core.store.paths.root),
                grpc_address=self._core.address.grpc_address,
                version=version(),
                labels=wire.labels_to_pb(self._core.address.labels),
            )
            await context.write(local_pb2.AttachEvent(attached=attached))
            while True:
                event = await stream.next()
                if event.HasField("replicated") and not request.batched:
                    for single in batches.replications(event.replicated):
                        await context.write(local_pb2.AttachEvent(replication=single))
                else:
                    await context.write(event)
        finally:
            self._clients.detach(stream)

    # -- the job

    @handler
    async def OpenJob(self, request: local_pb2.OpenJobRequest, context: Context) -> local_pb2.OpenJobReply:
        """A new epoch, above all that this node and its peers know."""
        members = [wire.node_address_from_pb(member) for member in request.members]
        limit = deadline_s(request.deadline_ms, self._core.config.lookup_deadline_s)
        wanted = wire.placement_from_pb(request.placement)
        jobs = self._core.jobs
        epoch = await jobs.open_job(
            request.job, members, self._core.peers.configured, self._core.peers.ask_epoch, limit
        )
        reply = local_pb2.OpenJobReply(epoch=epoch)
        if members:
            previous = await self._previous_placement(request.job, limit)
            replicas = request.replicas if request.HasField("replicas") else None
            agreed = await asyncio.to_thread(jobs.placing.arrange, members, replicas, wanted, previous)
            reply.placement.CopyFrom(wire.placement_to_pb(agreed))
        return reply

    @handler
    async def JoinJob(self, request: local_pb2.JoinJobRequest, context: Context) -> local_pb2.JoinJobReply:
        """Enter an epoch with its members."""
        members = [wire.node_address_from_pb(member) for member in request.members]
        if not members:
            members = await self._configured_members(request.job)
        known = self._core.jobs.everyone(request.job)
        agreed = wire.placement_from_pb(request.placement)
        found = self._core.jobs.join(request.job, request.epoch, members, request.replicas, agreed)
        self._core.peers.look_at(request.job, [*members, *known])
        self._core.committer.joined(request.job)
        self._core.alike.look()
        self._core.healer.wake()
        log.info(
            "job joined",
            extra={"job": request.job, "epoch": request.epoch, "members": len(members), "buddies": found.node_ids},
        )
        return local_pb2.JoinJobReply(buddy_node_ids=found.node_ids, note=found.note)

    @handler
    async def Begin(self, request: local_pb2.BeginRequest, context: Context) -> local_pb2.BeginReply:
        """A new generation for a step; attempts that failed before are given up."""
        if request.abandons:
            await self._abandon(request.job, request.epoch, request.abandons)
        begun = self._core.jobs.begin(request.job, request.step, request.epoch)
        return local_pb2.BeginReply(container=wire.version_to_pb(begun))

    @handler
    async def Abandon(
        self, request: local_pb2.AbandonAttemptsRequest, context: Context
    ) -> local_pb2.AbandonAttemptsReply:
        """Give up attempts that failed."""
        given_up = await self._abandon(request.job, request.epoch, request.containers)
        return local_pb2.AbandonAttemptsReply(abandoned=[wire.version_to_pb(version) for version in given_up])

    # -- segments and objects

    @handler
    async def Reserve(self, request: local_pb2.ReserveRequest, context: Context) -> local_pb2.ReserveReply:
        """A segment for the client to write into."""
        self._clients.require(request.client_id)
        self._core.jobs.check(request.job, request.epoch)
        if not 0 < request.capacity_bytes <= wire.MAX_SIZE:
            raise InvalidIdError(f"capacity_bytes: expected 1..{wire.MAX_SIZE}, found {request.capacity_bytes}")
        reservation = await self._reserve(request.client_id, request.capacity_bytes)
        self._core.counters.add("segments_reserved")
        return local_pb2.ReserveReply(
            segment=reservation.segment, inode=reservation.inode, capacity_bytes=reservation.capacity
        )

    @handler
    async def Release(self, request: local_pb2.ReleaseRequest, context: Context) -> local_pb2.ReleaseReply:
        """Take a reserved segment back."""
        self._clients.require(request.client_id)
        self._core.store.release(request.client_id, request.segment)
        return local_pb2.ReleaseReply()

    @handler
    async def Seal(self, request: local_pb2.SealRequest, context: Context) -> local_pb2.SealReply:
        """Publish what the client wrote. A repeated call finds it published and changes nothing."""
        self._clients.require(request.client_id)
        info = wire.info_from_pb(request.descriptor, request.client_id)
        one = info.object
        self._core.jobs.check(one.version.container.job, one.version.epoch)
        if info.owner_node_id != self._core.identity.node_id:
            raise InvalidIdError(
                f"{one}: expected this node {self._core.identity.node_id} as its owner, found {info.owner_node_id}; "
                "an object is sealed with the agent of the node that wrote it"
            )
        self._core.abandonment.check(one.version)
        held = self._core.store.get(one)
        if held is None:
            self._core.store.seal(request.client_id, request.segment, info)
            self._core.counters.add("objects_sealed")
            self._core.counters.add("bytes_sealed", info.size)
            log.debug("object sealed", extra=logs.fields(one, bytes=info.size))
        elif not held.same_content(info):
            raise ObjectExistsError(
                f"{one} is sealed with {held.size} bytes of crc32c {held.crc32c:08x}; found another seal with "
                f"{info.size} bytes of {info.crc32c:08x}. Begin a new attempt to save the step again"
            )
        return local_pb2.SealReply()

    @handler
    async def SealMany(self, request: local_pb2.SealManyRequest, context: Context) -> local_pb2.SealManyReply:
        """Write and publish small objects whose bytes come with the call. Repeated, it changes nothing."""
        self._clients.require(request.client_id)
        return await seal_many(self._core, request)

    @handler
    async def Adopt(self, request: local_pb2.AdoptRequest, context: Context) -> local_pb2.AdoptReply:
        """Index objects that the client published while no agent was there."""
        self._clients.require(request.client_id)
        objects = [wire.object_from_pb(ref) for ref in request.objects]
        failures = await asyncio.to_thread(self._adopt, objects)
        self._core.counters.add("objects_adopted", len(objects) - len(failures))
        if failures:
            raise ObjectNotFoundError(
                f"{len(failures)} of {len(objects)} objects could not be adopted; save them again: "
                + "; ".join(failures[:8])
            )
        return local_pb2.AdoptReply()

    @handler
    async def ReportCorrupt(
        self, request: local_pb2.ReportCorruptRequest, context: Context
    ) -> local_pb2.ReportCorruptReply:
        """Check an object that a client could not verify, and set it aside when that is so."""
        self._clients.require(request.client_id)
        one = wire.object_from_pb(request.object)
        self._core.counters.add("objects_reported_corrupt")
        try:
            sound = await self._core.puller.check_local(one)
        except ObjectNotFoundError:
            sound = True
        log.warning(
            "a trainer reports a corrupt object, the check finds %s",
            "nothing wrong" if sound else "the same",
            extra=logs.fields(one, reported=request.reason[:200]),
        )
        return local_pb2.ReportCorruptReply(quarantined=not sound)

    # -- replication, commit, recovery

    @handler
    async def Replicate(self, request: local_pb2.ReplicateRequest, context: Context) -> local_pb2.ReplicateReply:
        """Start copying objects to the buddies; outcomes are events of the client's stream."""
        self._clients.require(request.client_id)
        objects = [wire.object_from_pb(ref) for ref in request.objects]
        for job in {one.version.container.job for one in objects}:
            self._core.jobs.check(job, request.epoch)

        report = batches.Reporter(self._clients.send, request.client_id)
        limit = deadline_s(request.deadline_ms, self._core.config.deadline_s)
        buddies = self._core.replicator.replicate(objects, request.epoch, limit, report)
        return local_pb2.ReplicateReply(buddy_node_ids=buddies)

    @handler
    async def Commit(self, requests: AsyncIterator[local_pb2.CommitRequest], context: Context) -> local_pb2.CommitReply:
        """Store a manifest here and start distributing it; the outcome is an event of the client's stream."""
        request = await parts.join_async(requests, local_pb2.CommitRequest(), parts.COMMIT)
        self._clients.require(request.client_id)
        manifest = await asyncio.to_thread(wire.manifest_from_pb, request.manifest)
        self._core.jobs.check(manifest.version.container.job, manifest.epoch)

        def report(event: local_pb2.CommitEvent) -> None:
            self._clients.send(request.client_id, local_pb2.AttachEvent(commit=event))

        limit = deadline_s(request.deadline_ms, self._core.config.deadline_s)
        asked = await self._core.committer.commit(manifest, limit, report)
        return local_pb2.CommitReply(asked=asked)

    @handler
    async def Lookup(self, request: local_pb2.LookupRequest, context: Context) -> None:
        """What to restore, and from where."""
        if request.epoch:
            self._core.jobs.check(request.job, request.epoch)
        limit = deadline_s(request.deadline_ms, self._core.config.lookup_deadline_s)
        step = request.step if request.has_step else None
        plan = await self._core.lookup.run(request.job, request.epoch, limit, step)
        for part in await asyncio.to_thread(list, parts.split(plan, parts.PLAN)):
            await context.write(part)

    @handler
    async def Retrieve(self, request: local_pb2.RetrieveRequest, context: Context) -> None:
        """Bring whole objects here."""
        self._clients.require(request.client_id)
        wanted = wire.version_from_pb(request.container)
        if request.epoch:
            self._core.jobs.check(wanted.container.job, request.epoch)
        sources = [wire.source_from_pb(source) for source in request.objects]
        limit = deadline_s(request.deadline_ms, self._core.config.deadline_s)
        if request.later:
            self._core.puller.retrieve_later(wanted, sources, limit, observer=not request.epoch)
            return
        events: Any = self._core.puller.retrieve(wanted, sources, limit, observer=not request.epoch)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.HasField("done_many") and not request.batched:
                    for single in batches.retrieved(event.done_many, request.objects):
                        await context.write(single)
                else:
                    await context.write(event)

    @handler
    async def RetrieveWindow(self, request: local_pb2.RetrieveWindowRequest, context: Context) -> None:
        """Bring blocks of an object into a scratch segment of the client."""
        self._clients.require(request.client_id)
        version = wire.version_from_pb(request.container)
        if request.epoch:
            self._core.jobs.check(version.container.job, request.epoch)
        source = wire.source_from_pb(request.object)
        wanted = WindowWanted(
            client_id=request.client_id,
            object=version.object(source.name),
            source=source,
            segment=request.segment,
            block_size=request.block_size_bytes,
            blocks=list(request.blocks),
            with_table=request.with_table,
            whole=request.whole,
        )
        limit = deadline_s(request.deadline_ms, self._core.config.deadline_s)
        events: Any = self._core.puller.window(wanted, limit)
        async with contextlib.aclosing(events):
            async for event in events:
                await context.write(event)

    # -- parts

    async def _free_unknown(self, client_id: str, segments: Sequence[str]) -> None:
        """What an earlier agent reserved for the client and died before saying so."""
        freed = await asyncio.to_thread(self._core.store.keep_only, client_id, frozenset(segments))
        if freed:
            self._core.counters.add("segments_unclaimed", freed)
            log.info("a trainer does not know segments that were reserved for it", extra={"segments": freed})

    async def _abandon(
        self, job: str, epoch: int, containers: Sequence[types_pb2.ContainerRef]
    ) -> list[ContainerVersion]:
        self._core.jobs.check(job, epoch)
        if len(containers) > MAX_TOLD:
            raise InvalidIdError(f"expected at most {MAX_TOLD} containers to abandon, found {len(containers)}")
        versions = [wire.version_from_pb(container) for container in containers]
        for one in versions:
            if one.epoch != epoch:
                raise InvalidIdError(f"{one} is not of epoch {epoch}, which asks to abandon it")
        return await self._core.abandonment.abandon(job, epoch, versions, "its save failed")

    async def _reserve(self, client_id: str, capacity: int) -> Reservation:
        """Reserve in a thread. What nobody will hear of any more, because the call was cancelled or the client died
        meanwhile, is given back as soon as it is there."""
        working = asyncio.ensure_future(asyncio.to_thread(self._core.store.reserve, client_id, capacity))
        try:
            reservation = await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(lambda done: self._give_back(client_id, done))
            raise
        if not self._clients.is_known(client_id):
            self._give_back(client_id, working)
            raise StoreError(f"client {client_id} died while a segment was reserved for it")
        return reservation

    def _give_back(self, client_id: str, working: asyncio.Future[Reservation]) -> None:
        if working.cancelled() or working.exception() is not None:
            return
        self._core.store.release(client_id, working.result().segment)

    def _adopt(self, objects: Sequence[ObjectVersion]) -> list[str]:
        failures = []
        for one in objects:
            try:
                self._core.store.adopt(one)
                self._core.abandonment.drop_late(one.version)
            except ReplicatorError as error:
                failures.append(f"{one}: {error}")
        return failures

    async def _previous_placement(self, job: str, limit_s: float) -> AgreedPlacement | None:
        """Of the epoch before, from whoever knows the last one; what is known here when that one is silent."""
        jobs = self._core.jobs
        elder = jobs.elder(job)
        if elder is not None:
            try:
                return await self._core.peers.ask_placement(job, elder, limit_s / 4)
            except ReplicatorError as error:
                log.warning(
                    "the last placement is not told", extra={"job": job, "peer": elder.node_id, "reason": error}
                )
        return jobs.agreed(job)

    async def _configured_members(self, job: str) -> list[NodeAddress]:
        limit = self._core.config.lookup_deadline_s
        answers = await asyncio.gather(
            *(self._core.peers.ask_epoch(job, address, None, limit) for address in self._core.peers.configured)
        )
        return [self._core.address, *(answer.node for answer in answers)]
