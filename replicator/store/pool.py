"""Segments that are being written, and those that wait to be written again: who may have which.

A free segment is still mapped by the process that wrote it last. It goes to that process, or, when that process is
dead, to anybody: a living one could still write into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replicator.errors import SegmentError
from replicator.store.paths import TEMPORARY, SegmentName, StorePaths
from replicator.store.publish import rename_new
from replicator.store.segment import discard

# A segment serves a request for nearly its size; a larger one would waste memory that counts against the budget.
_FIT = 1.25
_FIT_SLACK = 64 << 10


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


@dataclass(frozen=True, slots=True)
class Doomed:
    """A file under a temporary name, out of the accounts, to be removed. `unread`: and nobody reads it."""

    path: Path
    unread: bool

    def remove(self) -> None:
        """Large files take their time, so this is done without the lock. A crash before it leaves it to a restart."""
        if self.unread:
            discard(self.path)
        else:
            self.path.unlink(missing_ok=True)


class SegmentPool:
    """Not thread-safe; `Store` locks.

    What is to be removed collects in `doomed`, for the caller to remove.

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
        self.doomed: list[Doomed] = []

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
        if found.st_nlink > 1 or found.st_size == 0:
            self._doom(path)
        elif name.free:
            self._free[name.text] = Recycled(name, found.st_ino, found.st_size)
        elif self._is_alive(name.client_id):
            self._reserved[name.text] = Reservation(name.text, found.st_ino, found.st_size)
        else:
            self._set_free(path, name.client_id, found.st_ino, found.st_size)

    def take(self, client_id: str, capacity: int) -> Reservation | None:
        """The free segment that fits best, for this client; None when there is none that it may have."""
        most = int(capacity * _FIT) + _FIT_SLACK
        fitting = [segment for segment in self._free.values() if capacity <= segment.capacity <= most]
        # Its own first: it has them mapped.
        fitting.sort(key=lambda s: (s.name.client_id != client_id, s.capacity))
        for segment in fitting:
            if not self._may_have(client_id, segment):
                continue
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

    def sealed_inode(self, inode: int) -> None:
        """Like `sealed`, for a segment that its client published by itself."""
        for reservation in list(self._reserved.values()):
            if reservation.inode == inode:
                del self._reserved[reservation.segment]

    def release(self, segment: str) -> None:
        """A reservation ends without an object."""
        reservation = self._reserved.pop(segment, None)
        if reservation is None:
            return
        path = self._paths.segments / segment
        with contextlib.suppress(FileNotFoundError):
            self.recycle(path, SegmentName.parse(segment).client_id)

    def client_gone(self, client_id: str) -> None:
        """Everything a dead client had reserved becomes free, also segments that it made without us."""
        prefix = f"w.{client_id}."
        for segment in [segment for segment in self._reserved if segment.startswith(prefix)]:
            del self._reserved[segment]
        for path in self._paths.segments.glob(f"{prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                self.recycle(path, client_id)

    def recycle(self, path: Path, client_id: str) -> None:
        """Make the segment at `path` free, or remove it when somebody may still read or write it.

        Raises:
            FileNotFoundError: it is not there.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            may_write = self._is_alive(client_id) and not self._is_attached(client_id)
            if not may_write and _is_unread(fd):
                found = os.fstat(fd)
                self._set_free(path, client_id, found.st_ino, found.st_size)
            else:
                self._doom(path)
        finally:
            os.close(fd)

    def _set_free(self, path: Path, client_id: str, inode: int, size: int) -> None:
        name = SegmentName.new(client_id, free=True)
        rename_new(path, self._paths.segments / name.text)
        self._free[name.text] = Recycled(name, inode, size)

    def trim(self, wanted: int) -> int:
        """Give up free segments until `wanted` bytes are gained or none is left; bytes gained.

        Those of the dead go first, for nobody has them mapped, and small ones before large ones.
        """
        if wanted <= 0:
            return 0
        gained = 0
        alive = {client_id: self._is_alive(client_id) for client_id in {s.name.client_id for s in self._free.values()}}
        for segment in sorted(self._free.values(), key=lambda s: (alive[s.name.client_id], s.capacity)):
            if gained >= wanted:
                break
            del self._free[segment.name.text]
            self._doom(self._paths.segments / segment.name.text, unread=True)
            gained += segment.capacity
        return gained

    def _doom(self, path: Path, unread: bool = False) -> None:
        temporary = self._paths.segments / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            path.rename(temporary)
        except FileNotFoundError:
            return
        self.doomed.append(Doomed(temporary, unread))


def _is_unread(fd: int) -> bool:
    """Lock the file against readers until `fd` is closed; False when there are some, or another name for it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Who gives it another name does so as a reader.
    return os.fstat(fd).st_nlink == 1
