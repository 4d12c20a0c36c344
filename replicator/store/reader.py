"""Reading a sealed object of this node. While a reader is open the object's memory is not recycled."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterable

from replicator.errors import CorruptObjectError, ObjectNotFoundError, SegmentError
from replicator.ids import ObjectVersion
from replicator.native import crc32c
from replicator.store import mapping
from replicator.store.paths import StorePaths
from replicator.store.trailer import ObjectInfo, read_trailer

# The recycler holds the exclusive lock for one rename.
_LOCK_DEADLINE_S = 2.0
_LOCK_PAUSE_S = 0.001
_LARGE_BYTES = 64 << 20


class ObjectReader:
    """A sealed object, open. Use as a context manager. `fd` reads the payload at its offsets, from 0 to `info.size`.

    A shared flock on `fd` keeps the memory from being recycled; it lasts until the reader is closed and nobody
    holds a part of `view` any more. A forked child has neither.
    """

    def __init__(self, fd: int, info: ObjectInfo) -> None:
        self.fd = fd
        self.info = info
        self._pid = os.getpid()
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """The payload, read-only; mapped at first use.

        Raises:
            SegmentError: the reader is closed.
            OSError: it cannot be mapped.
        """
        if self._view is None:
            if self.fd < 0:
                raise SegmentError(f"the reader of {self.info.object} is closed; open the object again")
            if self.info.size == 0:
                return memoryview(b"")
            self._view = mapping.map_file(self.fd, self.info.size, writable=False)
        return self._view

    def verify(self, blocks: Iterable[int] | None = None) -> None:
        """Check the payload (or some blocks of it, by index) against the trailer's checksums.

        Raises:
            CorruptObjectError: names the blocks that do not match.
        """
        info = self.info
        wanted = range(len(info.block_crcs)) if blocks is None else blocks
        bad = [
            index
            for index in wanted
            if crc32c(self.view[index * info.block_size : (index + 1) * info.block_size]) != info.block_crcs[index]
        ]
        if bad:
            raise CorruptObjectError(
                f"{info.object}: blocks {bad[:8]} of {len(info.block_crcs)} do not match their checksums"
            )

    def close(self) -> None:
        """Idempotent. Parts of `view` that somebody still holds stay valid."""
        fd, self.fd = self.fd, -1
        if self._view is not None:
            self._view = None  # the descriptor goes with the mapping, when the last part is let go
        elif fd >= 0 and os.getpid() == self._pid:
            mapping.close(fd)

    def close_aside(self) -> None:
        """Close it when nobody holds a part of `view` any more. Unmapping much memory is left to another thread."""
        if self._view is None or self.info.size < _LARGE_BYTES or os.getpid() != self._pid:
            self.close()
            return
        # The memory may serve again before that thread comes to it.
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        try:
            threading.Thread(target=self.close, name="replicator-unmap", daemon=True).start()
        except RuntimeError:  # no more threads
            self.close()

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_object(paths: StorePaths, one: ObjectVersion) -> ObjectReader:
    """Open a sealed object for reading.

    Raises:
        ObjectNotFoundError: this node does not hold it.
        CorruptObjectError: its trailer is not valid, or is that of another object.
    """
    path = paths.object(one)
    try:
        fd = mapping.open_parents_only(path, os.O_RDONLY)
    except FileNotFoundError:
        raise ObjectNotFoundError(f"this node does not hold {one}") from None
    try:
        _lock_shared(fd, one)
        # The file may have been recycled between open and lock.
        if not _is_at(fd, path):
            raise ObjectNotFoundError(f"this node does not hold {one} any more")
        info = read_trailer(fd)
        if info.object != one:
            raise CorruptObjectError(f"expected {one} in {path}, found {info.object}")
        return ObjectReader(fd, info)
    except BaseException:
        mapping.close(fd)
        raise


def _lock_shared(fd: int, one: ObjectVersion) -> None:
    end = time.monotonic() + _LOCK_DEADLINE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise ObjectNotFoundError(f"{one} is being recycled") from None
            time.sleep(_LOCK_PAUSE_S)


def _is_at(fd: int, path: os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
