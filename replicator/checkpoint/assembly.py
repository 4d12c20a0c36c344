"""The items of one object that a load reads, filled from the front to the back of the object as its blocks come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch.distributed.checkpoint.planner import LoadPlanner

from replicator.checkpoint.loading import Reading
from replicator.checkpoint.verified_copy import Extent, touched_blocks

_CLEARED_AT_ONCE = 1 << 20


class Assembly:
    """An item takes memory when its first block comes, and is handed on after its last one. Not thread-safe.

    Attributes:
        again: what has to be read once more, in another way.
    """

    def __init__(self, readings: Iterable[Reading], planner: LoadPlanner | None) -> None:
        self._planner = planner
        self._waiting = deque(sorted(readings, key=_begin))
        self._active: list[tuple[Reading, list[Extent]]] = []
        self.ranges = [one for reading in self._waiting for one in reading.ranges]
        self._done = 0
        self._block_size = 0
        self._blocks: deque[int] = deque()
        self.again: list[Reading] = []

    @property
    def needed(self) -> int:
        """Bytes of the object that are read."""
        return sum(length for _, length in self.ranges)

    def blocks(self, block_size: int) -> Sequence[int]:
        """The numbers of the blocks that are still to come, ascending."""
        if block_size != self._block_size:
            self._block_size = block_size
            left = [(max(offset, self._done), offset + length) for offset, length in self.ranges]
            self._blocks = deque(touched_blocks([(b, e - b) for b, e in left if b < e], block_size))
        return self._blocks

    def extents(self, end: int) -> list[Extent]:
        """Where the bytes before offset `end` go. More than once for the same bytes: they are filled anew."""
        while self._waiting and _begin(self._waiting[0]) < end:
            reading = self._waiting.popleft()
            # Should `prepare` raise, this one has no memory to be cleared.
            self._active.append((reading, reading.prepare(self._planner)))  # type: ignore[arg-type]
        return [extent for _, extents in self._active for extent in extents]

    def advance(self, end: int) -> None:
        """All bytes before offset `end` are there and verified."""
        self._done = end
        while self._blocks and (self._blocks[0] + 1) * self._block_size <= end:
            self._blocks.popleft()
        if not self._blocks:
            # Also what has no bytes at all.
            self.extents(max((_begin(reading) for reading in self._waiting), default=0) + 1)
        still = []
        for reading, extents in self._active:
            if self._blocks and _end(reading) > end:
                still.append((reading, extents))
                continue
            other = reading.finish(self._planner)  # type: ignore[arg-type]
            if other is not None:
                self.again.append(other)
        self._active = still

    def clear(self) -> None:
        """Nothing stays of bytes that were not handed on."""
        for _, extents in self._active:
            for extent in extents:
                _clear(extent.target)


def _begin(reading: Reading) -> int:
    return min(offset for offset, _ in reading.ranges)


def _end(reading: Reading) -> int:
    return max(offset + length for offset, length in reading.ranges)


def _clear(target: memoryview) -> None:
    zeros = bytes(min(len(target), _CLEARED_AT_ONCE))
    for start in range(0, len(target), _CLEARED_AT_ONCE):
        piece = target[start : start + _CLEARED_AT_ONCE]
        piece[:] = zeros[: len(piece)]
