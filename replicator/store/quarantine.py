"""Damaged files: out of sight for ever, and the newest few kept for people to look at."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from replicator.store.paths import StorePaths

_KEPT = 16


def move_away(paths: StorePaths, path: Path) -> int:
    """Put a damaged file or directory into quarantine/; the number of files moved (0 or 1)."""
    with contextlib.suppress(OSError):
        path.rename(paths.quarantine / f"{path.name[:80]}.{secrets.token_hex(8)}")
        return 1
    return 0


class Quarantine:
    """What lies there. Not thread-safe; `Store` locks.

    Attributes:
        count: files ever seen there, also those that are removed by now. bytes: taken by those that are left.
    """

    def __init__(self, paths: StorePaths) -> None:
        self._top = paths.quarantine
        self._kept: dict[str, int] = {}
        self.count = 0

    @property
    def bytes(self) -> int:
        return sum(self._kept.values())

    def look(self) -> None:
        """Count what is new, and remove what is too much."""
        found = sorted(self._top.iterdir(), key=lambda path: path.lstat().st_ctime_ns)
        self.count += len({path.name for path in found} - self._kept.keys())
        self._kept = {path.name: _size(path) for path in found}
        while len(self._kept) > _KEPT:
            self._remove_oldest()

    def trim(self, wanted: int) -> int:
        """Remove files, the oldest first, until `wanted` bytes are gained or none is left; bytes gained."""
        gained = 0
        while gained < wanted and self._kept:
            gained += self._remove_oldest()
        return gained

    def _remove_oldest(self) -> int:
        name = next(iter(self._kept))
        path = self._top / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        return self._kept.pop(name)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    return sum(
        os.lstat(os.path.join(directory, name)).st_size for directory, _, names in os.walk(path) for name in names
    )
