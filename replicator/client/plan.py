"""What a recovery lookup says, as the trainer sees it. The same on every rank of the job."""

from __future__ import annotations

from dataclasses import dataclass

from replicator.decide.types import ObjectSource, Rejected, Unanswered
from replicator.errors import NoRecoverableCheckpointError
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress
from replicator.v1 import types_pb2
from replicator.wire import node_address_from_pb, rejected_from_pb, source_from_pb, unanswered_from_pb, version_from_pb


@dataclass(frozen=True, slots=True)
class Plan:
    """Which checkpoint to load, and where each of its objects is.

    `version` is None when nothing is recoverable; `reason` says why in words, in either case. `sources` has one
    item per object, sorted by name; `rejected` lists what is newer than the chosen one; `world_size` is that of
    the job that wrote the checkpoint.
    """

    version: ContainerVersion | None
    sources: tuple[ObjectSource, ...]
    reason: str
    rejected: tuple[Rejected, ...] = ()
    nodes: tuple[NodeAddress, ...] = ()
    unanswered: tuple[Unanswered, ...] = ()
    world_size: int = 0

    @property
    def found(self) -> bool:
        """Whether there is something to load."""
        return self.version is not None

    @property
    def container(self) -> CheckpointContainerId | None:
        return self.version.container if self.version is not None else None

    @property
    def step(self) -> int | None:
        """The step to load, None when there is nothing. Step 0 is a step: compare with None."""
        return self.version.container.step if self.version is not None else None

    @property
    def size_bytes(self) -> int:
        return sum(source.size for source in self.sources)

    def require(self) -> ContainerVersion:
        """The version, or NoRecoverableCheckpointError with the reason."""
        if self.version is None:
            raise NoRecoverableCheckpointError(self.reason)
        return self.version


def plan_from_pb(message: types_pb2.Plan) -> Plan:
    """Raises InvalidIdError."""
    return Plan(
        version=version_from_pb(message.container) if message.found else None,
        sources=tuple(source_from_pb(source) for source in message.sources),
        reason=message.reason,
        rejected=tuple(rejected_from_pb(rejected) for rejected in message.rejected),
        nodes=tuple(node_address_from_pb(node) for node in message.nodes),
        unanswered=tuple(unanswered_from_pb(node) for node in message.unanswered),
        world_size=message.world_size,
    )
