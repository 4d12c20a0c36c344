"""Outcomes of many objects in one message, and the same one by one for clients that know no other way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicator.agent.offers import Pending, Report
from replicator.errors import ReplicatorError
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.v1 import local_pb2, types_pb2
from replicator.wire import object_to_pb, version_to_pb

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer


@dataclass(frozen=True, slots=True)
class Reporter:
    """Tells one client of its replicas. Two of one client are equal, so what it asked for piecemeal is told at once."""

    send: Callable[[str, local_pb2.AttachEvent], bool]
    client_id: str

    def __call__(self, event: local_pb2.ReplicationEvent | local_pb2.ReplicatedObjects) -> None:
        if isinstance(event, local_pb2.ReplicationEvent):
            self.send(self.client_id, local_pb2.AttachEvent(replication=event))
        else:
            self.send(self.client_id, local_pb2.AttachEvent(replicated=event))


def made(
    buddy: str, items: Sequence[Pending], lane: str, now: float
) -> Iterator[tuple[Report, local_pb2.ReplicatedObjects]]:
    """Copies that were made: for each who asked, many in one event."""
    told: dict[tuple[Report, ContainerVersion], list[Pending]] = {}
    for item in items:
        for outcome in item.outcomes:
            told.setdefault((outcome, item.object.version), []).append(item)
    for (report, version), copies in told.items():
        yield (
            report,
            local_pb2.ReplicatedObjects(
                container=version_to_pb(version),
                buddy_node_id=buddy,
                lane=lane,
                names=[item.object.name for item in copies],
                size_bytes=[item.info.size for item in copies],
                crc32c=[item.info.crc32c for item in copies],
                duration_ms=[int((now - item.asked_at) * 1000) for item in copies],
            ),
        )


def failed(buddy: str, item: Pending, error: ReplicatorError, now: float) -> local_pb2.ReplicationEvent:
    """A copy that was not made."""
    return local_pb2.ReplicationEvent(
        object=object_to_pb(item.object),
        buddy_node_id=buddy,
        ok=False,
        duration_ms=int((now - item.asked_at) * 1000),
        error_kind=error.kind,
        error_message=str(error),
    )


def refused(buddy: str, one: ObjectVersion, error: ReplicatorError) -> local_pb2.ReplicationEvent:
    """A copy that was not even tried."""
    return local_pb2.ReplicationEvent(
        object=object_to_pb(one), buddy_node_id=buddy, ok=False, error_kind=error.kind, error_message=str(error)
    )


def replications(many: local_pb2.ReplicatedObjects) -> Iterator[local_pb2.ReplicationEvent]:
    """One event per object."""
    for name, size, crc, duration_ms in zip(many.names, many.size_bytes, many.crc32c, many.duration_ms, strict=True):
        ref = types_pb2.ObjectRef(container=many.container, name=name)
        yield local_pb2.ReplicationEvent(
            object=ref,
            buddy_node_id=many.buddy_node_id,
            ok=True,
            verified=types_pb2.ObjectDescriptor(object=ref, size_bytes=size, crc32c=crc),
            duration_ms=duration_ms,
            lane=many.lane,
        )


def retrieved(
    many: local_pb2.RetrievedObjects,
    sources: Sequence[types_pb2.ObjectSource] | RepeatedCompositeFieldContainer[types_pb2.ObjectSource],
) -> Iterator[local_pb2.RetrieveEvent]:
    """One event per object; `sources` are those of the request."""
    sizes = {source.name: source.size_bytes for source in sources}
    for name in many.names:
        yield local_pb2.RetrieveEvent(
            name=name,
            bytes_done=sizes[name],
            done=True,
            was_local=many.was_local,
            source_node_id=many.source_node_id,
            lane=many.lane,
        )
