"""Objects that this process writes: into memory that the agent reserved or, without an agent, into its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from replicator.checksum import BLOCK_SIZE
from replicator.client import fork
from replicator.client.local_agent import LocalAgent
from replicator.errors import (
    AgentUnavailableError,
    ReplicatorError,
    SegmentError,
    StoreError,
    UnsupportedError,
    from_wire,
)
from replicator.faultpoints import reach
from replicator.first_error import FirstError
from replicator.ids import ObjectVersion
from replicator.native import crc32c
from replicator.packs import is_small, pieces_of
from replicator.store.paths import SegmentName
from replicator.store.publish import publish
from replicator.store.segment import MappedSegment, MappingCache, create_segment
from replicator.store.trailer import ObjectInfo, capacity_for
from replicator.store.writer import ObjectWriter
from replicator.v1 import local_pb2
from replicator.wire import info_to_pb

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger("replicator.client")

# What allocating a segment may take at worst, when every page of it is cleared first.
_ALLOCATION_BYTES_PER_S = 500_000_000
_TELL_AGAIN_S = 10.0


class Segments:
    """Of one agent. Mappings are kept for the life of the process: writing into one again is far faster.

    Thread-safe.
    """

    def __init__(self, agent: LocalAgent) -> None:
        self.agent = agent
        self._mappings = MappingCache(agent.paths)
        self._lock = threading.Lock()
        self._lone: set[str] = set()  # segments that no agent knows
        self._tell_from = 0.0  # monotonic
        fork.register(self)

    def fork_parts(self) -> Iterable[object]:
        """For `fork.Forkable`."""
        return (self.__dict__, self._mappings)

    def create(self, one: ObjectVersion, size: int, epoch: int) -> SegmentObject:
        """A new object of about `size` bytes; it grows when more is written.

        Raises:
            StoreFullError: no room, with numbers.
            StaleEpochError: a newer incarnation of the job exists.
        """
        return SegmentObject(self, one, size, epoch)

    def scratch(self, job: str, capacity: int, epoch: int) -> MappedSegment:
        """Memory of at least `capacity` bytes from the agent, which must be there. For `give_back` afterwards.

        Raises:
            AgentUnavailableError: it is not.
            StoreFullError, StaleEpochError: as with `create`.
        """
        request = local_pb2.ReserveRequest(
            client_id=self.agent.client_id, capacity_bytes=capacity, job=job, epoch=epoch
        )
        deadline_s = self.agent.call_deadline_s + capacity / _ALLOCATION_BYTES_PER_S
        reply = self.agent.call("Reserve", request, local_pb2.ReserveReply, deadline_s)
        return self._reserved(reply.segment, reply.inode, reply.capacity_bytes)

    def reserve(self, one: ObjectVersion, capacity: int, epoch: int) -> MappedSegment:
        """Memory of at least `capacity` bytes. Raises like `create`."""
        try:
            return self.scratch(one.version.container.job, capacity, epoch)
        except AgentUnavailableError as error:
            self._tell("%s is written without the agent: %s", one, error)
        # The agent that comes next finds the file, and must not take it for one that nobody knows.
        name = SegmentName.new(self.agent.client_id).text
        self.agent.hold(name)
        try:
            _, inode = create_segment(self.agent.paths, self.agent.client_id, capacity, name)
        except BaseException:
            self.agent.release(name)
            raise
        with self._lock:
            self._lone.add(name)
        return self._reserved(name, inode, capacity)

    def _reserved(self, name: str, inode: int, capacity: int) -> MappedSegment:
        try:
            mapped = self.map(name, inode, capacity)
        except BaseException:
            self.give_back(name)
            raise
        reach("reserve.mapped")
        return mapped

    def map(self, name: str, inode: int, capacity: int) -> MappedSegment:
        """A segment of this process, mapped."""
        return self._mappings.get(name, inode, capacity)

    def give_back(self, name: str) -> None:
        """Nothing of the segment is kept. Without an agent, the next one is told."""
        if self._is_lone(name):
            self._not_lone(name)
            self.agent.paths.segment(name).unlink(missing_ok=True)
        # Also one that was made without an agent: the next one found it, and counts it.
        self.agent.release(name)

    def seal(self, name: str, info: ObjectInfo) -> None:
        """Publish the object that lies in the segment.

        Raises:
            ReplicatorError: what the agent, or the store, found wrong; the segment is still there.
        """
        if not self._is_lone(name):
            request = local_pb2.SealRequest(client_id=self.agent.client_id, segment=name, descriptor=info_to_pb(info))
            try:
                self.agent.call("Seal", request, local_pb2.SealReply)
                self.agent.sealed(name)
                return
            except (AgentUnavailableError, SegmentError) as error:
                # SegmentError: an agent that was restarted meanwhile may not know the segment.
                self._tell("%s is sealed without the agent: %s", info.object, error)
        publish(self.agent.paths, name, info)
        self._not_lone(name)
        self.agent.sealed(name)
        self.agent.adopt_later(info.object)

    def seal_many(
        self, objects: Sequence[tuple[ObjectVersion, ReadableBuffer]], epoch: int
    ) -> list[ObjectInfo | ReplicatorError]:
        """Objects whose bytes are here already. Small ones go many at a time, with a call for all of them.

        Each stands for itself. Without an agent they are written one by one, as all others are.

        Returns:
            What was sealed, or why not: the errors of `create` and `SegmentObject.seal`.

        Raises:
            StaleEpochError, CommitError: an incarnation, or an attempt, that is over.
        """
        views = [memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"") for _, data in objects]
        results: dict[int, ObjectInfo | ReplicatorError] = {}
        small = [index for index, view in enumerate(views) if is_small(len(view))]
        for piece in pieces_of([len(views[index]) for index in small]):
            some = small[piece]
            try:
                results.update(self._seal_piece({index: (objects[index][0], views[index]) for index in some}))
            except (AgentUnavailableError, UnsupportedError) as error:
                # Away, or of an older version.
                logger.info("%d objects are sealed one by one: %s", len(some), error)
        for index, view in enumerate(views):
            if index not in results:
                results[index] = self._seal_alone(objects[index][0], view, epoch)
        return [results[index] for index in range(len(objects))]

    def _seal_piece(
        self, objects: Mapping[int, tuple[ObjectVersion, memoryview]]
    ) -> dict[int, ObjectInfo | ReplicatorError]:
        node_id, client_id = self.agent.node.node_id, self.agent.client_id
        infos = []
        for one, view in objects.values():
            crc = crc32c(view)
            infos.append(ObjectInfo(one, len(view), crc, BLOCK_SIZE, (crc,) if view else (), node_id, client_id))
        request = local_pb2.SealManyRequest(
            client_id=client_id,
            descriptors=[info_to_pb(info) for info in infos],
            payloads=b"".join(view for _, view in objects.values()),
        )
        reply = self.agent.call("SealMany", request, local_pb2.SealManyReply)
        results: dict[int, ObjectInfo | ReplicatorError] = dict(zip(objects, infos, strict=True))
        indexes = list(objects)
        for failure in reply.failures:
            results[indexes[failure.index]] = from_wire(failure.error_kind, failure.error_message)
        return results

    def _seal_alone(self, one: ObjectVersion, view: memoryview, epoch: int) -> ObjectInfo | ReplicatorError:
        try:
            with self.create(one, len(view), epoch) as sink:
                sink.write(view)
            return sink.info
        except StoreError as error:
            return error

    def _tell(self, message: str, one: ObjectVersion, error: ReplicatorError) -> None:
        """As a warning once in a while: a save may have thousands of objects."""
        now = time.monotonic()
        with self._lock:
            is_due = now >= self._tell_from
            if is_due:
                self._tell_from = now + _TELL_AGAIN_S
        logger.log(logging.WARNING if is_due else logging.DEBUG, message, one, error)

    def _is_lone(self, name: str) -> bool:
        with self._lock:
            return name in self._lone

    def _not_lone(self, name: str) -> None:
        with self._lock:
            self._lone.discard(name)


class SegmentObject:
    """One object being written; a file to write to, not thread-safe. Use it in a `with` block.

    At the end of the block it is sealed; when the block raises, nothing of it stays. When a write failed, the block
    raises what it failed with, also where who wrote (`torch.save`) hides that behind another error.

    Attributes:
        first_error: of the writes.
    """

    def __init__(self, segments: Segments, one: ObjectVersion, size: int, epoch: int) -> None:
        agent = segments.agent
        agent.check()
        self.object = one
        self._segments = segments
        self._sealed: ObjectInfo | None = None
        self._abandoned = False
        self.first_error = FirstError()
        self._writer = ObjectWriter(
            segments.reserve(one, capacity_for(size), epoch),
            one,
            agent.node.node_id,
            agent.client_id,
            grow=lambda capacity: segments.reserve(one, capacity, epoch),
            retire=lambda outgrown: segments.give_back(outgrown.name),
        )

    def write(self, data: ReadableBuffer) -> int:
        """Append; the number of bytes. Raises StoreFullError, SegmentError after the end."""
        return self.write_many([data])

    def write_many(self, buffers: Sequence[ReadableBuffer]) -> int:
        """Append them all in one go, which is faster than one by one. Returns and raises like `write`."""
        try:
            self._segments.agent.check()
            return self._writer.write_many(buffers)
        except ReplicatorError as error:
            self.first_error.keep(error)
            raise

    def next_buffer_slice(self, size: int) -> memoryview:
        """The next `size` bytes of the object, for the caller to fill before the next call. Raises like `write`."""
        try:
            self._segments.agent.check()
            return self._writer.next_buffer_slice(size)
        except ReplicatorError as error:
            self.first_error.keep(error)
            raise

    def tell(self) -> int:
        """Bytes written so far."""
        return self._writer.tell()

    def flush(self) -> None:
        """Nothing is held back."""

    @property
    def path(self) -> Path:
        """The file that is written to at the moment."""
        return self._segments.agent.paths.segment(self._writer.mapped.name)

    @property
    def info(self) -> ObjectInfo:
        """What was sealed. Raises SegmentError before that."""
        if self._sealed is None:
            raise SegmentError(f"{self.object} is not sealed")
        return self._sealed

    def seal(self) -> ObjectInfo:
        """End, and make the object visible under its name. Idempotent.

        Raises:
            ObjectExistsError: the name is taken by other content.
            StaleEpochError: a newer incarnation of the job exists.
        """
        if self._sealed is None:
            self._segments.agent.check()
            info = self._writer.close()
            self._segments.seal(self._writer.mapped.name, info)
            self._sealed = info
        return self._sealed

    def abandon(self) -> None:
        """End without an object. Idempotent; does nothing after `seal`."""
        if self._sealed is None and not self._abandoned:
            self._abandoned = True
            self._writer.abort()
            self._segments.give_back(self._writer.mapped.name)

    def __enter__(self) -> SegmentObject:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self.abandon()
            self.first_error.raise_for(error)
            return
        try:
            self.seal()
        except BaseException:
            self.abandon()
            raise
