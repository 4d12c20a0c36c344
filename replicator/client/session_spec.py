"""What another process of the same rank needs to take part in the same epoch of a job."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from replicator.ids import AgreedPlacement, NodeAddress, NodeIdentity


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What another process of the same rank needs to take part in the same epoch."""

    root: str
    job: str
    epoch: int
    members: tuple[NodeAddress, ...]
    replicas: int
    deadline_s: float
    auto_start: bool
    idle_exit_s: float | None
    backpressure: str = "skip"
    placement: AgreedPlacement | None = None
    nonce: str = ""  # known to all ranks of this incarnation, and never used before

    def to_json(self) -> bytes:
        members = [(one.node_id, one.identity.incarnation, one.grpc_address, one.labels) for one in self.members]
        placement = None if self.placement is None else self.placement.to_json()
        return json.dumps({**dataclasses.asdict(self), "members": members, "placement": placement}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> SessionSpec:
        found = json.loads(data)
        found["members"] = tuple(
            NodeAddress(NodeIdentity(node_id, incarnation), address, tuple((level, value) for level, value in labels))
            for node_id, incarnation, address, labels in found["members"]
        )
        found["placement"] = None if found["placement"] is None else AgreedPlacement.from_json(found["placement"])
        return cls(**found)
