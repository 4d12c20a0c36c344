"""`torch.distributed.checkpoint` on top of a session: writer, reader, and the format of objects. Imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replicator.checkpoint.buckets import ObjectWriteBucket, WriteItemResolver
    from replicator.checkpoint.committing import SaveInParts
    from replicator.checkpoint.default_saver import DefaultCheckpointSaver
    from replicator.checkpoint.loader import CheckpointLoader, DefaultCheckpointLoader
    from replicator.checkpoint.objects import CheckpointObjectManager
    from replicator.checkpoint.reader import ReplicatedStorageReader
    from replicator.checkpoint.saver import CheckpointSaver
    from replicator.checkpoint.writer import ReplicatedStorageWriter

__all__ = [
    "CheckpointLoader",
    "CheckpointObjectManager",
    "CheckpointSaver",
    "DefaultCheckpointLoader",
    "DefaultCheckpointSaver",
    "ObjectWriteBucket",
    "ReplicatedStorageReader",
    "ReplicatedStorageWriter",
    "SaveInParts",
    "WriteItemResolver",
]

_HOMES = {
    "CheckpointLoader": "replicator.checkpoint.loader",
    "CheckpointObjectManager": "replicator.checkpoint.objects",
    "CheckpointSaver": "replicator.checkpoint.saver",
    "DefaultCheckpointLoader": "replicator.checkpoint.loader",
    "DefaultCheckpointSaver": "replicator.checkpoint.default_saver",
    "ObjectWriteBucket": "replicator.checkpoint.buckets",
    "ReplicatedStorageReader": "replicator.checkpoint.reader",
    "ReplicatedStorageWriter": "replicator.checkpoint.writer",
    "SaveInParts": "replicator.checkpoint.committing",
    "WriteItemResolver": "replicator.checkpoint.buckets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
