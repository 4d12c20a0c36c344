"""The text that the demo trains on: the sources of Python's own standard library, in a fixed order."""

from __future__ import annotations

import sysconfig
from pathlib import Path

MAX_BYTES = 2 << 20


def standard_library(max_bytes: int = MAX_BYTES) -> bytes:
    """The first `max_bytes` of the top-level modules' sources, sorted by name; the same in every process."""
    pieces: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
        if size >= max_bytes:
            break
    return b"".join(pieces)[:max_bytes]
