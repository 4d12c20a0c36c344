"""Windows: some blocks of an object straight to a trainer's load, past this node's store.

A load on an empty node need not wait until memory of the store was touched for the first time: the blocks come into a
few scratch segments that the trainer reserved once and that both processes keep mapped, and it copies them on to its
tensors while the next ones come. The object itself is brought here afterwards, when no trainer waits for bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from replicator.agent.landing import Landing
from replicator.agent.refill import Quiet
from replicator.agent.sources import Opener
from replicator.agent.takings import Takings
from replicator.checksum import block_count, block_length
from replicator.decide.types import ObjectSource
from replicator.errors import InvalidIdError, SegmentError, UnsupportedError
from replicator.ids import ObjectVersion
from replicator.store import Store
from replicator.transfer.turns import Patience
from replicator.v1 import local_pb2

TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class WindowWanted:
    """What a trainer asks for: see RetrieveWindowRequest."""

    client_id: str
    object: ObjectVersion
    source: ObjectSource
    segment: str
    block_size: int
    blocks: Sequence[int]
    with_table: bool
    whole: bool

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise InvalidIdError(f"expected a block size of 1 byte or more, found {self.block_size}")
        count = block_count(self.source.size, self.block_size)
        ascending = all(a < b for a, b in pairwise(self.blocks))
        if not self.blocks or not ascending or not 0 <= self.blocks[0] <= self.blocks[-1] < count:
            raise InvalidIdError(
                f"{self.object}: expected ascending block numbers below {count}, found {list(self.blocks[:8])}"
            )

    @property
    def size(self) -> int:
        """Bytes of all the blocks."""
        return sum(block_length(block, self.source.size, self.block_size) for block in self.blocks)


class Windows:
    """Used in the event loop only.

    Args:
        slots: bounds how many pulls for trainers run at a time.
        quiet: is told while a trainer waits.
    """

    def __init__(
        self, store: Store, opener: Opener, landing: Landing, takings: Takings, slots: asyncio.Semaphore, quiet: Quiet
    ) -> None:
        self._store = store
        self._opener = opener
        self._landing = landing
        self._takings = takings
        self._slots = slots
        self._quiet = quiet
        self._filling: set[str] = set()
        # Calls under way for an object that is read whole, by client.
        self._readers: dict[ObjectVersion, Counter[str]] = {}

    async def bring(self, wanted: WindowWanted, patience: Patience) -> AsyncIterator[local_pb2.WindowEvent]:
        """Progress every TICK_S, and one last event. Given up, nothing writes into the segment any more.

        Raises:
            SegmentError: it is not reserved by the client, too small, or being filled.
            UnsupportedError: the object's blocks have another size.
            TransferError, CorruptObjectError: with each source's reason.
        """
        if self._is_elsewhere(wanted):
            yield local_pb2.WindowEvent(in_store=True)
            return
        told = local_pb2.WindowEvent()

        def progressed(size: int) -> None:
            told.bytes_done = size

        with self._quiet.disturbed(), self._reading(wanted):
            task = asyncio.ensure_future(self._fill(wanted, patience, progressed))
            try:
                while not (await asyncio.wait([task], timeout=TICK_S))[0]:
                    yield told
                yield task.result()
            finally:
                await _end(task)

    def _is_elsewhere(self, wanted: WindowWanted) -> bool:
        """Whether the trainer should read this node's copy, or wait for it: what many want is brought only once."""
        one, source = wanted.object, wanted.source
        held = self._store.get(one)
        if held is not None and (held.size, held.crc32c) == (source.size, source.crc32c):
            return True
        if not wanted.whole:
            return False
        others = self._readers.get(one, Counter()).keys() - {wanted.client_id}
        return bool(others) or self._takings.find(one, source.size, source.crc32c) is not None

    @contextlib.contextmanager
    def _reading(self, wanted: WindowWanted) -> Iterator[None]:
        if not wanted.whole:
            yield
            return
        readers = self._readers.setdefault(wanted.object, Counter())
        readers[wanted.client_id] += 1
        try:
            yield
        finally:
            readers[wanted.client_id] -= 1
            if not readers[wanted.client_id]:
                del readers[wanted.client_id]
            if not readers:
                self._readers.pop(wanted.object, None)

    async def _fill(
        self, wanted: WindowWanted, patience: Patience, progressed: Callable[[int], None]
    ) -> local_pb2.WindowEvent:
        one, source, size = wanted.object, wanted.source, wanted.size
        async with self._slots:
            with self._scratch(wanted.client_id, wanted.segment, size) as target:
                sources = self._opener.sources(one, source.node_ids)
                info = await self._opener.describe_any(sources, one, source.size, source.crc32c, patience)
                if info.block_size != wanted.block_size:
                    raise UnsupportedError(
                        f"{one} has blocks of {info.block_size} bytes, not of {wanted.block_size}; retrieve all of it"
                    )
                report = await self._landing.fill(
                    info, sources, target, patience, blocks=wanted.blocks, on_progress=progressed
                )
        main = report.main_part
        return local_pb2.WindowEvent(
            bytes_done=size,
            done=True,
            source_node_id=main.node_id if main else "",
            lane=main.lane if main else "",
            block_crc32c=info.block_crcs if wanted.with_table else (),
        )

    @contextlib.contextmanager
    def _scratch(self, client_id: str, segment: str, size: int) -> Iterator[memoryview]:
        """The first `size` bytes of a client's segment, which nobody else gets before the block ends."""
        reservation = self._store.reservation(client_id, segment)
        if reservation.capacity < size:
            raise SegmentError(f"segment {segment} has {reservation.capacity} bytes, and {size} are to come into it")
        if segment in self._filling:
            raise SegmentError(f"segment {segment} is being filled for an earlier call; use another one")
        self._filling.add(segment)
        try:
            with self._landing.mapped(reservation) as mapped:
                yield mapped.view[:size]
        finally:
            self._filling.discard(segment)


async def _end(task: asyncio.Future[local_pb2.WindowEvent]) -> None:
    """Cancel it, and wait until it has ended: it writes into memory of somebody else."""
    while not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
