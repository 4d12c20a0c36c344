"""Room that a store keeps back for its small records: others may fill its file system to the last byte.

Without it no job could open a new incarnation on such a node, and so not recover what it holds.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from replicator.store.mounts import free_bytes, is_full

BALLAST_BYTES = 256 << 10
_LEAVE_FREE = 16 * BALLAST_BYTES
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Ballast:
    """One file that is as long as what is kept back. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Keep back the whole amount again, when that is little of what is free."""
        if self._size() >= BALLAST_BYTES or free_bytes(self._path.parent) < _LEAVE_FREE:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, BALLAST_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            # Also where there is room, and no inode is left.
            if not is_full(error):
                raise

    def give_up(self, wanted: int) -> bool:
        """Hand `wanted` bytes, in whole pages, to the file system. Whether there was anything left."""
        size = self._size()
        if size:
            os.truncate(self._path, max(size - wanted, 0) // _PAGE * _PAGE)
        return size > 0

    def _size(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._path.stat().st_size
        return 0
