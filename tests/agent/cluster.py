"""Several real agents on loopback, and ranks that speak to them as trainers do: plain gRPC and the store's writer."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from agent_harness import DEADLINE_S, AgentProcess
from google.protobuf.message import Message

from replicator import parts
from replicator.decide.types import Manifest, ManifestEntry, ObjectSource
from replicator.errors import ReplicatorError
from replicator.ids import ContainerVersion, NodeAddress, NodeIdentity, ObjectVersion
from replicator.native import combine_blocks
from replicator.rpc_errors import error_from_rpc
from replicator.rpc_options import channel_options
from replicator.store.client_lock import ClientLock
from replicator.store.paths import StorePaths, open_root
from replicator.store.reader import open_object
from replicator.store.segment import MappedSegment, MappingCache
from replicator.store.trailer import ObjectInfo, capacity_for
from replicator.store.writer import ObjectWriter
from replicator.v1 import admin_pb2, local_pb2, peer_pb2, types_pb2
from replicator.wire import (
    info_to_pb,
    manifest_to_pb,
    node_address_to_pb,
    object_to_pb,
    source_to_pb,
    version_from_pb,
    version_to_pb,
)

ReplyT = TypeVar("ReplyT", bound=Message)
MIB = 1 << 20
JOB = "job"


class Node:
    """One node: an agent process (when it runs) on a root of its own."""

    def __init__(self, node_id: str, root: Path, flags: Sequence[str] = ()) -> None:
        self.node_id = node_id
        self.root = root
        self.flags = tuple(flags)
        self.agent: AgentProcess | None = None
        self.address: NodeAddress
        self.port = 0

    def launch(self, *flags: str) -> Node:
        """Start the agent, or a new one after it ended. `ready` waits for it."""
        assert self.agent is None or self.agent.process.poll() is not None
        self.agent = AgentProcess(self.root, "--node-id", self.node_id, *self.flags, *flags, forked=True)
        return self

    def start(self, *flags: str) -> Node:
        """Start the agent, or a new one after it ended. Ready when this returns."""
        return self.launch(*flags).ready()

    def start_elsewhere(self) -> Node:
        """`start`, while somebody else has the port that the agent had."""
        with socket.create_server(("127.0.0.1", self.port)):
            return self.start()

    def ready(self) -> Node:
        """Wait until the agent that was launched serves."""
        assert self.agent is not None
        self.agent.wait_ready()
        record = self.agent.record
        self.address = NodeAddress(NodeIdentity(self.node_id, int(record["incarnation"])), record["grpc_address"])
        self.port = int(self.address.grpc_address.rpartition(":")[2])
        return self

    def kill(self) -> None:
        """SIGKILL the agent."""
        assert self.agent is not None
        self.agent.close()

    @property
    def paths(self) -> StorePaths:
        return open_root(self.root, create=False)

    def held(self, one: ObjectVersion) -> ObjectInfo | None:
        """What the node's files say of an object, every block verified."""
        try:
            with open_object(self.paths, one) as reader:
                reader.verify()
                return reader.info
        except ReplicatorError:
            return None

    def bytes_of(self, one: ObjectVersion) -> bytes:
        with open_object(self.paths, one) as reader:
            return bytes(reader.view)

    def status(self) -> admin_pb2.StatusReply:
        with grpc.insecure_channel(self.address.grpc_address) as channel:
            return call(channel, "AdminService/Status", admin_pb2.StatusRequest(), admin_pb2.StatusReply)

    def counter(self, name: str) -> int:
        return int(self.status().counters.get(name, 0))

    def ask(self, method: str, request: Message, reply_type: type[ReplyT]) -> ReplyT:
        """One call to the agent's TCP port, as a peer makes it. Raises the peer's ReplicatorError."""
        with grpc.insecure_channel(self.address.grpc_address, options=channel_options()) as channel:
            return call(channel, f"PeerService/{method}", request, reply_type)

    def offer(self, request: peer_pb2.OfferRequest) -> list[peer_pb2.OfferEvent]:
        """All last events of an offer."""
        with grpc.insecure_channel(self.address.grpc_address, options=channel_options()) as channel:
            events = stream(channel, "PeerService/Offer", request, peer_pb2.OfferEvent)
            return [event for event in events if event.WhichOneof("event") != "progress_bytes"]

    def versions(self) -> set[ContainerVersion]:
        """Versions of which there are files."""
        while True:
            try:
                return self._versions()
            except FileNotFoundError:
                continue  # a directory was dropped while it was looked through

    def _versions(self) -> set[ContainerVersion]:
        found = set()
        for top in (self.paths.objects, self.paths.manifests):
            for directory in top.glob("*/*/*"):
                ref = types_pb2.ContainerRef(
                    job=directory.parent.parent.name,
                    step=int(directory.parent.name.removeprefix("step-").removesuffix("_ckpt")),
                    generation=int(directory.name, 16),
                )
                found.add(version_from_pb(ref))
        return found

    def protected(self) -> set[ContainerVersion]:
        return {version for version in self.versions() if (self.paths.manifest_of(version) / "protected").exists()}

    def committed(self) -> set[ContainerVersion]:
        return {version for version in self.versions() if (self.paths.manifest_of(version) / "manifest").exists()}


class Rank:
    """One trainer process's side of LocalService, in this process."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.client_id = uuid.uuid4().hex
        self.lock = ClientLock(node.paths, self.client_id)
        self.lock.acquire()
        self.mappings = MappingCache(node.paths)
        self.events: queue.Queue[local_pb2.AttachEvent] = queue.Queue()
        self.seen: list[local_pb2.AttachEvent] = []
        self.unread: list[local_pb2.AttachEvent] = []
        self.epoch = 0
        self.job = JOB
        self.attach()

    def attach(self) -> None:
        """Open the stream of events, also after the agent was started again."""
        assert self.node.agent is not None
        self.channel = grpc.insecure_channel(f"unix:{self.node.agent.socket}", options=channel_options())
        request = local_pb2.AttachRequest(client_id=self.client_id, pid=1, version="test")
        self._stream = stream(self.channel, "LocalService/Attach", request, local_pb2.AttachEvent)
        next(self._stream)
        self._reader = threading.Thread(target=self._read, args=(self._stream,), daemon=True)
        self._reader.start()

    def _read(self, events: Any) -> None:
        with contextlib.suppress(ReplicatorError):
            for event in events:
                self.events.put(event)

    def call(self, method: str, request: Message, reply_type: type[ReplyT]) -> ReplyT:
        return call(self.channel, f"LocalService/{method}", request, reply_type)

    def wait(self, wanted: Callable[[local_pb2.AttachEvent], bool], what: str) -> local_pb2.AttachEvent:
        """The first event that is `wanted` and was not returned before. All events are in `seen`."""
        for event in self.unread:
            if wanted(event):
                self.unread.remove(event)
                return event
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                event = self.events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no event: {what}; seen were {self.seen}") from None
            self.seen.append(event)
            if wanted(event):
                return event
            self.unread.append(event)

    def join(self, epoch: int, members: Sequence[Node], replicas: int = 1) -> tuple[str, ...]:
        self.epoch = epoch
        request = local_pb2.JoinJobRequest(
            job=self.job, epoch=epoch, members=[node_address_to_pb(node.address) for node in members], replicas=replicas
        )
        return tuple(self.call("JoinJob", request, local_pb2.JoinJobReply).buddy_node_ids)

    def open_job(self, members: Sequence[Node]) -> int:
        request = local_pb2.OpenJobRequest(job=self.job, members=[node_address_to_pb(node.address) for node in members])
        return int(self.call("OpenJob", request, local_pb2.OpenJobReply).epoch)

    def begin(self, step: int, abandons: Sequence[ContainerVersion] = ()) -> ContainerVersion:
        request = local_pb2.BeginRequest(
            job=self.job, step=step, epoch=self.epoch, abandons=[version_to_pb(failed) for failed in abandons]
        )
        return version_from_pb(self.call("Begin", request, local_pb2.BeginReply).container)

    def write(self, one: ObjectVersion, data: bytes) -> ObjectInfo:
        """Reserve, write and seal an object."""
        capacity = capacity_for(len(data))
        mapped = self.reserve(capacity)
        writer = ObjectWriter(mapped, one, self.node.node_id, self.client_id, self.reserve)
        writer.write(data)
        info = writer.close()
        request = local_pb2.SealRequest(
            client_id=self.client_id, segment=writer.mapped.name, descriptor=info_to_pb(info)
        )
        self.call("Seal", request, local_pb2.SealReply)
        return info

    def reserve(self, capacity: int) -> MappedSegment:
        request = local_pb2.ReserveRequest(
            client_id=self.client_id, capacity_bytes=capacity, job=self.job, epoch=self.epoch
        )
        reply = self.call("Reserve", request, local_pb2.ReserveReply)
        return self.mappings.get(reply.segment, reply.inode, reply.capacity_bytes)

    def replicate(self, objects: Sequence[ObjectVersion], deadline_s: float = 5.0) -> tuple[str, ...]:
        request = local_pb2.ReplicateRequest(
            client_id=self.client_id,
            epoch=self.epoch,
            objects=[object_to_pb(one) for one in objects],
            deadline_ms=int(deadline_s * 1000),
        )
        return tuple(self.call("Replicate", request, local_pb2.ReplicateReply).buddy_node_ids)

    def outcome(self, one: ObjectVersion) -> local_pb2.ReplicationEvent:
        """The next outcome of a replica of the object."""
        event = self.wait(
            lambda event: event.replication.object == object_to_pb(one), f"the outcome of the replica of {one}"
        )
        return event.replication

    def commit(self, manifest: Manifest, deadline_s: float = 5.0) -> tuple[str, ...]:
        request = local_pb2.CommitRequest(
            client_id=self.client_id, manifest=manifest_to_pb(manifest), deadline_ms=int(deadline_s * 1000)
        )
        return tuple(self.call("Commit", request, local_pb2.CommitReply).asked)

    def committed(self, version: ContainerVersion) -> local_pb2.CommitEvent:
        """The next event of a commit."""
        event = self.wait(
            lambda event: event.commit.container == version_to_pb(version), f"the outcome of the commit of {version}"
        )
        return event.commit

    def protected(self, version: ContainerVersion) -> local_pb2.CommitEvent:
        """The event that says that the container is protected; one that says that it is not committed is an error."""
        while True:
            event = self.committed(version)
            assert event.ok, event
            if event.is_protected:
                return event

    def lookup(self, step: int | None = None, deadline_s: float = 3.0) -> types_pb2.Plan:
        request = local_pb2.LookupRequest(job=self.job, epoch=self.epoch, deadline_ms=int(deadline_s * 1000))
        if step is not None:
            request.has_step, request.step = True, step
        return self.call("Lookup", request, types_pb2.Plan)

    def retrieve(
        self, version: ContainerVersion, sources: Sequence[ObjectSource], deadline_s: float = 5.0
    ) -> dict[str, local_pb2.RetrieveEvent]:
        """The last event of each object, by name; every event is in `progress`."""
        request = local_pb2.RetrieveRequest(
            client_id=self.client_id,
            epoch=self.epoch,
            container=version_to_pb(version),
            objects=[source_to_pb(source) for source in sources],
            deadline_ms=int(deadline_s * 1000),
        )
        self.progress = list(stream(self.channel, "LocalService/Retrieve", request, local_pb2.RetrieveEvent))
        return {event.name: event for event in self.progress if event.done or event.error_kind}

    def close(self) -> None:
        self.channel.close()
        self._reader.join(DEADLINE_S)
        self.mappings.close()
        self.lock.close()


def call(channel: grpc.Channel, method: str, request: Message, reply_type: type[ReplyT]) -> ReplyT:
    """One call with one reply; ReplicatorError when it fails."""
    try:
        return parts.stub(channel, method, type(request), reply_type)(request, DEADLINE_S)
    except grpc.RpcError as error:
        raise error_from_rpc(error, method, "the agent under test", DEADLINE_S) from None


def stream(channel: grpc.Channel, method: str, request: Message, reply_type: type[ReplyT]) -> Iterator[ReplyT]:
    """A server-streaming call; ReplicatorError when it fails."""
    function = channel.unary_stream(
        f"/replicator.v1.{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=reply_type.FromString,
    )
    try:
        yield from function(request)
    except grpc.RpcError as error:
        raise error_from_rpc(error, method, "the agent under test", DEADLINE_S) from None


class Cluster:
    """Nodes n0, n1, ... with one rank each."""

    def __init__(self, base: Path, count: int, flags: Sequence[str] = ()) -> None:
        self.base = base
        self.flags = ("--deadline-s", "6", *flags)
        self.nodes: list[Node] = []
        self.ranks: list[Rank] = []
        for index in range(count):
            self._launch(f"n{index}")
        for node in self.nodes:
            self.ranks.append(Rank(node.ready()))

    def _launch(self, node_id: str) -> Node:
        node = Node(node_id, self.base / f"{node_id}-{len(self.nodes)}", self.flags)
        self.nodes.append(node)
        return node.launch()

    def add(self, node_id: str) -> Rank:
        """One more node, with an empty store."""
        rank = Rank(self._launch(node_id).ready())
        self.ranks.append(rank)
        return rank

    def new_job(self, *, replicas: int = 1) -> Cluster:
        """From now on all ranks work for a job that no node knows yet, in its epoch 1."""
        job = f"job-{uuid.uuid4().hex[:8]}"
        for rank in self.ranks:
            rank.job = job
            rank.seen.clear()
            rank.unread.clear()
        self.join(replicas=replicas)
        return self

    def join(self, epoch: int = 1, replicas: int = 1, ranks: Sequence[Rank] | None = None) -> None:
        chosen = self.ranks if ranks is None else ranks
        for rank in chosen:
            rank.join(epoch, [one.node for one in chosen], replicas)

    def save(
        self,
        step: int,
        data: bytes = b"shard",
        *,
        ranks: Sequence[Rank] | None = None,
        replicate: bool = True,
        abandons: Sequence[ContainerVersion] = (),
    ) -> Manifest:
        """Every rank writes one object of a step; what the coordinator would commit. Replicas are on their way."""
        chosen = self.ranks if ranks is None else ranks
        version = chosen[0].begin(step, abandons)
        entries = []
        for index, rank in enumerate(chosen):
            one = version.object(f"shard-{index}")
            info = rank.write(one, data + f" {one}".encode())
            entries.append(ManifestEntry(one.name, info.size, info.crc32c, rank.node.node_id))
            if replicate:
                rank.replicate([one])
        return Manifest(
            version=version,
            epoch=chosen[0].epoch,
            coordinator_node_id=chosen[0].node.node_id,
            replicas=1,
            world_size=len(chosen),
            created_unix_ms=1,
            entries=tuple(entries),
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for node in self.nodes:
            if node.agent is not None:
                node.agent.close()
        # F31: what gRPC says where two event loops share a process, again and again.
        said = [line for node in self.nodes if node.agent is not None for line in node.agent.output]
        assert not [line for line in said if "BlockingIOError" in line]


@contextlib.contextmanager
def cluster(base: Path, count: int, *flags: str) -> Iterator[Cluster]:
    made = Cluster.__new__(Cluster)
    made.nodes, made.ranks = [], []
    try:
        made.__init__(base, count, flags)  # type: ignore[misc]
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def mute_peer() -> Iterator[str]:
    """An address that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def dead_peer() -> Iterator[str]:
    """An address where nobody listens, and nobody else can."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{kept.getsockname()[1]}"


def sources_of(plan: types_pb2.Plan) -> list[ObjectSource]:
    return [
        ObjectSource(one.name, one.size_bytes, one.crc32c, one.owner_node_id, tuple(one.node_ids))
        for one in plan.sources
    ]


def combined(info: ObjectInfo) -> int:
    return combine_blocks(info.block_crcs, info.size, info.block_size)
