"""Replicator: checkpoints in the memory of the training nodes that survive the loss of a node.

Importing this package loads neither torch nor gRPC: what it exports is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replicator.client.plan import Plan
    from replicator.client.session import Session, init
    from replicator.errors import ReplicatorError
    from replicator.ids import CheckpointContainerId, CheckpointObjectId, ContainerVersion, ObjectVersion

__all__ = [
    "CheckpointContainerId",
    "CheckpointObjectId",
    "ContainerVersion",
    "ObjectVersion",
    "Plan",
    "ReplicatorError",
    "Session",
    "__version__",
    "init",
]

_HOMES = {
    "CheckpointContainerId": "replicator.ids",
    "CheckpointObjectId": "replicator.ids",
    "ContainerVersion": "replicator.ids",
    "ObjectVersion": "replicator.ids",
    "Plan": "replicator.client.plan",
    "ReplicatorError": "replicator.errors",
    "Session": "replicator.client.session",
    "init": "replicator.client.session",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from replicator.version import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
