"""Where pulled bytes land: a segment reserved for the agent, sealed when every block in it is verified."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from replicator.agent.counters import Counters
from replicator.agent.logs import fields
from replicator.agent.sources import Opener, PeerSource
from replicator.errors import CorruptObjectError, ObjectNotFoundError
from replicator.faultpoints import reach
from replicator.ids import ObjectVersion
from replicator.store import Reservation, Store
from replicator.store.client_lock import ClientLock
from replicator.store.reader import ObjectReader, open_object
from replicator.store.segment import MappedSegment, MappingCache
from replicator.store.trailer import ObjectInfo, capacity_for, write_trailer
from replicator.transfer.lane import Lane
from replicator.transfer.pull import PullReport, pull
from replicator.transfer.turns import Patience

# From this size on an object is brought from several holders at once.
MIN_SPREAD_BYTES = 256 << 20
MAX_SPREAD = 4
# What is not urgent is brought in pieces, so that it can stop for what is.
PACED_BYTES = 64 << 20
_CHECKS_AT_ONCE = 2
# Copies that could not be opened, and wait to be looked at. The scrubber comes to the others.
MAX_SUSPECTS = 256

ResultT = TypeVar("ResultT")

log = logging.getLogger(__name__)


class Landing:
    """Used in the event loop only. The agent is a client of its own store, under an id that lives as it does."""

    def __init__(
        self,
        client_id: str,
        store: Store,
        opener: Opener,
        lanes: Mapping[str, Lane],
        counters: Counters,
    ) -> None:
        self._client_id = client_id
        self._store = store
        self._opener = opener
        self._lanes = lanes
        self._counters = counters
        self._mappings = MappingCache(store.paths)
        self._lock: ClientLock | None = None
        self._checks = asyncio.Semaphore(_CHECKS_AT_ONCE)
        self._loop = asyncio.get_running_loop()
        self._suspects: dict[ObjectVersion, asyncio.Task[None]] = {}
        # Called with an object of which the copy here was found to be bad, once it is in quarantine.
        self.on_quarantined: Callable[[ObjectInfo], None] = lambda info: None

    # -- pulling

    async def land(
        self,
        info: ObjectInfo,
        sources: Sequence[PeerSource],
        patience: Patience,
        on_progress: Callable[[int], None],
        before_seal: Callable[[], None],
        pace: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[ObjectInfo, PullReport]:
        """Pull a whole object and seal it here, its owner as `info` says.

        Args:
            before_seal: called right before the object appears under its name; what it raises prevents that.
            pace: waited for before each PACED_BYTES of an object that is not urgent.

        Raises:
            StoreFullError: no room, after everything superseded was dropped.
            TransferError, CorruptObjectError: no source gave it; with each one's reason.
        """
        self.hold()
        capacity = capacity_for(info.size, info.block_size)
        async with self._reserved(capacity) as (reservation, mapped):
            target = mapped.view[: info.size]
            if pace is None or not info.block_crcs:
                report = await self.fill(info, sources, target, patience, on_progress=on_progress)
            else:
                report = await self._fill_paced(info, sources, target, patience, on_progress, pace)
            reach("pull.verified")
            sealed = dataclasses.replace(info, client_id=self._client_id)
            before_seal()
            write_trailer(mapped.view, sealed)
            self._store.seal(self._client_id, reservation.segment, sealed)
            reach("pull.sealed")
        return sealed, report

    def hold(self) -> None:
        """Be a living client of the store: to be called before anything is written."""
        if self._lock is None:
            lock = ClientLock(self._store.paths, self._client_id)
            lock.acquire()
            self._lock = lock

    @asynccontextmanager
    async def _reserved(self, capacity: int) -> AsyncIterator[tuple[Reservation, MappedSegment]]:
        """A segment reserved for the agent, mapped; given back when the body raises."""
        reservation = await self._reserve(capacity)
        try:
            with self.mapped(reservation) as mapped:
                yield reservation, mapped
        except BaseException:
            self._store.release(self._client_id, reservation.segment)
            raise

    @contextmanager
    def mapped(self, reservation: Reservation) -> Iterator[MappedSegment]:
        """A reserved segment, mapped here. When its client dies in the block, nobody else gets that memory.

        Raises:
            SegmentError: it was given up.
        """
        mapped = self._mappings.get(reservation.segment, reservation.inode, reservation.capacity)
        with mapped.kept_at(self._store.paths.segment(reservation.segment)):
            yield mapped

    async def _reserve(self, capacity: int) -> Reservation:
        """In a thread; what comes after this was cancelled is given back."""
        working = asyncio.ensure_future(asyncio.to_thread(self._store.reserve, self._client_id, capacity))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:

            def give_back(done: asyncio.Future[Reservation]) -> None:
                if not done.cancelled() and done.exception() is None:
                    self._store.release(self._client_id, done.result().segment)

            working.add_done_callback(give_back)
            raise

    async def _fill_paced(
        self,
        info: ObjectInfo,
        sources: Sequence[PeerSource],
        target: memoryview,
        patience: Patience,
        on_progress: Callable[[int], None],
        pace: Callable[[], Awaitable[None]],
    ) -> PullReport:
        step = max(1, PACED_BYTES // info.block_size)
        count = len(info.block_crcs)
        reports: list[PullReport] = []
        for first in range(0, count, step):
            await pace()
            start = first * info.block_size
            end = min(start + step * info.block_size, info.size)
            blocks = range(first, min(first + step, count))
            report = await self.fill(
                info,
                sources,
                target[start:end],
                patience,
                blocks=blocks,
                on_progress=lambda done, start=start: on_progress(start + done),  # type: ignore[misc]
            )
            reports.append(report)
            if report.main_part is not None:
                # Who could not give this piece is not asked first for the next.
                good = report.main_part.node_id
                sources = sorted(sources, key=lambda source: source.node_id != good)
        return dataclasses.replace(_merged(reports), seconds=sum(report.seconds for report in reports))

    async def fill(
        self,
        info: ObjectInfo,
        sources: Sequence[PeerSource],
        target: memoryview,
        patience: Patience,
        *,
        blocks: Sequence[int] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> PullReport:
        """Pull the object, or some of its blocks, into memory. A large whole object comes from several holders at once.

        Raises:
            TransferError, CorruptObjectError: no source gave it; with each one's reason.
        """
        spread = min(len(sources), MAX_SPREAD) if info.size >= MIN_SPREAD_BYTES and blocks is None else 1
        count = len(info.block_crcs)
        bounds = [count * i // spread for i in range(spread + 1)]
        bad: dict[str, None] = {}
        done = [0] * spread

        def bad_block(node_id: str, block: int) -> None:
            bad[node_id] = None
            self._opener.note_bad(info.object, node_id)

        async def part(index: int) -> PullReport:
            def progressed(size: int) -> None:
                done[index] = size
                if on_progress is not None:
                    on_progress(sum(done))

            ordered = [one.pull_source(info) for one in (*sources[index:], *sources[:index])]
            if spread == 1:
                view, wanted = target, blocks
            else:
                first, last = bounds[index], bounds[index + 1]
                view = target[first * info.block_size : min(last * info.block_size, info.size)]
                wanted = range(first, last)
            return await pull(
                info,
                ordered,
                view,
                lanes=self._lanes,
                policy=patience,
                blocks=wanted,
                on_progress=progressed,
                on_bad_block=bad_block,
            )

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(part(index)) for index in range(spread)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            # Not before: a copy that is gone in the middle would be the reason that is told, instead of its bad bytes.
            for node_id in bad:
                self._opener.have_checked(info.object, node_id)
        return _merged([task.result() for task in tasks])

    # -- what is here already

    async def is_sound(self, one: ObjectVersion, size: int, crc: int) -> bool:
        """Whether this node holds exactly that, every block verified. A copy that does not verify goes to quarantine.

        One that verifies and is another one stays: only bytes that are here show that the caller is right, and then
        `give_way` sets it aside.
        """
        held = self._store.get(one)
        if held is None or (held.size, held.crc32c) != (size, crc):
            return False
        try:
            return await self.check(one)
        except ObjectNotFoundError:
            return False

    def give_way(self, info: ObjectInfo) -> None:
        """The bytes that were asked for have come and are verified: a copy with other content goes to quarantine."""
        held = self._store.get(info.object)
        if held is None or (held.size, held.crc32c) == (info.size, info.crc32c):
            return
        reason = (
            f"expected {info.size} bytes, checksum {info.crc32c:08x}, which another node had; "
            f"found {held.size} bytes, {held.crc32c:08x}"
        )
        self._note_quarantine(info.object, reason)
        self._store.quarantine(info.object, reason)

    async def check(self, one: ObjectVersion) -> bool:
        """Verify every block of the local copy; one that fails goes to quarantine.

        Raises:
            ObjectNotFoundError: there is no copy here.
        """

        def verify() -> None:
            with open_object(self._store.paths, one) as reader:
                reader.verify()

        try:
            async with self._checks:
                await asyncio.to_thread(verify)
        except CorruptObjectError as error:
            await self._quarantine(one, str(error))
            return False
        return True

    def open_to_serve(self, one: ObjectVersion) -> ObjectReader:
        """Open a local copy for another node. In any thread. A bad one is looked at here, too, and offered no more.

        Raises:
            ObjectNotFoundError, CorruptObjectError: like `open_object`.
        """
        try:
            return open_object(self._store.paths, one)
        except CorruptObjectError:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._suspect, one)
            raise

    def _suspect(self, one: ObjectVersion) -> None:
        if one not in self._suspects and len(self._suspects) < MAX_SUSPECTS:
            task = self._loop.create_task(self._look_at(one))
            self._suspects[one] = task
            task.add_done_callback(lambda done: self._suspects.pop(one, None))

    async def _look_at(self, one: ObjectVersion) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            await self.check(one)

    async def check_many(self, verify: Callable[[], ResultT]) -> ResultT:
        """Run a check of several local copies in a thread, as one of a bounded number."""
        async with self._checks:
            return await asyncio.to_thread(verify)

    async def set_aside(self, one: ObjectVersion, error: CorruptObjectError) -> None:
        """A local copy was found to be bad while it was read."""
        await self._quarantine(one, str(error))

    async def _quarantine(self, one: ObjectVersion, reason: str) -> None:
        self._note_quarantine(one, reason)
        info = self._store.get(one)
        await asyncio.to_thread(self._store.quarantine, one, reason)
        if info is not None:
            self.on_quarantined(info)

    def _note_quarantine(self, one: ObjectVersion, reason: str) -> None:
        self._counters.add("objects_quarantined")
        log.error("a local object is set aside and never offered again", extra=fields(one, reason=reason))

    def keep(self, mapped: MappedSegment) -> None:
        """A segment that was made ahead of need stays mapped. May be called in any thread."""
        self._mappings.keep(mapped)

    async def close(self) -> None:
        """Close the lanes, and give up what the agent holds as a client of its store."""
        suspects = list(self._suspects.values())
        for task in suspects:
            task.cancel()
        await asyncio.gather(*suspects, return_exceptions=True)
        for lane in self._lanes.values():
            await lane.close()
        self._mappings.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _merged(reports: Sequence[PullReport]) -> PullReport:
    return PullReport(
        size=sum(report.size for report in reports),
        parts=tuple(part for report in reports for part in report.parts),
        bad_blocks=tuple(bad for report in reports for bad in report.bad_blocks),
        failures=tuple(failure for report in reports for failure in report.failures),
        seconds=max(report.seconds for report in reports),
    )
