"""Segments that are being written, and those that wait to be written again: who may have which.

A free segment is still mapped by the process that wrote it last. It goes to that process, or, when that process is
dead, to anybody: a living one could still write into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Container, Iterator
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


def fits(capacity: int, wanted: int) -> bool:
    """Whether a free segment of this capacity serves a request."""
    return wanted <= capacity <= int(wanted * _FIT) + _FIT_SLACK


class Shelves:
    """Free segments by client and capacity, so that thousands of small ones cost no more to look through than a few."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[str, int], dict[str, Recycled]] = {}
        self.bytes = 0

    def put(self, segment: Recycled) -> None:
        self._shelves.setdefault((segment.name.client_id, segment.capacity), {})[segment.name.text] = segment
        self.bytes += segment.capacity

    def take(self, client_id: str, capacity: int) -> Recycled | None:
        """One from the shelf, the last that was put there; None when it is empty."""
        shelf = self._shelves.get((client_id, capacity))
        if shelf is None:
            return None
        segment = shelf.popitem()[1]
        if not shelf:
            del self._shelves[client_id, capacity]
        self.bytes -= capacity
        return segment

    def take_one(self, client_id: str, capacity: int, inodes: Container[int]) -> Recycled | None:
        """One of these from the shelf; None when there is none."""
        shelf = self._shelves.get((client_id, capacity), {})
        for name, segment in shelf.items():
            if segment.inode in inodes:
                del shelf[name]
                if not shelf:
                    del self._shelves[client_id, capacity]
                self.bytes -= capacity
                return segment
        return None

    def of(self, client_id: str) -> list[Recycled]:
        """All of one client."""
        return [one for (owner, _), shelf in self._shelves.items() if owner == client_id for one in shelf.values()]

    def owners(self) -> set[str]:
        return {owner for owner, _ in self._shelves}

    def sizes(self, first: str, least: int, most: int | None = None) -> list[tuple[str, int]]:
        """Shelves (client, capacity) with capacities in a range: those of client `first` first, small ones first."""
        found = [shelf for shelf in self._shelves if least <= shelf[1] and (most is None or shelf[1] <= most)]
        return sorted(found, key=lambda shelf: (shelf[0] != first, shelf[1]))


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


@dataclass(frozen=True, slots=True)
class Surplus:
    """A file of which only the beginning is needed; the rest is given back without the lock."""

    path: Path
    capacity: int

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self.path, self.capacity)


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
        self._free = Shelves()
        self._reserved: dict[str, Reservation] = {}
        self.reserved_bytes = 0
        self.doomed: list[Doomed | Surplus] = []
        # Segments made ahead of need for objects of any size, by inode.
        self._blank: set[int] = set()

    @property
    def free_bytes(self) -> int:
        return self._free.bytes

    def adopt_file(self, name: SegmentName) -> None:
        """Take a file that was found in segments/ at start into account; one that nobody may use is removed."""
        path = self._paths.segments / name.text
        found = path.stat()
        if found.st_size == 0 and not name.free and self._is_alive(name.client_id):
            return  # its trainer has no agent, and makes it at this moment
        if found.st_nlink > 1 or found.st_size == 0:
            self._doom(path)
        elif name.free:
            self._free.put(Recycled(name, found.st_ino, found.st_size))
        elif self._is_alive(name.client_id):
            self.add(Reservation(name.text, found.st_ino, found.st_size))
        else:
            self._set_free(path, name.client_id, found.st_ino, found.st_size)

    def take(self, client_id: str, capacity: int) -> Reservation | None:
        """The free segment that fits best, for this client; None when there is none that it may have."""
        most = int(capacity * _FIT) + _FIT_SLACK
        for segment in self._fitting(client_id, capacity, most):
            name = SegmentName.new(client_id)
            try:
                rename_new(self._paths.segments / segment.name.text, self._paths.segments / name.text)
            except FileNotFoundError:
                continue
            reservation = Reservation(name.text, segment.inode, segment.capacity)
            self.add(reservation)
            return reservation
        return self._take_blank(client_id, capacity)

    def _take_blank(self, client_id: str, capacity: int) -> Reservation | None:
        """The beginning of a segment that was made for an object of any size."""
        for owner, size in self._free.sizes(client_id, capacity) if self._blank else ():
            if owner != client_id:
                break
            segment = self._free.take_one(owner, size, self._blank)
            if segment is None:
                continue
            self._blank.discard(segment.inode)
            name = SegmentName.new(client_id)
            path = self._paths.segments / name.text
            rename_new(self._paths.segments / segment.name.text, path)
            self.doomed.append(Surplus(path, capacity))
            reservation = Reservation(name.text, segment.inode, capacity)
            self.add(reservation)
            return reservation
        return None

    def stock(self, path: Path, client_id: str, blank: bool) -> None:
        """A new file is a free segment of a client from now on. `blank`: for objects of any size that it can hold."""
        found = path.stat()
        if blank:
            self._blank.add(found.st_ino)
        self._set_free(path, client_id, found.st_ino, found.st_size)

    def free_of(self, client_id: str) -> list[Recycled]:
        """Free segments that a client wrote last, or that were made for it."""
        return self._free.of(client_id)

    def lend(self, client_id: str, capacity: int) -> Recycled | None:
        """Like `take`, for a small object that the caller writes at once: the file keeps its name until it is sealed.

        A crash leaves a free segment, whatever is in it. What is not sealed comes back with `put_back`.
        """
        return next(self._fitting(client_id, capacity, int(capacity * _FIT)), None)

    def put_back(self, segment: Recycled) -> None:
        """A segment that was lent is free again."""
        self._free.put(segment)

    def _fitting(self, client_id: str, capacity: int, most: int) -> Iterator[Recycled]:
        """Free segments that a client may have, each taken off its shelf; its own first, for it has them mapped."""
        for owner, size in self._free.sizes(client_id, capacity, most):
            if owner != client_id and self._is_alive(owner):
                continue
            while (segment := self._free.take(owner, size)) is not None:
                self._blank.discard(segment.inode)
                yield segment

    def add(self, reservation: Reservation) -> None:
        """A segment that was made for a client."""
        self._reserved[reservation.segment] = reservation
        self.reserved_bytes += reservation.capacity

    def reservation(self, client_id: str, segment: str) -> Reservation | None:
        """A client's reservation; None when it has no such.

        Raises:
            SegmentError: the segment is another client's, or free.
        """
        name = SegmentName.parse(segment)
        if name.client_id != client_id:
            raise SegmentError(f"segment {segment} belongs to client {name.client_id}, not to {client_id}")
        if name.free:
            raise SegmentError(f"segment {segment} is free; reserve one first")
        return self._reserved.get(segment)

    def sealed(self, segment: str) -> None:
        """The segment was published, and is no reservation any more."""
        self._unreserve(segment)

    def _unreserve(self, segment: str) -> bool:
        reservation = self._reserved.pop(segment, None)
        if reservation is None:
            return False
        self.reserved_bytes -= reservation.capacity
        return True

    def sealed_inode(self, inode: int) -> None:
        """Like `sealed`, for a segment that its client published by itself."""
        for reservation in list(self._reserved.values()):
            if reservation.inode == inode:
                self._unreserve(reservation.segment)

    def forget_removed(self) -> None:
        """Reservations end whose files their clients removed, because the object was there already."""
        for segment in list(self._reserved):
            if not (self._paths.segments / segment).exists():
                self._unreserve(segment)

    def release(self, segment: str) -> None:
        """A reservation ends without an object."""
        if not self._unreserve(segment):
            return
        path = self._paths.segments / segment
        with contextlib.suppress(FileNotFoundError):
            self.recycle(path, SegmentName.parse(segment).client_id)

    def reserved_by(self, client_id: str) -> list[str]:
        """The segments that are reserved for a client."""
        prefix = f"w.{client_id}."
        return [segment for segment in self._reserved if segment.startswith(prefix)]

    def client_gone(self, client_id: str) -> None:
        """Everything a dead client had reserved becomes free, also segments that it made without us."""
        prefix = f"w.{client_id}."
        for segment in self.reserved_by(client_id):
            self._unreserve(segment)
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
        self._free.put(Recycled(name, inode, size))

    def trim(self, wanted: int, only: Callable[[str], bool] = lambda client_id: True) -> int:
        """Give up free segments until `wanted` bytes are gained or none is left; bytes gained.

        Those of the dead go first, for nobody has them mapped, and small ones before large ones.

        Args:
            only: whether those of a client may go.
        """
        if wanted <= 0:
            return 0
        gained = 0
        alive = {owner: self._is_alive(owner) for owner in self._free.owners() if only(owner)}
        shelves = [shelf for shelf in self._free.sizes("", 0) if shelf[0] in alive]
        for owner, size in sorted(shelves, key=lambda shelf: (alive[shelf[0]], shelf[1])):
            while gained < wanted and (segment := self._free.take(owner, size)) is not None:
                self._blank.discard(segment.inode)
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
