"""What other agents ask of this one. Everything they send is validated before anything acts on it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from replicator.agent.abandon import MAX_TOLD
from replicator.agent.rpc import deadline_s, handler, require_meant_for
from replicator.agent.takings import Outcomes, Taking
from replicator.errors import (
    InvalidIdError,
    NotFoundError,
    ObjectNotFoundError,
    PeerUnavailableError,
    ReplicatorError,
)
from replicator.faultpoints import reach
from replicator.ids import NodeAddress, validate_node_id
from replicator.rpc_errors import offer_failure
from replicator.v1 import peer_pb2, peer_pb2_grpc, types_pb2
from replicator.version import version as own_version
from replicator.wire import (
    Sender,
    held_from_pb,
    identity_to_pb,
    info_from_pb,
    info_to_pb,
    inventory_to_pb,
    join_manifest,
    labels_to_pb,
    manifest_chunks,
    node_address_from_pb,
    node_address_to_pb,
    object_from_pb,
    placement_to_pb,
    sender_from_pb,
    validate_address,
    version_from_pb,
)

if TYPE_CHECKING:
    from replicator.agent.core import AgentCore
    from replicator.store.trailer import ObjectInfo

Context = grpc.aio.ServicerContext[Any, Any]
RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")

MAX_OFFERED = 1024
# Received at a time: each may be large.
MAX_MANIFESTS = 16
_PROGRESS_S = 0.5

log = logging.getLogger(__name__)


def _served(
    method: Callable[[Any, RequestT, Context], Awaitable[ReplyT]],
) -> Callable[[Any, RequestT, Context], Awaitable[ReplyT]]:
    """A `handler` that refuses calls meant for another process, which was greeted at this address before."""
    inner = handler(method)

    @functools.wraps(method)
    async def served(self: Any, request: RequestT, context: Context) -> ReplyT:
        await require_meant_for(context, self.core.identity)
        return await inner(self, request, context)

    return served


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """PeerService of one agent."""

    def __init__(self, core: AgentCore) -> None:
        self.core = core
        self._manifests = asyncio.Semaphore(MAX_MANIFESTS)

    @_served
    async def Hello(self, request: peer_pb2.HelloRequest, context: Context) -> peer_pb2.HelloReply:
        """Who this is, where its bulk lane is, and what it knows of the sender's job."""
        core = self.core
        sender = sender_from_pb(request.sender)
        core.peers.note_draining(sender.node.node_id, sender.node, draining=request.draining)
        if sender.job and request.grpc_address:
            core.peers.look_at(sender.job, [NodeAddress(sender.node, validate_address(request.grpc_address))])
        members = core.jobs.everyone(sender.job) if sender.job else ()
        if request.known_digest and request.known_digest == core.jobs.digest(sender.job):
            members = ()
        reply = peer_pb2.HelloReply(
            node=identity_to_pb(core.identity),
            bulk_address=core.bulk_address,
            version=own_version(),
            highest_epoch=core.jobs.epoch(sender.job) if sender.job else 0,
            known_members=[node_address_to_pb(node) for node in members],
            labels=labels_to_pb(core.address.labels),
            members_epoch=core.jobs.members_epoch(sender.job) if sender.job else 0,
            draining=core.peers.own_draining,
            alike=core.alike.own(),
        )
        if request.want_placement and (agreed := core.jobs.agreed(sender.job)) is not None:
            reply.placement.CopyFrom(placement_to_pb(agreed))
        return reply

    @_served
    async def Offer(self, request: peer_pb2.OfferRequest, context: Context) -> None:
        """Pull, verify and seal what is offered; one outcome per object, progress in between."""
        core = self.core
        sender = self._require_job(request.sender)
        source = node_address_from_pb(request.source)
        limit = deadline_s(request.deadline_ms, core.config.deadline_s)
        if len(request.objects) > MAX_OFFERED:
            raise InvalidIdError(f"expected at most {MAX_OFFERED} objects in one offer, found {len(request.objects)}")
        core.counters.add("offers_received")
        infos: list[ObjectInfo] = []
        places: list[int] = []
        for place, descriptor in enumerate(request.objects):
            try:
                info = info_from_pb(descriptor, core.client_id)
                if info.object.version.container.job != sender.job:
                    raise InvalidIdError(f"{info.object} is not of job {sender.job}, in whose name it is offered")
            except ReplicatorError as error:
                await context.write(peer_pb2.OfferEvent(object=descriptor.object, failed=offer_failure(error)))
                continue
            infos.append(info)
            places.append(place)
        outcomes: Outcomes[int] = Outcomes()
        for place, taking in zip(
            places, core.puller.take(infos, source, limit, background=request.background), strict=True
        ):
            if isinstance(taking, Taking):
                outcomes.add(place, taking)
            else:
                failed = offer_failure(taking)
                await context.write(peer_pb2.OfferEvent(object=request.objects[place].object, failed=failed))
        reach("replicate.received")
        await self._tell_outcomes(request, outcomes, context, limit / 4)

    @_served
    async def OpenObject(self, request: peer_pb2.OpenObjectRequest, context: Context) -> peer_pb2.OpenObjectReply:
        """Describe a held object, with a ticket for the bulk lane when asked for."""
        core = self.core
        one = object_from_pb(request.object)
        sender = self._check_if_given(request.sender)
        info = core.store.get(one)
        if info is None:
            raise ObjectNotFoundError(f"{one} is not held by node {core.identity.node_id} (any more)")
        reply = peer_pb2.OpenObjectReply(descriptor=info_to_pb(info))
        if request.want_ticket and core.bulk is not None:
            ticket, ttl_s = core.tickets.issue(one, core.replicator.is_background(one, sender.node.node_id))
            reply.ticket, reply.ticket_ttl_ms, reply.bulk_address = ticket, int(ttl_s * 1000), core.bulk_address
        return reply

    @_served
    async def CheckObject(self, request: peer_pb2.CheckObjectRequest, context: Context) -> peer_pb2.CheckObjectReply:
        """A receiver found an object's bytes to be wrong: the copy here is checked, and set aside when it is bad."""
        self._check_if_given(request.sender)
        try:
            sound = await self.core.puller.check_local(object_from_pb(request.object))
        except ObjectNotFoundError:
            sound = False
        return peer_pb2.CheckObjectReply(sound=sound)

    @_served
    async def PutManifest(
        self, request: AsyncIterator[types_pb2.ManifestChunk], context: Context
    ) -> peer_pb2.PutManifestReply:
        """Store a manifest."""
        async with self._manifests:
            sender, stated_crc, data = await join_manifest(request)
        await self.core.committer.store_manifest(data, stated_crc, sender)
        return peer_pb2.PutManifestReply(node=identity_to_pb(self.core.identity))

    @_served
    async def GetManifest(self, request: peer_pb2.GetManifestRequest, context: Context) -> None:
        """The stored manifest, in pieces."""
        version = version_from_pb(request.container)
        self._check_if_given(request.sender)
        found = await asyncio.to_thread(self.core.manifests.data, version)
        if found is None:
            raise NotFoundError(f"no manifest of {version} is stored on node {self.core.identity.node_id}")
        for chunk in manifest_chunks(*found, Sender(self.core.identity, version.container.job)):
            await context.write(chunk)

    @_served
    async def Inventory(self, request: peer_pb2.InventoryRequest, context: Context) -> None:
        """What this node holds."""
        sender = self._check_if_given(request.sender)
        step = request.step if request.has_step else None
        node = identity_to_pb(self.core.identity)
        for container in self.core.lookup.local(sender.job, step):
            for message in inventory_to_pb(container):
                await context.write(peer_pb2.InventoryReply(node=node, container=message))

    @_served
    async def ReportReplicated(
        self, request: peer_pb2.ReportReplicatedRequest, context: Context
    ) -> peer_pb2.ReportReplicatedReply:
        """An owner's objects have all their copies."""
        version = version_from_pb(request.container)
        sender = self._require_job(request.sender)
        held = [held_from_pb(one) for one in request.objects]
        await self._require_there(sender)
        owner = validate_node_id(request.owner_node_id) if request.owner_node_id else sender.node.node_id
        self.core.committer.owner_reported(version, owner, held)
        return peer_pb2.ReportReplicatedReply()

    @_served
    async def MarkProtected(
        self, request: peer_pb2.MarkProtectedRequest, context: Context
    ) -> peer_pb2.MarkProtectedReply:
        """A container is protected."""
        version = version_from_pb(request.container)
        sender = self._require_job(request.sender)
        await self.core.committer.mark_protected(version, sender, passed_on=request.passed_on)
        return peer_pb2.MarkProtectedReply()

    @_served
    async def Skip(self, request: peer_pb2.SkipRequest, context: Context) -> peer_pb2.SkipReply:
        """Containers that were superseded before their copies were made."""
        sender = self._require_job(request.sender)
        if len(request.containers) > MAX_TOLD:
            raise InvalidIdError(f"expected at most {MAX_TOLD} containers to skip, found {len(request.containers)}")
        versions = [version_from_pb(container) for container in request.containers]
        await self.core.committer.skipping.skipped(sender, versions, version_from_pb(request.superseded_by))
        return peer_pb2.SkipReply()

    @_served
    async def Abandon(self, request: peer_pb2.AbandonRequest, context: Context) -> peer_pb2.AbandonReply:
        """Saves that failed."""
        sender = self._require_job(request.sender)
        if len(request.containers) > MAX_TOLD:
            raise InvalidIdError(f"expected at most {MAX_TOLD} containers to abandon, found {len(request.containers)}")
        versions = [version_from_pb(container) for container in request.containers]
        reason = f"node {sender.node.node_id} says that it failed"
        await self.core.abandonment.drop(sender.job, sender.epoch, versions, reason)
        return peer_pb2.AbandonReply()

    # -- parts

    async def _tell_outcomes(
        self, request: peer_pb2.OfferRequest, outcomes: Outcomes[int], context: Context, quiet_s: float
    ) -> None:
        told: dict[int, int] = {}
        loop = asyncio.get_running_loop()
        spoke = loop.time()
        while outcomes.open:
            ended = await outcomes.next(min(_PROGRESS_S, quiet_s))
            if ended:
                for event in _outcomes(request, ended):
                    await context.write(event)
                spoke = loop.time()
                continue
            for taking, place in list(outcomes.open.items()):
                # What waits for its turn is not stuck: its owner hears the same number again.
                is_quiet = taking.waiting and loop.time() - spoke >= quiet_s
                if is_quiet or taking.bytes_done != told.get(place, 0):
                    told[place] = taking.bytes_done
                    ref = request.objects[place].object
                    await context.write(peer_pb2.OfferEvent(object=ref, progress_bytes=taking.bytes_done))
                    spoke = loop.time()

    def _require_job(self, message: types_pb2.Sender) -> Sender:
        """The sender, who speaks for a running incarnation of a job that is not superseded."""
        sender = sender_from_pb(message)
        self.core.jobs.check(sender.job, sender.epoch)
        return sender

    async def _require_there(self, sender: Sender) -> None:
        """What a process said that is no more is not believed: its memory may have gone with it.

        Raises:
            PeerUnavailableError: another one is there, or nobody.
        """
        peers = self.core.peers
        known = peers.identity(sender.node.node_id)
        if known is not None and known != sender.node:
            await peers.confirm(sender.job, sender.node.node_id)
            known = peers.identity(sender.node.node_id)
        if known is not None and known != sender.node:
            raise PeerUnavailableError(f"{sender.node} was replaced by {known}, which reports what it has itself")

    def _check_if_given(self, message: types_pb2.Sender) -> Sender:
        """The sender, who may be an observer (epoch 0)."""
        sender = sender_from_pb(message)
        if sender.epoch:
            self.core.jobs.check(sender.job, sender.epoch)
        return sender


def _outcomes(request: peer_pb2.OfferRequest, ended: Sequence[tuple[int, Taking]]) -> Iterator[peer_pb2.OfferEvent]:
    """The last events of objects, by their place in the request."""
    sealed: dict[str, list[tuple[int, ObjectInfo]]] = {}
    for place, taking in ended:
        ref = request.objects[place].object
        task = taking.task
        if task.cancelled():
            error: BaseException | None = PeerUnavailableError("the buddy's agent is stopping")
        else:
            error = task.exception()
        if error is not None:
            yield peer_pb2.OfferEvent(object=ref, failed=offer_failure(error))
            continue
        taken = task.result()
        if request.batched:
            sealed.setdefault(taken.lane, []).append((place, taken.info))
        else:
            yield peer_pb2.OfferEvent(object=ref, sealed=info_to_pb(taken.info), lane=taken.lane)
    for lane, copies in sealed.items():
        many = peer_pb2.SealedObjects(
            index=[place for place, _ in copies],
            size_bytes=[info.size for _, info in copies],
            crc32c=[info.crc32c for _, info in copies],
        )
        yield peer_pb2.OfferEvent(sealed_many=many, lane=lane)
