"""Replicator: checkpoints in the memory of the training nodes that survive the loss of a node.

Importing this package loads neither torch nor gRPC: what it exports is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replicator.checkpoint.directory import DirectoryCommit, commit_dir
    from replicator.checkpoint.layout import RestoredDirectory, restore_dir
    from replicator.client.plan import Plan
    from replicator.client.session import Session, init
    from replicator.errors import ReplicatorError
    from replicator.ids import CheckpointContainerId, CheckpointObjectId, ContainerVersion, ObjectVersion

__all__ = [
    "CheckpointContainerId",
    "CheckpointObjectId",
    "ContainerVersion",
    "DirectoryCommit",
    "ObjectVersion",
    "Plan",
    "ReplicatorError",
    "RestoredDirectory",
    "Session",
    "__version__",
    "commit_dir",
    "init",
    "restore_dir",
]

_HOMES = {
    "CheckpointContainerId": "replicator.ids",
    "CheckpointObjectId": "replicator.ids",
    "ContainerVersion": "replicator.ids",
    "DirectoryCommit": "replicator.checkpoint.directory",
    "ObjectVersion": "replicator.ids",
    "Plan": "replicator.client.plan",
    "ReplicatorError": "replicator.errors",
    "RestoredDirectory": "replicator.checkpoint.layout",
    "Session": "replicator.client.session",
    "commit_dir": "replicator.checkpoint.directory",
    "init": "replicator.client.session",
    "restore_dir": "replicator.checkpoint.layout",
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
