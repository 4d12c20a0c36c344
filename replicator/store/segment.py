"""Segments: files of the store that a process maps, writes once and keeps mapped for the next time.

A page that was never touched costs far more than copying into it, and so does mapping a file anew. So segments
are recycled by rename, and a process keeps its mapping of a segment as long as the file exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from replicator.errors import SegmentError, StoreError
from replicator.store import huge, mapping, numa
from replicator.store.client_lock import client_pid
from replicator.store.mapping import HUGE_PAGE
from replicator.store.mounts import room_for
from replicator.store.paths import SegmentName, StorePaths
from replicator.store.trailer import PAGE

MAX_KEPT = 256
"""Mappings that a process keeps; each takes a descriptor."""

# Smaller ones hold little memory: it is looked for those of them that were removed in one call of so many.
_LARGE_BYTES = 64 << 10
_CALLS_PER_LOOK = 32

# At most an eighth is wasted.
_MIN_HUGE_BYTES = 8 * HUGE_PAGE
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_libc = ctypes.CDLL(None, use_errno=True)


def round_up(paths: StorePaths, capacity: int) -> int:
    """What is allocated for `capacity` bytes: whole pages, huge ones where there are any and little is wasted."""
    unit = HUGE_PAGE if paths.huge_pages and capacity >= _MIN_HUGE_BYTES else PAGE
    return -(-capacity // unit) * unit


def create_segment(paths: StorePaths, client_id: str, capacity: int, name: str = "") -> tuple[str, int]:
    """Make and allocate a segment of `capacity` bytes for a client; its (name, inode). `name`: the one to give it.

    The memory is allocated before anybody can map it, so a full tmpfs is an error here and never a SIGBUS later.

    Raises:
        StoreFullError: the file system has not that much room.
        StoreError: it cannot be made for another reason.
    """
    name = name or SegmentName.new(client_id).text
    path = paths.segment(name)
    try:
        with room_for(f"a segment of {capacity} bytes", paths.root):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, capacity)
                _put_near(paths, client_id, fd, capacity)
                if not paths.huge_pages:
                    huge.allocate(fd, capacity)
                os.posix_fallocate(fd, 0, capacity)
                return name, os.fstat(fd).st_ino
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(fd)
    except OSError as error:
        raise StoreError(f"cannot make a segment of {capacity} bytes in {paths.segments}: {error.strerror}") from None


def _put_near(paths: StorePaths, client_id: str, fd: int, capacity: int) -> None:
    """Have the memory of a new file near to its client. Where that cannot be done it is wherever the kernel likes."""
    if len(numa.nodes()) < 2:
        return
    pid = client_pid(paths, client_id)
    node = None if pid is None else numa.node_of(pid)
    if node is not None:
        with mapping.mapped_for_advice(fd, capacity) as address:
            numa.prefer(address, capacity, node)


def discard(path: Path) -> None:
    """Remove a segment that nobody reads and give its memory back at once, also when somebody still has it mapped.

    Who writes into such a mapping all the same gets new memory that is freed with the mapping, and no signal.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        path.unlink(missing_ok=True)
        # A file system without holes frees the memory when the last mapping goes.
        _libc.fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(os.fstat(fd).st_size))
    finally:
        os.close(fd)


class MappedSegment:
    """A segment mapped for writing. `view` covers all of it; forked children do not inherit the mapping.

    It stays mapped while this, or a part of `view`, is held by anybody.

    Raises:
        OSError: the file cannot be opened or mapped.
        SegmentError: the file is empty.
    """

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.name = name
        self._fd = mapping.open_parents_only(path, os.O_RDWR)
        try:
            found = os.fstat(self._fd)
            self.inode = found.st_ino
            self.capacity = found.st_size
            if not self.capacity:
                raise SegmentError(f"segment {name} is empty; it was not reserved")
            self.view = mapping.map_file(self._fd, self.capacity, writable=True)
        except BaseException:
            mapping.close(self._fd)
            raise

    @property
    def is_linked(self) -> bool:
        """Whether the file still has a name: what has none is not going to be used again."""
        return os.fstat(self._fd).st_nlink > 0

    def cut(self, capacity: int) -> None:
        """The file was cut to its first `capacity` bytes, and so is `view`."""
        self.view = self.view[:capacity]
        self.capacity = capacity

    def allocate(self, offset: int, length: int) -> None:
        """Have memory for a part of the file. Raises OSError when the file system is full."""
        os.posix_fallocate(self._fd, offset, length)

    def collapse(self, offset: int, length: int) -> int:
        """Have huge pages for a part of a new file, however long that takes. Returns and raises as `huge.collapse`."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.view, offset))
        return huge.collapse(self._fd, address, offset, length)

    @contextlib.contextmanager
    def kept_at(self, path: Path) -> Iterator[None]:
        """For who writes on behalf of another process, which may die meanwhile: until the end of the block the memory
        goes to nobody else, for the recycler takes this process for a reader.

        Raises:
            SegmentError: the segment is no longer at `path`; it was given up before.
        """
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        try:
            if not self._is_at(path):
                raise SegmentError(f"segment {self.name} was given up; its client is gone")
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except FileNotFoundError:
            return False


class MappingCache:
    """The segments that this process has mapped, by inode. Thread-safe.

    The largest are kept, a bounded number: mapping anew costs by the byte.
    """

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths
        self._mapped: dict[int, MappedSegment] = {}
        self._lock = threading.Lock()
        self._calls = 0

    def get(self, name: str, inode: int, capacity: int) -> MappedSegment:
        """The mapping of a segment of `capacity` bytes that was reserved for this process; made when there is none.

        Also lets go of mappings whose files were removed.

        Raises:
            SegmentError: there is no such segment, or it is another file or smaller than `capacity` bytes.
        """
        with self._lock:
            self._drop_unlinked()
            mapped = self._mapped.get(inode)
            if mapped is None:
                mapped = self._map(name)
            if mapped.inode != inode or mapped.capacity < capacity:
                found = f"inode {mapped.inode} of {mapped.capacity} bytes"
                raise SegmentError(f"expected segment {name} with inode {inode} of {capacity} bytes, found {found}")
            mapped.name = name
            if mapped.capacity > capacity:
                mapped.cut(capacity)
            self._keep(mapped)
            return mapped

    def keep(self, mapped: MappedSegment) -> None:
        """Take over the mapping of a segment that was made ahead of need."""
        with self._lock:
            self._drop_unlinked()
            self._keep(mapped)

    def _map(self, name: str) -> MappedSegment:
        try:
            return MappedSegment(self._paths.segment(name), name)
        except OSError as error:
            raise SegmentError(f"cannot map segment {name} in {self._paths.segments}: {error.strerror}") from None

    def _keep(self, mapped: MappedSegment) -> None:
        self._mapped[mapped.inode] = mapped
        if len(self._mapped) > MAX_KEPT:
            del self._mapped[min(self._mapped.values(), key=lambda kept: kept.capacity).inode]

    def mapped_bytes(self) -> int:
        with self._lock:
            return sum(mapped.capacity for mapped in self._mapped.values())

    def _drop_unlinked(self) -> None:
        self._calls += 1
        all_of_them = self._calls % _CALLS_PER_LOOK == 0
        for inode, mapped in list(self._mapped.items()):
            if (all_of_them or mapped.capacity >= _LARGE_BYTES) and not mapped.is_linked:
                del self._mapped[inode]

    def close(self) -> None:
        """Keep none. Those in use stay mapped for their users."""
        with self._lock:
            self._mapped.clear()
