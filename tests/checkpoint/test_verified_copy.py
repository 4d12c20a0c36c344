"""Ranges arrive whole, and a flipped bit anywhere in a touched block is noticed."""

from __future__ import annotations

import crc32c as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.checkpoint.verified_copy import Block, Extent, copy_verified, touched_blocks

BLOCK = 64


def source(data: bytes, checksums_of: bytes | None = None):
    checked = data if checksums_of is None else checksums_of

    def block_at(index: int) -> Block:
        view = memoryview(data)[index * BLOCK : (index + 1) * BLOCK]
        return Block(index, view, reference.crc32c(checked[index * BLOCK : (index + 1) * BLOCK]))

    return block_at


@st.composite
def objects_and_ranges(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    data = draw(st.binary(min_size=1, max_size=5 * BLOCK + 7))
    count = draw(st.integers(0, 8))
    ranges = []
    for _ in range(count):
        start = draw(st.integers(0, len(data)))
        ranges.append((start, draw(st.integers(start, len(data)))))
    return data, ranges


@settings(max_examples=400, deadline=None)
@given(objects_and_ranges(), st.integers(1, 3))
def test_any_ranges_also_overlapping(case: tuple[bytes, list[tuple[int, int]]], threads: int) -> None:
    data, ranges = case
    targets = [bytearray(end - start) for start, end in ranges]
    extents = [Extent(start, memoryview(t)) for (start, _), t in zip(ranges, targets, strict=True)]
    assert copy_verified(extents, BLOCK, source(data), threads=threads) == []
    for (start, end), target in zip(ranges, targets, strict=True):
        assert bytes(target) == data[start:end]


@settings(max_examples=300, deadline=None)
@given(objects_and_ranges(), st.data())
def test_a_flipped_bit_in_a_touched_block_is_named(
    case: tuple[bytes, list[tuple[int, int]]], draw: st.DataObject
) -> None:
    """F01: also when the bit lies between the wanted ranges."""
    data, ranges = case
    extents = [Extent(start, memoryview(bytearray(end - start))) for start, end in ranges]
    touched = touched_blocks([(start, end - start) for start, end in ranges], BLOCK)
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    bad = bytearray(data)
    bad[bit // 8] ^= 1 << bit % 8
    expected = [bit // 8 // BLOCK] if bit // 8 // BLOCK in touched else []
    assert copy_verified(extents, BLOCK, source(bytes(bad), checksums_of=data)) == expected


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_whole_object(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    target = bytearray(size)
    assert copy_verified([Extent(0, memoryview(target))], BLOCK, source(data)) == []
    assert bytes(target) == data
