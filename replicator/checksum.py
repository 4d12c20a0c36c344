"""How an object is cut into blocks, the unit of verification: sizes in bytes, blocks counted from 0."""

from __future__ import annotations

BLOCK_SIZE = 4 << 20
"""Bytes covered by one checksum. Every block of an object has this size, but the last may be short."""


def block_count(size: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks of an object of `size` bytes; an empty object has none."""
    return -(-size // block_size)


def block_length(index: int, size: int, block_size: int = BLOCK_SIZE) -> int:
    """Bytes in block `index` of an object of `size` bytes.

    Raises:
        IndexError: the object has no such block.
    """
    if not 0 <= index < block_count(size, block_size):
        raise IndexError(f"block {index} of an object of {size} bytes, which has {block_count(size, block_size)}")
    return min(block_size, size - index * block_size)
