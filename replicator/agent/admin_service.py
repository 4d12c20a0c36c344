"""AdminService: what an operator asks any agent about all of them. Verify, Drain and Undrain alone change anything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from replicator import parts, wire
from replicator.agent.clients import ClientRegistry
from replicator.agent.core import AgentCore
from replicator.agent.rpc import deadline_s, handler
from replicator.agent.status import drain_event, health_to_pb, status_of
from replicator.agent.verify_service import check_request, verify_everywhere, verify_here
from replicator.decide.assess import Assessment, Evidence
from replicator.decide.types import HeldObject, NodeInventory, recency
from replicator.errors import NotFoundError, ReplicatorError
from replicator.ids import (
    CheckpointContainerId,
    ContainerVersion,
    NodeAddress,
    ObjectVersion,
    validate_job,
    validate_node_id,
    validate_object_name,
)
from replicator.v1 import admin_pb2, peer_pb2, types_pb2

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

MessageT = TypeVar("MessageT", bound=Message)

SERVICE = "replicator.v1.AdminService"
# Nodes that are asked at the same time.
MAX_ASKED = 64
# A reply must fit into the 4 MiB that gRPC clients accept (F28).
MAX_REPLY_BYTES = 3 << 20

log = logging.getLogger(__name__)


class AdminServicer:
    """Serves the unix socket and the TCP port alike. `register` puts it on a server."""

    def __init__(self, core: AgentCore, clients: ClientRegistry) -> None:
        self._core = core
        self._clients = clients
        self._started = time.monotonic()

    @handler
    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.StatusReply:
        """This agent."""
        return status_of(self._core, self._clients, self._started, brief=request.brief)

    @handler
    async def Nodes(self, request: admin_pb2.NodesRequest, context: Context) -> admin_pb2.NodesReply:
        """This agent and all others that it knows."""
        limit = deadline_s(request.deadline_ms, self._core.config.lookup_deadline_s)
        gate = asyncio.Semaphore(MAX_ASKED)
        known = self._core.peers.known()
        reports = await asyncio.gather(*(self._report_of(node, limit, gate) for node in known))
        own = admin_pb2.NodeReport(
            node=wire.node_address_to_pb(self._core.address),
            reachable=True,
            status=status_of(self._core, self._clients, self._started, brief=True),
        )
        ordered = sorted(
            _each_once([own, *reports]), key=lambda report: (report.node.identity.node_id, report.node.grpc_address)
        )
        if sum(report.ByteSize() for report in ordered) > MAX_REPLY_BYTES:
            for report in ordered:
                for job in report.status.jobs:
                    job.ClearField("members")
        return admin_pb2.NodesReply(nodes=_that_fit(ordered))

    @handler
    async def ListContainers(
        self, request: admin_pb2.ListContainersRequest, context: Context
    ) -> admin_pb2.ListContainersReply:
        """All containers, over all nodes that answer, newest first within a job."""
        if request.job:
            validate_job(request.job)
        limit = deadline_s(request.deadline_ms, self._core.config.lookup_deadline_s)
        inventories, manifests, unanswered = await self._core.lookup.inventories(request.job, limit)
        evidence = Evidence(inventories, unanswered)
        newest = sorted(set(evidence.by_version) | set(manifests), key=recency, reverse=True)
        newest.sort(key=lambda version: version.container.job)
        reports = (
            _container_report(evidence.assess(version, manifests.get(version)), version in manifests)
            for version in newest
        )
        return admin_pb2.ListContainersReply(
            containers=_that_fit(reports), unanswered=[wire.unanswered_to_pb(who) for who in unanswered]
        )

    @handler
    async def Inspect(self, request: admin_pb2.InspectRequest, context: Context) -> admin_pb2.InspectReply:
        """All copies of one object, of whatever generation, newest first."""
        container = CheckpointContainerId(request.job, request.step)
        name = validate_object_name(request.name)
        limit = deadline_s(request.deadline_ms, self._core.config.lookup_deadline_s)
        end = time.monotonic() + limit
        inventories, manifests, unanswered = await self._core.lookup.inventories(request.job, limit * 0.6)
        copies = _copies(inventories, container, name)
        gate = asyncio.Semaphore(MAX_ASKED)
        rest = max(end - time.monotonic(), 0.1)
        described = await asyncio.gather(*(self._describe(node, one, held, rest, gate) for node, one, held in copies))
        reply = admin_pb2.InspectReply(copies=described, unanswered=[wire.unanswered_to_pb(who) for who in unanswered])
        for version in sorted(manifests, key=recency, reverse=True):
            entry = next((entry for entry in manifests[version].entries if entry.name == name), None)
            if version.container == container and entry is not None:
                reply.in_manifest = True
                reply.manifest_of.CopyFrom(wire.version_to_pb(version))
                reply.entry.CopyFrom(
                    types_pb2.ManifestEntry(
                        name=name, size_bytes=entry.size, crc32c=entry.crc32c, owner_node_id=entry.owner_node_id
                    )
                )
                break
        return reply

    @handler
    async def Recover(self, request: admin_pb2.RecoverRequest, context: Context) -> None:
        """What a restart would choose now."""
        validate_job(request.job)
        limit = deadline_s(request.deadline_ms, self._core.config.lookup_deadline_s)
        plan = await self._core.lookup.run(request.job, 0, limit, request.step if request.has_step else None)
        for part in await asyncio.to_thread(list, parts.split(plan, parts.PLAN)):
            await context.write(part)

    @handler
    async def ReadObject(self, request: admin_pb2.ReadObjectRequest, context: Context) -> None:
        """The bytes of an object, as raw messages."""
        version = wire.version_from_pb(request.container)
        source = wire.source_from_pb(request.object)
        limit = deadline_s(request.deadline_ms, self._core.config.deadline_s)
        pieces: Any = self._core.puller.read_object(version, source, limit)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                await context.write(piece)

    @handler
    async def Verify(self, request: admin_pb2.VerifyRequest, context: Context) -> None:
        """Read and check all copies of this node, or of all."""
        check_request(request)
        limit = deadline_s(request.deadline_ms, self._core.config.deadline_s)
        found: Any = (
            verify_everywhere(self._core, request, limit) if request.everywhere else verify_here(self._core, request)
        )
        async with contextlib.aclosing(found):
            async for event in found:
                await context.write(event)

    @handler
    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> None:
        """Drain this node, or another one, and tell how far it is."""
        node = self._other(request.node_id)
        if node is None:
            self._core.drain.begin()
            async with contextlib.aclosing(self._core.drain.watch()) as watch:
                async for progress in watch:
                    await context.write(drain_event(self._core, progress))
            return
        idle_s = deadline_s(request.deadline_ms, self._core.config.rpc_deadline_s)
        events: Any = self._core.peers.stream(
            node, "AdminService/Drain", request, admin_pb2.DrainEvent, awaited="how far its drain is", idle_s=idle_s
        )
        async with contextlib.aclosing(events):
            async for event in events:
                await context.write(event)

    @handler
    async def Undrain(self, request: admin_pb2.UndrainRequest, context: Context) -> admin_pb2.DrainEvent:
        """Let this node, or another one, take copies again."""
        node = self._other(request.node_id)
        if node is None:
            self._core.drain.cancel()
            return drain_event(self._core, self._core.drain.progress())
        return await self._core.peers.unary(
            node,
            "AdminService/Undrain",
            request,
            admin_pb2.DrainEvent,
            awaited="the end of its drain",
            deadline_s=deadline_s(request.deadline_ms, self._core.config.rpc_deadline_s),
        )

    def _other(self, node_id: str) -> NodeAddress | None:
        """The node that is meant; None: this one."""
        if not node_id or node_id == self._core.identity.node_id:
            return None
        validate_node_id(node_id)
        for node in self._core.peers.known():
            if isinstance(node, NodeAddress) and node.node_id == node_id:
                return node
        raise NotFoundError(
            f"node {self._core.identity.node_id} knows no node {node_id}; replicator-admin nodes lists those it knows"
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server. ReadObject sends its messages as they are, without protobuf around them."""
        unary: dict[str, tuple[Any, Any]] = {
            "Status": (admin_pb2.StatusRequest, admin_pb2.StatusReply),
            "Nodes": (admin_pb2.NodesRequest, admin_pb2.NodesReply),
            "ListContainers": (admin_pb2.ListContainersRequest, admin_pb2.ListContainersReply),
            "Inspect": (admin_pb2.InspectRequest, admin_pb2.InspectReply),
            "Undrain": (admin_pb2.UndrainRequest, admin_pb2.DrainEvent),
        }
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(
                getattr(self, method),
                request_deserializer=request_type.FromString,
                response_serializer=reply_type.SerializeToString,
            )
            for method, (request_type, reply_type) in unary.items()
        }
        handlers["ReadObject"] = grpc.unary_stream_rpc_method_handler(
            self.ReadObject, request_deserializer=admin_pb2.ReadObjectRequest.FromString, response_serializer=None
        )
        streams: dict[str, tuple[Any, Any]] = {
            "Recover": (admin_pb2.RecoverRequest, types_pb2.Plan),
            "Verify": (admin_pb2.VerifyRequest, admin_pb2.VerifyEvent),
            "Drain": (admin_pb2.DrainRequest, admin_pb2.DrainEvent),
        }
        for method, (request_type, reply_type) in streams.items():
            handlers[method] = grpc.unary_stream_rpc_method_handler(
                getattr(self, method),
                request_deserializer=request_type.FromString,
                response_serializer=reply_type.SerializeToString,
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def _report_of(
        self, node: NodeAddress | str, limit_s: float, gate: asyncio.Semaphore
    ) -> admin_pb2.NodeReport:
        address = types_pb2.NodeAddress(grpc_address=node) if isinstance(node, str) else wire.node_address_to_pb(node)
        try:
            async with asyncio.timeout(limit_s), gate:
                status = await self._core.peers.unary(
                    node,
                    "AdminService/Status",
                    admin_pb2.StatusRequest(brief=True),
                    admin_pb2.StatusReply,
                    awaited="its status",
                    deadline_s=min(limit_s, self._core.config.rpc_deadline_s),
                )
        except (ReplicatorError, TimeoutError) as error:
            reason = str(error) or f"it was not asked within {limit_s:.1f} s"
            return self._with_health(admin_pb2.NodeReport(node=address, reachable=False, reason=reason))
        return self._with_health(admin_pb2.NodeReport(node=status.node, reachable=True, status=status))

    def _with_health(self, report: admin_pb2.NodeReport) -> admin_pb2.NodeReport:
        known = self._core.health.view().get(report.node.identity.node_id)
        if known is not None:
            report.health.CopyFrom(health_to_pb(known))
        return report

    async def _describe(
        self, node: NodeAddress, one: ObjectVersion, held: HeldObject, limit_s: float, gate: asyncio.Semaphore
    ) -> admin_pb2.ObjectCopy:
        """The copy as its holder describes it; without its blocks when the holder does not answer any more."""
        identity = wire.identity_to_pb(node.identity)
        short = types_pb2.ObjectDescriptor(object=wire.object_to_pb(one), size_bytes=held.size, crc32c=held.crc32c)
        if node.node_id == self._core.identity.node_id:
            info = self._core.store.get(one)
            return admin_pb2.ObjectCopy(node=identity, descriptor=short if info is None else wire.info_to_pb(info))
        request = peer_pb2.OpenObjectRequest(
            sender=wire.sender_to_pb(wire.Sender(self._core.identity)), object=wire.object_to_pb(one)
        )
        try:
            async with asyncio.timeout(limit_s), gate:
                reply = await self._core.peers.unary(
                    node,
                    "PeerService/OpenObject",
                    request,
                    peer_pb2.OpenObjectReply,
                    awaited=f"a description of {one}",
                    deadline_s=min(limit_s, self._core.config.rpc_deadline_s),
                )
        except (ReplicatorError, TimeoutError) as error:
            log.info("a copy cannot be described: %s", error, extra={"peer": node.node_id})
            return admin_pb2.ObjectCopy(node=identity, descriptor=short)
        return admin_pb2.ObjectCopy(node=identity, descriptor=reply.descriptor)


def _each_once(reports: Iterable[admin_pb2.NodeReport]) -> Iterator[admin_pb2.NodeReport]:
    """A node that is known by several addresses, this one too, is one node; the first report of it counts."""
    seen: set[tuple[str, int]] = set()
    for report in reports:
        identity = report.node.identity.node_id, report.node.identity.incarnation
        if report.reachable and identity in seen:
            continue
        seen.add(identity)
        yield report


def _that_fit(messages: Iterable[MessageT]) -> list[MessageT]:
    """The first messages, as many as fit into one reply."""
    result: list[MessageT] = []
    total = 0
    for message in messages:
        total += message.ByteSize() + 8
        if total > MAX_REPLY_BYTES:
            log.warning("an answer was cut after %d items: more do not fit into one message", len(result))
            break
        result.append(message)
    return result


def _container_report(found: Assessment, committed: bool) -> admin_pb2.ContainerReport:
    return admin_pb2.ContainerReport(
        container=wire.version_to_pb(found.version),
        committed=committed,
        is_protected=found.is_protected,
        recoverable=found.recoverable,
        objects=found.objects,
        size_bytes=found.size_bytes,
        min_copies=found.min_copies,
        manifest_on=found.manifest_on,
        reason="" if found.recoverable else found.reason,
    )


def _copies(
    inventories: Sequence[NodeInventory], container: CheckpointContainerId, name: str
) -> list[tuple[NodeAddress, ObjectVersion, HeldObject]]:
    found: list[tuple[ContainerVersion, NodeAddress, HeldObject]] = [
        (held.version, inventory.node, held.objects[name])
        for inventory in inventories
        for held in inventory.containers
        if held.version.container == container and name in held.objects
    ]
    found.sort(key=lambda item: item[1])
    found.sort(key=lambda item: recency(item[0]), reverse=True)
    return [(node, version.object(name), held) for version, node, held in found]
