"""Who gets room in a store, and from where: the budget, reservations, and what is given up when there is none.

Thread-safe. Segments of the file system are counted before they are made, and what somebody else's files leave less
of is noticed when they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

from replicator.errors import SegmentError, StoreError, StoreFullError
from replicator.faultpoints import reach
from replicator.store.ballast import Ballast
from replicator.store.client_lock import is_client_alive
from replicator.store.index import Index
from replicator.store.ingest import Batch
from replicator.store.mounts import free_bytes, has_free_files, room_for
from replicator.store.paths import StorePaths, check_client_id
from replicator.store.pool import Doomed, Recycled, Reservation, SegmentPool, Surplus
from replicator.store.quarantine import Quarantine
from replicator.store.segment import MappedSegment, create_segment, round_up
from replicator.store.stock import Fault, Stocking, new_file

T = TypeVar("T")

# Jobs that the error of a full store names.
_JOBS_NAMED = 4
_PRESSURE_ROUNDS = 3
_RELIEF_BYTES = 64 << 10
_RECORD_BYTES = 8 << 10
_REMEMBERED_GONE = 4096


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Bytes (capacities of segments) and counts."""

    budget_bytes: int
    sealed_bytes: int
    reserved_bytes: int
    free_bytes: int
    sealed_objects: int
    quarantined_objects: int
    quarantined_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.sealed_bytes + self.reserved_bytes + self.free_bytes + self.quarantined_bytes


class Room:
    """What a store takes, and may take. `Store` is one, with the objects and records in it.

    Args:
        budget_bytes: the most that segments may take.

    Attributes:
        on_pressure: called, without a lock, with the bytes that a reservation lacks; may drop superseded
            containers, and returns the bytes freed.
        is_attached: whether a living client is known to work; the segments of one that is not are never recycled.
    """

    def __init__(self, paths: StorePaths, budget_bytes: int) -> None:
        self.paths = paths
        self.on_pressure: Callable[[int], int] = lambda wanted: 0
        self.is_attached: Callable[[str], bool] = lambda client_id: True
        self.stocking = Stocking()
        self._lock = threading.RLock()
        self._index = Index()
        self._pool = self._new_pool()
        self._quarantine = Quarantine(paths)
        self._ballast = Ballast(paths.ballast)
        self._budget = budget_bytes
        self._in_flight = 0
        self._gone: dict[str, None] = {}

    def _new_pool(self) -> SegmentPool:
        return SegmentPool(
            self.paths,
            lambda client_id: is_client_alive(self.paths, client_id),
            lambda client_id: is_client_alive(self.paths, client_id) and self.is_attached(client_id),
        )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; after it, remove the files that were given up meanwhile. Not to be nested."""
        doomed: list[Doomed | Surplus] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    doomed, self._pool.doomed = self._pool.doomed, []
        finally:
            for file in doomed:
                file.remove()

    # -- reservations

    def reserve(self, client_id: str, capacity: int) -> Reservation:
        """A segment of at least `capacity` bytes for a client to map and write.

        Raises:
            StoreFullError: beyond the budget, or no room in the file system, with numbers.
            SegmentError: not a capacity, or the client has died meanwhile.
        """
        check_client_id(client_id)
        if capacity <= 0:
            raise SegmentError(f"expected a capacity of 1 byte or more, found {capacity}")
        capacity = round_up(self.paths, capacity)
        self.stocking.demanded()
        for attempt in range(_PRESSURE_ROUNDS + 1):
            found, lacking = self._take(client_id, capacity)
            if found is not None:
                return found
            if lacking <= 0:
                return self._create(client_id, capacity)
            if self.stocking.give_way():
                continue
            if attempt == _PRESSURE_ROUNDS or capacity > self._budget or self.on_pressure(lacking) <= 0:
                break
        # Another thread may have made room meanwhile.
        found, lacking = self._take(client_id, capacity)
        if found is not None:
            return found
        if lacking <= 0:
            return self._create(client_id, capacity)
        raise self._full(capacity)

    def _full(self, wanted: int) -> StoreFullError:
        usage = self.usage()
        return StoreFullError(
            f"no room for {wanted} bytes: of the budget of {usage.budget_bytes} bytes, {usage.sealed_bytes} hold "
            f"sealed objects{self._of_jobs()} and {usage.reserved_bytes} are being written, and nothing more may be "
            f"dropped; raise budget_bytes (the file system has {free_bytes(self.paths.root)} bytes left) or keep fewer "
            "checkpoints"
        )

    def _of_jobs(self) -> str:
        """What each job holds, the largest first, also jobs that are over; empty for one alone."""
        held: dict[str, int] = {}
        with self._lock:
            for version in self._index.versions(None):
                job = version.container.job
                held[job] = held.get(job, 0) + self._index.bytes_of(version)
        if len(held) < 2:
            return ""
        largest = sorted(held, key=lambda job: (-held[job], job))
        named = ", ".join(f"{held[job]} of job {job}" for job in largest[:_JOBS_NAMED])
        others = f", and {len(largest) - _JOBS_NAMED} other jobs" if len(largest) > _JOBS_NAMED else ""
        return f" ({named}{others}; each job keeps its last checkpoints until they are removed)"

    def _take(self, client_id: str, capacity: int) -> tuple[Reservation | None, int]:
        """A free segment; else what the budget lacks (bytes), or 0 when `capacity` is now counted as in flight."""
        with self._changing():
            found = self._pool.take(client_id, capacity)
            if found is not None:
                return found, 0
            lacking = self._used() + self._in_flight + capacity - self._budget
            if capacity <= self._budget:
                lacking -= self._pool.trim(lacking)
                lacking -= self._quarantine.trim(lacking)
            if lacking <= 0:
                self._in_flight += capacity
            return None, max(lacking, 0)

    def _create(self, client_id: str, capacity: int) -> Reservation:
        """Make a segment that is counted as in flight. Allocating clears memory: that is not done under the lock."""
        try:
            try:
                name, inode = create_segment(self.paths, client_id, capacity)
            except StoreFullError:
                # Within the budget, but somebody else fills the file system.
                found = self._make_room(client_id, capacity)
                if found is not None:
                    return found
                name, inode = create_segment(self.paths, client_id, capacity)
            reach("reserve.created")
            reservation = Reservation(name, inode, capacity)
            with self._changing():
                self._pool.add(reservation)
                if client_id in self._gone and not is_client_alive(self.paths, client_id):
                    self._pool.release(name)
                    raise SegmentError(f"client {client_id} has died while {capacity} bytes were allocated for it")
            return reservation
        finally:
            with self._lock:
                self._in_flight -= capacity

    def _make_room(self, client_id: str, capacity: int) -> Reservation | None:
        """Give up what the file system may get back; a free segment that came of it and fits."""
        self.stocking.give_way()
        with self._changing():
            gained = self._pool.trim(capacity)
            self._quarantine.trim(capacity - gained)
        # What was given up may be back already, and what others hold is theirs: the file system says what lacks.
        lacking = self._lacking(capacity)
        if lacking > 0 and self.on_pressure(lacking) > 0:
            with self._changing():
                found = self._pool.take(client_id, capacity)
                if found is not None:
                    return found
                self._pool.trim(lacking)
        return None

    def _lacking(self, wanted: int) -> int:
        """Bytes that the file system lacks; 1 when it is only short of file names."""
        return max(wanted - free_bytes(self.paths.root), 0 if has_free_files(self.paths.root) else 1)

    def reservation(self, client_id: str, segment: str) -> Reservation:
        """What a client has reserved.

        Raises:
            SegmentError: it has no such segment (any more).
        """
        with self._lock:
            found = self._pool.reservation(client_id, segment)
        if found is None:
            raise SegmentError(f"segment {segment} is not reserved (any more); reserve another one")
        return found

    def release(self, client_id: str, segment: str) -> None:
        """End a reservation without an object. Idempotent.

        Raises:
            SegmentError: the segment is another client's.
        """
        with self._changing():
            if self._pool.reservation(client_id, segment) is not None:
                self._pool.release(segment)

    def keep_only(self, client_id: str, segments: Collection[str]) -> int:
        """End all reservations of a client but these; how many. For one that says which segments it knows of."""
        with self._changing():
            unknown = [segment for segment in self._pool.reserved_by(client_id) if segment not in segments]
            for segment in unknown:
                self._pool.release(segment)
            return len(unknown)

    def client_gone(self, client_id: str) -> None:
        """A client's process has ended: what it had reserved and not sealed is free, also what it took without us."""
        with self._changing():
            self._pool.client_gone(check_client_id(client_id))
            if not is_client_alive(self.paths, client_id):
                self.paths.client(client_id).unlink(missing_ok=True)
                self._gone[client_id] = None
                while len(self._gone) > _REMEMBERED_GONE:
                    del self._gone[next(iter(self._gone))]

    # -- many small objects, and records

    def _fund(self, client_id: str, batch: Batch) -> None:
        """Free segments and budget for the objects of a batch; some of them are refused when there is not enough."""
        rounds = _PRESSURE_ROUNDS
        self.stocking.demanded()
        while True:
            with self._changing():
                before = batch.claimed
                needed = batch.borrow(lambda capacity: self._pool.lend(client_id, capacity))
                self._in_flight += batch.claimed - before
                lacking = self._used() + self._in_flight + needed - self._budget
                lacking -= self._pool.trim(lacking)
                lacking -= self._quarantine.trim(lacking)
                if lacking <= 0 or rounds == 0:
                    self._in_flight += batch.fund(needed - max(lacking, 0))
                    break
            if not self.stocking.give_way():
                rounds = rounds - 1 if self.on_pressure(lacking) > 0 else 0
        if batch.is_short:
            batch.refuse(self._full(needed))

    def _relieve(self, wanted: int) -> bool:
        """Give up what the file system may get back. Whether there was anything."""
        self.stocking.give_way()
        with self._changing():
            gained = self._pool.trim(wanted)
            gained += self._quarantine.trim(wanted - gained)
        if gained < wanted and self.on_pressure(wanted - gained) > 0:
            with self._changing():
                gained += self._pool.trim(wanted - gained)
        return gained > 0

    def _with_room(self, what: str, wanted: int, change: Callable[[], T]) -> T:
        """Make a small change of the file system, and give up for it what can be given up when that is full.

        Args:
            change: called with the store locked; when it raises, nothing has changed.

        Raises:
            StoreFullError: nothing more can be given up.
            StoreError: the file system refuses for another reason.
        """
        left, is_last = _PRESSURE_ROUNDS, False
        while True:
            try:
                with self._lock, room_for(what, self.paths.root):
                    return change()
            except OSError as error:
                raise StoreError(f"cannot write {what} in {self.paths.root}: {error.strerror}") from None
            except StoreFullError:
                if left:
                    left -= 1
                    # Not only as much as is wanted: somebody else takes what becomes free, too.
                    if self._relieve(max(wanted, _RELIEF_BYTES)):
                        continue
                    left = 0
                if is_last or not self._ballast.give_up(wanted + _RECORD_BYTES):
                    raise
                is_last = True

    # -- ahead of need

    def stock(self, client_id: str, capacity: int, fault: Fault, blank: bool) -> bool:
        """Make a free segment for a living client ahead of need, within the budget, which nobody else needs now.

        Whoever reserves meanwhile stops it, and gets the room. One thread at a time.

        Args:
            fault: touches the segment's pages, and keeps its mapping when it has touched all.
            blank: the segment may serve any object that it can hold, and is cut to its size then.

        Returns:
            Whether it was made. If not, nothing is left of it.

        Raises:
            StoreError: it cannot be made; the file system is full, for instance.
        """
        capacity = round_up(self.paths, capacity)
        with self._changing():
            lacking = self._used() + self._in_flight + capacity - self._budget
            # What earlier agents have left is not mapped by anybody.
            lacking -= self._pool.trim(lacking, lambda owner: owner.startswith("agent-") and owner != client_id)
            if lacking > 0 or free_bytes(self.paths.root) < capacity:
                return False
            self._in_flight += capacity
            self.stocking.begin()
        try:
            with new_file(self.paths, capacity) as path:
                if not fault(MappedSegment(path, path.name), self.stocking.is_stopped):
                    return False
                with self._lock:
                    self._pool.stock(path, client_id, blank)
                return True
        except OSError as error:
            raise StoreError(f"cannot touch {capacity} bytes ahead of need: {error.strerror}") from None
        finally:
            with self._lock:
                self._in_flight -= capacity
            self.stocking.end()

    def free_segments(self, client_id: str) -> list[Recycled]:
        """Free segments that go to this client before any other."""
        with self._lock:
            return self._pool.free_of(client_id)

    # -- what is taken

    def excess(self) -> int:
        """Bytes that are taken beyond the budget, by what an agent with a larger one has left."""
        with self._lock:
            return max(self._used() + self._in_flight - self._budget, 0)

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(
                budget_bytes=self._budget,
                sealed_bytes=self._index.sealed_bytes,
                reserved_bytes=self._pool.reserved_bytes,
                free_bytes=self._pool.free_bytes,
                sealed_objects=self._index.object_count,
                quarantined_objects=self._quarantine.count,
                quarantined_bytes=self._quarantine.bytes,
            )

    def _used(self) -> int:
        return self._index.sealed_bytes + self._pool.reserved_bytes + self._pool.free_bytes + self._quarantine.bytes
