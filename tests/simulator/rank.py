"""One trainer process: what `replicator.client` does, spoken directly to the agent's LocalService."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message
from grpc.aio import EOF, AioRpcError

from replicator import parts
from replicator.decide.types import Manifest
from replicator.errors import (
    AgentUnavailableError,
    DeadlineExceededError,
    ObjectNotFoundError,
    PeerUnavailableError,
    ReplicatorError,
    SegmentError,
    from_wire,
)
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.rpc_errors import error_from_rpc
from replicator.store.client_lock import ClientLock
from replicator.store.publish import publish
from replicator.store.reader import open_object
from replicator.store.segment import MappedSegment, MappingCache
from replicator.store.trailer import ObjectInfo, capacity_for
from replicator.store.writer import ObjectWriter
from replicator.v1 import local_pb2, types_pb2
from replicator.wire import info_to_pb, manifest_to_pb, object_to_pb, version_from_pb, version_to_pb

from .loop import Process
from .machine import lock_lost
from .node import LOCAL_PORT, SimNode
from .rpc import SimChannel

if TYPE_CHECKING:
    from .world import World

ReplyT = TypeVar("ReplyT", bound=Message)
_ATTACH_AGAIN_S = 0.2


class SimRank:
    """A rank of one incarnation of a job. Its process dies with `kill`.

    Attributes:
        commits: the last news of each commit that was asked for.
    """

    def __init__(self, world: World, node: SimNode, job: str, rank: int) -> None:
        assert node.paths is not None
        self.world = world
        self.node = node
        self.job = job
        self.rank = rank
        self.epoch = 0
        self.process = Process(world.loop, f"rank {rank} of {job} on {node.name}", node)
        self.client_id = f"{world.rng.getrandbits(128):032x}"
        self._paths = node.paths
        self._lock = ClientLock(self._paths, self.client_id)
        self._mappings = MappingCache(self._paths)
        self._channel = SimChannel(world.network, self.process, node.name, f"{node.name}:{LOCAL_PORT}")
        self._attached = asyncio.Event()
        self._lone: list[ObjectVersion] = []
        self._objects: list[ObjectVersion] = []
        self._manifest: Manifest | None = None
        self._patience_s = node.config.deadline_s
        self.commits: dict[ContainerVersion, local_pb2.CommitEvent] = {}
        self._news = asyncio.Event()
        self.process.on_killed.append(lambda: lock_lost(self._paths, self.client_id))

    def begin(self) -> None:
        """Take the lock, and stay attached from now on."""
        self._lock.acquire()
        self.process.spawn(self._stay_attached())

    def leave(self) -> None:
        """A process that ends in order."""
        if self.process.alive:
            self.process.kill()

    # -- speaking to the agent

    async def call(
        self, method: str, request: Message, reply_type: type[ReplyT], deadline_s: float | None = None
    ) -> ReplyT:
        """One call. Raises what the agent raised, AgentUnavailableError when it is away."""
        limit = self._patience_s if deadline_s is None else deadline_s
        coders: Any = {
            "request_serializer": type(request).SerializeToString,
            "response_deserializer": reply_type.FromString,
        }
        path = f"/replicator.v1.LocalService/{method}"
        try:
            if method == "Lookup":
                call: Any = self._channel.unary_stream(path, **coders)(request, timeout=limit)
                return await parts.join_async(_messages(call), reply_type(), parts.PLAN)
            if method == "Commit":
                sent = _asynchronous(parts.split(request, parts.COMMIT))
                reply: ReplyT = await self._channel.stream_unary(path, **coders)(sent, timeout=limit)
            else:
                reply = await self._channel.unary_unary(path, **coders)(request, timeout=limit)
            return reply
        except AioRpcError as error:
            raise self._meaning(error, method, limit) from None

    def _meaning(self, error: AioRpcError, method: str, limit: float) -> ReplicatorError:
        meaning = error_from_rpc(error, method, f"the agent of {self.node.name}", limit)
        if isinstance(meaning, PeerUnavailableError):
            return AgentUnavailableError(str(meaning))
        return meaning

    async def call_patiently(
        self, method: str, request: Message, reply_type: type[ReplyT], deadline_s: float | None = None
    ) -> ReplyT:
        """The same, waiting for an agent that is being replaced."""
        limit = self._patience_s if deadline_s is None else deadline_s
        end = self.world.loop.time() + limit
        while True:
            await self._wait_attached(end, limit)
            try:
                return await self.call(method, request, reply_type, max(end - self.world.loop.time(), 0.01))
            except AgentUnavailableError:
                if self.world.loop.time() + _ATTACH_AGAIN_S >= end:
                    raise
            await asyncio.sleep(_ATTACH_AGAIN_S)

    async def _wait_attached(self, end: float, limit: float) -> None:
        try:
            async with asyncio.timeout_at(end):
                await self._attached.wait()
        except TimeoutError:
            raise AgentUnavailableError(f"no agent on {self.node.name} for {limit:.1f} s") from None

    async def _stay_attached(self) -> None:
        while True:
            request = local_pb2.AttachRequest(client_id=self.client_id, pid=1, version="sim", batched=True)
            function: Any = self._channel.unary_stream(
                "/replicator.v1.LocalService/Attach",
                request_serializer=local_pb2.AttachRequest.SerializeToString,
                response_deserializer=local_pb2.AttachEvent.FromString,
            )
            call: Any = function(request)
            with contextlib.suppress(AioRpcError):
                while (event := await call.read()) is not EOF:
                    if event.HasField("attached"):
                        self.process.spawn(self._take_up())
                    elif event.HasField("commit"):
                        self._told(event.commit)
            self._attached.clear()
            await asyncio.sleep(_ATTACH_AGAIN_S)

    async def _take_up(self) -> None:
        """The contract of a client that attaches again: adopt, and ask again for what is outstanding."""
        try:
            if self._lone:
                lone, self._lone = self._lone, []
                request = local_pb2.AdoptRequest(client_id=self.client_id, objects=[object_to_pb(one) for one in lone])
                with contextlib.suppress(ObjectNotFoundError):
                    await self.call("Adopt", request, local_pb2.AdoptReply)
            self._attached.set()
            if self._objects:
                await self._replicate(self._objects)
            if self._manifest is not None:
                await self._commit(self._manifest)
        except ReplicatorError as error:
            self.world.trace("not taken up", rank=self.rank, reason=str(error))
            self._attached.set()

    def _told(self, event: local_pb2.CommitEvent) -> None:
        version = version_from_pb(event.container)
        before = self.commits.get(version)
        if before is None or not before.is_protected:
            self.commits[version] = event
        self.world.oracle.commit_told(version, event)
        self._news.set()

    # -- saving

    async def write(self, one: ObjectVersion, data: bytes, block_size: int) -> ObjectInfo:
        """Reserve, write, seal; sealed without the agent when that is away at the end, as the client library does."""
        mapped = await self._reserve(capacity_for(len(data), block_size))
        writer = ObjectWriter(mapped, one, self.node.name, self.client_id, _no_growth, block_size=block_size)
        writer.write(data)
        info = writer.close()
        self.world.oracle.written(info, data)
        request = local_pb2.SealRequest(client_id=self.client_id, segment=mapped.name, descriptor=info_to_pb(info))
        try:
            await self.call("Seal", request, local_pb2.SealReply)
        except (AgentUnavailableError, DeadlineExceededError, SegmentError):
            publish(self._paths, mapped.name, info)
            self._lone.append(one)
            if self._attached.is_set():
                await self._take_up()
        return info

    async def _reserve(self, capacity: int) -> MappedSegment:
        request = local_pb2.ReserveRequest(
            client_id=self.client_id, capacity_bytes=capacity, job=self.job, epoch=self.epoch
        )
        reply = await self.call_patiently("Reserve", request, local_pb2.ReserveReply)
        return self._mappings.get(reply.segment, reply.inode, reply.capacity_bytes)

    async def replicate(self, objects: Sequence[ObjectVersion]) -> None:
        """Start copying; asked again whenever the agent was replaced."""
        self._objects = list(objects)
        with contextlib.suppress(AgentUnavailableError):
            await self._replicate(self._objects)

    async def _replicate(self, objects: Sequence[ObjectVersion]) -> None:
        request = local_pb2.ReplicateRequest(
            client_id=self.client_id, epoch=self.epoch, objects=[object_to_pb(one) for one in objects]
        )
        await self.call("Replicate", request, local_pb2.ReplicateReply)

    async def commit(self, manifest: Manifest, wait_protected: bool, deadline_s: float) -> local_pb2.CommitEvent | None:
        """Ask for the commit; its last news after at most `deadline_s`."""
        self._manifest = manifest
        with contextlib.suppress(AgentUnavailableError, DeadlineExceededError):
            await self._commit(manifest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while True:
                    event = self.commits.get(manifest.version)
                    if event is not None and (not event.ok or event.is_protected or not wait_protected):
                        return event
                    self._news.clear()
                    await self._news.wait()
        return self.commits.get(manifest.version)

    async def _commit(self, manifest: Manifest) -> None:
        request = local_pb2.CommitRequest(
            client_id=self.client_id,
            manifest=manifest_to_pb(manifest),
            deadline_ms=int(self.node.config.deadline_s * 1000),
        )
        await self.call("Commit", request, local_pb2.CommitReply)

    # -- recovery

    async def lookup(self, deadline_s: float) -> types_pb2.Plan:
        """This node's agent's plan."""
        request = local_pb2.LookupRequest(job=self.job, epoch=self.epoch, deadline_ms=int(deadline_s * 1000))
        return await self.call_patiently("Lookup", request, types_pb2.Plan, deadline_s + self._patience_s)

    async def retrieve(self, version: ContainerVersion, sources: Sequence[types_pb2.ObjectSource]) -> dict[str, bytes]:
        """Bring objects here and read them, every block checked. Raises the first failure, when all is told."""
        request = local_pb2.RetrieveRequest(
            client_id=self.client_id,
            epoch=self.epoch,
            container=version_to_pb(version),
            objects=sources,
            batched=True,
            deadline_ms=int(self.node.config.deadline_s * 1000),
        )
        function: Any = self._channel.unary_stream(
            "/replicator.v1.LocalService/Retrieve",
            request_serializer=local_pb2.RetrieveRequest.SerializeToString,
            response_deserializer=local_pb2.RetrieveEvent.FromString,
        )
        done: set[str] = set()
        failed: list[ReplicatorError] = []
        idle_s = 2 * self.node.config.deadline_s + 1
        call: Any = function(request)
        try:
            while True:
                async with asyncio.timeout(idle_s):
                    event = await call.read()
                if event is EOF:
                    break
                if event.HasField("done_many"):
                    done.update(event.done_many.names)
                elif event.error_kind:
                    failed.append(from_wire(event.error_kind, event.error_message))
                elif event.done:
                    done.add(event.name)
        except TimeoutError:
            raise DeadlineExceededError.of("objects", f"the agent of {self.node.name}", idle_s) from None
        except AioRpcError as error:
            raise self._meaning(error, "Retrieve", idle_s) from None
        finally:
            call.cancel()
        if failed:
            raise failed[0]
        return {source.name: self._read(version.object(source.name), source) for source in sources}

    def _read(self, one: ObjectVersion, source: types_pb2.ObjectSource) -> bytes:
        with open_object(self._paths, one) as reader:
            reader.verify()
            if (reader.info.size, reader.info.crc32c) != (source.size_bytes, source.crc32c):
                raise ObjectNotFoundError(f"{one} was retrieved, and is another one")
            return bytes(reader.view)


async def _messages(call: Any) -> AsyncIterator[Any]:
    while (message := await call.read()) is not EOF:
        yield message


async def _asynchronous(messages: Iterable[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


def _no_growth(capacity: int) -> MappedSegment:
    raise SegmentError(f"an object of the simulator grew to {capacity} bytes")
