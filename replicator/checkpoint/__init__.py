"""`torch.distributed.checkpoint` on top of a session: writer, reader, and the format of objects. Imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replicator.checkpoint.reader import ReplicatedStorageReader
    from replicator.checkpoint.writer import ReplicatedStorageWriter

__all__ = ["ReplicatedStorageReader", "ReplicatedStorageWriter"]

_HOMES = {
    "ReplicatedStorageReader": "replicator.checkpoint.reader",
    "ReplicatedStorageWriter": "replicator.checkpoint.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
