"""Segments that are being written, and those that wait to be written again: who may have which.

A free segment is still mapped by the process that wrote it last. It goes to that process, or, when that process is
dead, to anybody: a living one could still write into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replicator.errors import SegmentError
from replicator.store.paths import SegmentName, StorePaths
from replicator.store.publish import rename_new
from replicator.store.segment import discard

# A segment serves a request for nearly its size; a larger one would waste memory that counts against the budget.
_FIT = 1.25
_FIT_SLACK = 1 << 20


@dataclass(frozen=True, slots=True)
class Reservation:
    """A segment for one client to write. `segment` is its file name; sizes in bytes."""

    segment: str
    inode: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Recycled:
    """A free segment."""

    name: SegmentName
    inode: int
    capacity: int


class SegmentPool:
    """Not thread-safe; `Store` locks.

    Args:
        is_alive: whether a client's process lives.
        is_attached: whether it is known to work properly, so that it will not write into what it gave away.
    """

    def __init__(self, paths: StorePaths, is_alive: Callable[[str], bool], is_attached: Callable[[str], bool]) -> None:
        self._paths = paths
        self._is_alive = is_alive
        self._is_attached = is_attached
        self._free: dict[str, Recycled] = {}
        self._reserved: dict[str, Reservation] = {}

    @property
    def free_bytes(self) -> int:
        return sum(segment.capacity for segment in self._free.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(reservation.capacity for reservation in self._reserved.values())

    def adopt_file(self, name: SegmentName) -> None:
        """Take a file that was found in segments/ at start into account; one that nobody may use is removed."""
        path = self._paths.segments / name.text
        found = path.stat()
        alive = self._is_alive(name.client_id)
        if found.st_nlink > 1 or found.st_size == 0 or (name.free and alive and not self._is_attached(name.client_id)):
            path.unlink()
        elif name.free:
            self._free[name.text] = Recycled(name, found.st_ino, found.st_size)
        elif alive:
            self._reserved[name.text] = Reservation(name.text, found.st_ino, found.st_size)
        else:
            self._set_free(path, name.client_id, found.st_ino, found.st_size)

    def take(self, client_id: str, capacity: int) -> Reservation | None:
        """The free segment that fits best, for this client; None when there is none that it may have."""
        most = int(capacity * _FIT) + _FIT_SLACK
        fitting = [s for s in self._free.values() if capacity <= s.capacity <= most and self._may_have(client_id, s)]
        # Its own first: it has them mapped.
        fitting.sort(key=lambda s: (s.name.client_id != client_id, s.capacity))
        for segment in fitting:
            del self._free[segment.name.text]
            name = SegmentName.new(client_id)
            try:
                rename_new(self._paths.segments / segment.name.text, self._paths.segments / name.text)
            except FileNotFoundError:
                continue
            reservation = Reservation(name.text, segment.inode, segment.capacity)
            self._reserved[name.text] = reservation
            return reservation
        return None

    def _may_have(self, client_id: str, segment: Recycled) -> bool:
        return segment.name.client_id == client_id or not self._is_alive(segment.name.client_id)

    def add(self, reservation: Reservation) -> None:
        """A segment that was made for a client."""
        self._reserved[reservation.segment] = reservation

    def reservation(self, client_id: str, segment: str) -> Reservation | None:
        """A client's reservation; None when it has no such.

        Raises:
            SegmentError: the segment is another client's.
        """
        name = SegmentName.parse(segment)
        if name.client_id != client_id:
            raise SegmentError(f"segment {segment} belongs to client {name.client_id}, not to {client_id}")
        return self._reserved.get(segment)

    def sealed(self, segment: str) -> None:
        """The segment was published, and is no reservation any more."""
        self._reserved.pop(segment, None)

    def release(self, segment: str) -> None:
        """A reservation ends without an object."""
        reservation = self._reserved.pop(segment, None)
        if reservation is None:
            return
        path = self._paths.segments / segment
        with contextlib.suppress(FileNotFoundError):
            self.recycle(path, SegmentName.parse(segment).client_id)

    def client_gone(self, client_id: str) -> None:
        """Everything a dead client had reserved becomes free."""
        for entry in list(os.scandir(self._paths.segments)):
            if entry.name.startswith(f"w.{client_id}."):
                self._reserved.pop(entry.name, None)
                with contextlib.suppress(FileNotFoundError):
                    self.recycle(Path(entry.path), client_id)

    def recycle(self, path: Path, client_id: str) -> None:
        """Make the segment at `path` free, or remove it when somebody may still read or write it.

        Raises:
            FileNotFoundError: it is not there.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            keep = found.st_nlink == 1 and (self._is_attached(client_id) or not self._is_alive(client_id))
            if keep:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    keep = False
            if keep:
                self._set_free(path, client_id, found.st_ino, found.st_size)
            else:
                path.unlink()
        finally:
            os.close(fd)

    def _set_free(self, path: Path, client_id: str, inode: int, size: int) -> None:
        name = SegmentName.new(client_id, free=True)
        rename_new(path, self._paths.segments / name.text)
        self._free[name.text] = Recycled(name, inode, size)

    def trim(self, wanted: int) -> int:
        """Remove free segments, small ones first, until `wanted` bytes are gained or none is left; bytes gained."""
        gained = 0
        for segment in sorted(self._free.values(), key=lambda s: s.capacity):
            if gained >= wanted:
                break
            del self._free[segment.name.text]
            discard(self._paths.segments / segment.name.text)
            gained += segment.capacity
        return gained
