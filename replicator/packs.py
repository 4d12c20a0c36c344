"""Small objects travel in packs, as a round trip each would cost many times their copy: what is small, and how many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_OBJECT_BYTES = 256 << 10
"""A larger object is no small one: its round trips cost less than its bytes."""
MAX_CALL_BYTES = 8 << 20
MAX_CALL_OBJECTS = 4096
MAX_PIECE_BYTES = 1 << 20
"""Of payloads in one message."""
MAX_PIECE_OBJECTS = 256


def is_small(size: int) -> bool:
    """Whether an object of so many bytes travels in a pack."""
    return size <= MAX_OBJECT_BYTES


def calls_of(sizes: Sequence[int]) -> Iterator[slice]:
    """How many objects go into one call: consecutive ones, within its bounds."""
    return _cut(sizes, MAX_CALL_OBJECTS, MAX_CALL_BYTES)


def pieces_of(sizes: Sequence[int]) -> Iterator[slice]:
    """The same for one message of a call."""
    return _cut(sizes, MAX_PIECE_OBJECTS, MAX_PIECE_BYTES)


def _cut(sizes: Sequence[int], most: int, most_bytes: int) -> Iterator[slice]:
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first == most or total + size > most_bytes):
            yield slice(first, index)
            first, total = index, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))
