"""Reading a sealed object of this node. While a reader is open the object's memory is not recycled."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Iterable
from typing import Any

from replicator.errors import CorruptObjectError, ObjectNotFoundError
from replicator.ids import ObjectVersion
from replicator.native import crc32c
from replicator.store.paths import StorePaths
from replicator.store.trailer import ObjectInfo, read_trailer

# The recycler holds the exclusive lock for one rename.
_LOCK_DEADLINE_S = 2.0
_LOCK_PAUSE_S = 0.001


class ObjectReader:
    """A sealed object, open. Use as a context manager. `fd` reads the payload at its offsets, from 0 to `info.size`.

    A shared flock on `fd` keeps the memory from being recycled; it lasts until the reader is closed and nobody
    holds a part of `view` any more.
    """

    def __init__(self, fd: int, info: ObjectInfo) -> None:
        self.fd = fd
        self.info = info
        self._view: memoryview | None = None
        self._map: mmap.mmap | None = None
        self._owner: Any = None

    @property
    def view(self) -> memoryview:
        """The payload, read-only; mapped at first use."""
        if self._view is None:
            if self.info.size == 0:
                self._view = memoryview(b"")
            else:
                self._map = mmap.mmap(self.fd, self.info.size, mmap.MAP_SHARED, mmap.PROT_READ)
                self._map.madvise(mmap.MADV_DONTFORK)
                # The descriptor, and with it the lock, lives as long as the mapping.
                self._owner = weakref.finalize(self._map, os.close, self.fd)
                self._owner.atexit = False
                self._view = memoryview(self._map)
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
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        if self._map is None:
            os.close(fd)
            return
        mapped, view, self._map, self._view = self._map, self._view, None, None
        self._owner = None
        try:
            if view is not None:
                view.release()
            mapped.close()
        except BufferError:
            return  # the finalizer closes the descriptor when the last part is let go

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
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
        os.close(fd)
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
