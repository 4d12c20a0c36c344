"""Copy byte ranges of an object into memory, and check every block that they touch, in one pass.

A block is the unit of verification. To check one, all of its bytes go through CRC32C: those that are wanted through
the fused copy, those between them through the checksum alone. So a load reads each byte once, and
nothing is handed on before every block it came from has matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replicator.native import COPY_THREADS, copy_parts

Part = tuple[memoryview | None, memoryview]


@dataclass(frozen=True, slots=True)
class Extent:
    """`len(target)` bytes of the object from `offset` on, to be copied into `target`."""

    offset: int
    target: memoryview

    @property
    def end(self) -> int:
        return self.offset + len(self.target)


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes of one block, and the CRC32C that they must have."""

    index: int
    view: memoryview
    crc32c: int


def touched_blocks(ranges: Iterable[tuple[int, int]], block_size: int) -> list[int]:
    """The indexes of the blocks that ranges (offset, length) touch, ascending, each once (F44)."""
    blocks: set[int] = set()
    for offset, length in ranges:
        if length:
            blocks.update(range(offset // block_size, (offset + length - 1) // block_size + 1))
    return sorted(blocks)


def copy_verified(
    extents: Sequence[Extent],
    block_size: int,
    block_at: Callable[[int], Block],
    blocks: range | None = None,
    *,
    threads: int = COPY_THREADS,
) -> list[int]:
    """Fill all targets, and return the indexes of blocks whose bytes did not match (empty: all is well).

    Args:
        extents: may be in any order and may overlap; each target has the length of its range.
        block_at: gives a touched block; the last block of an object may be short.
        blocks: fill only what is in these blocks.
        threads: that share the work.

    The contents of what was to be filled mean nothing when the result is not empty.
    """
    by_block: dict[int, list[Extent]] = {}
    for extent in sorted((e for e in extents if len(e.target)), key=lambda e: e.offset):
        first, last = extent.offset // block_size, (extent.end - 1) // block_size
        if blocks is not None:
            first, last = max(first, blocks.start), min(last, blocks.stop - 1)
        for index in range(first, last + 1):
            by_block.setdefault(index, []).append(extent)
    # Whole blocks one after the other: a stream whose blocks are these. Only the last one may be short.
    wanted = [(block_at(index), by_block[index]) for index in sorted(by_block)]
    parts: list[Part] = []
    again: list[tuple[memoryview, memoryview]] = []
    for block, touching in wanted:
        _add_block(block, block.index * block_size, touching, parts, again)
    crcs, tail = copy_parts(parts, block_size=block_size, threads=threads)
    for target, source in again:
        target[:] = source  # which was filled with what was checksummed
    found = [*crcs, tail]
    return [block.index for (block, _), crc in zip(wanted, found, strict=False) if crc != block.crc32c]


def _add_block(
    block: Block, start: int, extents: Sequence[Extent], parts: list[Part], again: list[tuple[memoryview, memoryview]]
) -> None:
    """The parts that copy what the extents want of this block (from object offset `start` on), all of it checksummed.

    What was wanted before by other extents goes into `again`, as (target, what of theirs has the same bytes).
    """
    size = len(block.view)
    done = 0
    filled: list[tuple[int, memoryview]] = []
    for extent in extents:
        begin = max(extent.offset - start, 0)
        end = min(extent.end - start, size)
        target = extent.target[start + begin - extent.offset : start + end - extent.offset]
        if begin < done:
            overlap = min(end, done)
            for at, area in filled:
                first, last = max(at, begin), min(at + len(area), overlap)
                if first < last:
                    again.append((target[first - begin : last - begin], area[first - at : last - at]))
            target, begin = target[overlap - begin :], overlap
        if begin > done:
            parts.append((None, block.view[done:begin]))
            done = begin
        if end > begin:
            parts.append((target, block.view[begin:end]))
            filled.append((begin, target))
            done = end
    if done < size:
        parts.append((None, block.view[done:]))
