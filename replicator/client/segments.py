"""Objects that this process writes: into memory that the agent reserved, or, without an agent, into its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from replicator.client import fork
from replicator.client.local_agent import LocalAgent
from replicator.errors import AgentUnavailableError, ReplicatorError, SegmentError
from replicator.ids import ObjectVersion
from replicator.store.publish import publish
from replicator.store.segment import MappedSegment, MappingCache, create_segment
from replicator.store.trailer import ObjectInfo, capacity_for
from replicator.store.writer import ObjectWriter
from replicator.v1 import local_pb2
from replicator.wire import info_to_pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import ReadableBuffer

logger = logging.getLogger("replicator.client")

# What allocating a segment may take at worst, when every page of it is cleared first.
_ALLOCATION_BYTES_PER_S = 500_000_000


class Segments:
    """Of one session's agent. Mappings are kept for the life of the process: writing into one again is far faster.

    Thread-safe.
    """

    def __init__(self, agent: LocalAgent) -> None:
        self._agent = agent
        self._mappings = MappingCache(agent.paths)
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
        self._agent.check()
        return SegmentObject(self, one, size, epoch)

    def reserve(self, one: ObjectVersion, capacity: int, epoch: int) -> MappedSegment:
        """Memory of at least `capacity` bytes."""
        request = local_pb2.ReserveRequest(
            client_id=self._agent.client_id, capacity_bytes=capacity, job=one.version.container.job, epoch=epoch
        )
        deadline_s = self._agent.call_deadline_s + capacity / _ALLOCATION_BYTES_PER_S
        try:
            reply = self._agent.call("Reserve", request, local_pb2.ReserveReply, deadline_s)
            return self._mappings.get(reply.segment, reply.inode, reply.capacity_bytes)
        except AgentUnavailableError as error:
            logger.warning("%s is written without the agent: %s", one, error)
        name, inode = create_segment(self._agent.paths, capacity)
        return self._mappings.get(name, inode, capacity)

    def give_back(self, segment: MappedSegment) -> None:
        """Nothing of the segment is to be kept. Never raises for lack of an agent: it finds out by itself."""
        request = local_pb2.ReleaseRequest(client_id=self._agent.client_id, segment=segment.name)
        try:
            self._agent.call("Release", request, local_pb2.ReleaseReply)
        except ReplicatorError as error:
            logger.warning("segment %s is not given back now: %s", segment.name, error)

    def seal(self, segment: MappedSegment, info: ObjectInfo) -> None:
        """Publish the object that lies in the segment."""
        request = local_pb2.SealRequest(
            client_id=self._agent.client_id, segment=segment.name, descriptor=info_to_pb(info)
        )
        try:
            self._agent.call("Seal", request, local_pb2.SealReply)
        except AgentUnavailableError as error:
            logger.warning("%s is sealed without the agent: %s", info.object, error)
            publish(self._agent.paths, segment.name, info)
            self._agent.adopt_later(info.object)
