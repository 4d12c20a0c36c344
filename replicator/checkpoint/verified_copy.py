"""Copy byte ranges of an object into memory, and check every block that they touch, in one pass.

A block is the unit of verification. To check one, all of its bytes go through CRC32C: those that are wanted
through the fused copy, those between them through the checksum alone. So a load reads each byte once, and
nothing is handed on before every block it came from has matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from replicator.native import copy_crc32c, crc32c


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
    executor: Executor | None = None,
    blocks: range | None = None,
) -> list[int]:
    """Fill all targets, and return the indexes of blocks whose bytes did not match (empty: all is well).

    Args:
        extents: may be in any order and may overlap; each target has the length of its range.
        block_at: gives a touched block; the last block of an object may be short.
        executor: blocks are spread over its threads when given.
        blocks: fill only what is in these blocks.

    The contents of what was to be filled mean nothing when the result is not empty.
    """
    by_block: dict[int, list[Extent]] = {}
    for extent in sorted((e for e in extents if len(e.target)), key=lambda e: e.offset):
        first, last = extent.offset // block_size, (extent.end - 1) // block_size
        if blocks is not None:
            first, last = max(first, blocks.start), min(last, blocks.stop - 1)
        for index in range(first, last + 1):
            by_block.setdefault(index, []).append(extent)

    def check(index: int) -> bool:
        block = block_at(index)
        return _copy_block(block, index * block_size, by_block[index]) == block.crc32c

    indexes = list(by_block)
    results = executor.map(check, indexes) if executor is not None and len(indexes) > 1 else map(check, indexes)
    return [index for index, good in zip(indexes, results, strict=True) if not good]


def _copy_block(block: Block, start: int, extents: Sequence[Extent]) -> int:
    """Copy the parts of the extents that lie in this block (from object offset `start` on); its CRC32C."""
    size = len(block.view)
    crc = 0
    done = 0
    for extent in extents:
        begin = max(extent.offset - start, 0)
        end = min(extent.end - start, size)
        target = extent.target[start + begin - extent.offset : start + end - extent.offset]
        if end <= done or begin < done:
            # Overlaps what already went through the checksum: the copy alone is left to do for that part.
            overlap = min(end, done)
            target[: overlap - begin] = block.view[begin:overlap]
            target, begin = target[overlap - begin :], overlap
        if begin > done:
            crc = crc32c(block.view[done:begin], crc)
            done = begin
        if end > begin:
            crc = copy_crc32c(target, block.view[begin:end], crc)
            done = end
    if done < size:
        crc = crc32c(block.view[done:], crc)
    return crc
