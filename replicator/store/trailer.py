"""What a sealed object says of itself, in the last 4096 bytes of its file.

The file of an object: its payload from offset 0 on; room; the table of block checksums (little-endian uint32
each); the trailer page. A short table lies inside the trailer page, so a small object takes two pages. The page
has a CRC32C of its own and of the table. All numbers are little-endian.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicator.checksum import BLOCK_SIZE, block_count
from replicator.errors import CorruptObjectError, InvalidIdError
from replicator.ids import CheckpointContainerId, ContainerVersion, ObjectVersion, validate_node_id
from replicator.native import crc32c
from replicator.store.paths import CLIENT_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 4096
MAGIC = b"RPLOBJ\x00\x01"
_TABLE_IN_PAGE = 1536
_MAX_TABLE_IN_PAGE = PAGE - _TABLE_IN_PAGE
# magic, CRC of the page (this field as 0), CRC of the table, crc32c, block size, size, table offset, blocks, step,
# generation, lengths of job, name, owner and client.
_HEAD = struct.Struct("<8sIIIQQQQQQHHHH")
_MAX_BLOCK = 1 << 40


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A sealed object: what it is, its checksums, who owns it and which client wrote this copy. Sizes in bytes."""

    object: ObjectVersion
    size: int
    crc32c: int
    block_size: int
    block_crcs: tuple[int, ...]
    owner_node_id: str
    client_id: str

    def same_content(self, other: ObjectInfo) -> bool:
        """Whether both describe the same bytes of the same object, whoever wrote the copies."""
        return (self.object, self.size, self.crc32c) == (other.object, other.size, other.crc32c) and (
            self.block_size != other.block_size or self.block_crcs == other.block_crcs
        )


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _table_room(blocks: int) -> int:
    """Bytes before the trailer page that a table of so many blocks needs."""
    return _up(4 * blocks) if 4 * blocks > _MAX_TABLE_IN_PAGE else 0


def capacity_for(size: int, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of a segment that can hold an object of `size` bytes with its checksums; a multiple of 4096."""
    return _up(size) + _table_room(block_count(size, block_size)) + PAGE


def payload_limit(capacity: int, block_size: int = BLOCK_SIZE) -> int:
    """The largest object that fits a segment of `capacity` bytes."""
    fits, too_many = 0, capacity // PAGE
    while too_many - fits > 1:
        pages = (fits + too_many) // 2
        if capacity_for(pages * PAGE, block_size) <= capacity:
            fits = pages
        else:
            too_many = pages
    return fits * PAGE


def encode_trailer(info: ObjectInfo, capacity: int) -> list[tuple[int, bytes]]:
    """(offset, bytes) to be written into a file of `capacity` bytes that holds the payload.

    Raises:
        ValueError: the object does not fit, or the number of checksums is not that of its blocks.
    """
    blocks = block_count(info.size, info.block_size)
    if len(info.block_crcs) != blocks:
        raise ValueError(f"expected {blocks} block checksums for {info.object}, found {len(info.block_crcs)}")
    if capacity < capacity_for(info.size, info.block_size):
        raise ValueError(f"an object of {info.size} bytes does not fit a segment of {capacity} bytes")
    table = _table_bytes(info.block_crcs)
    strings = [
        text.encode()
        for text in (info.object.version.container.job, info.object.name, info.owner_node_id, info.client_id)
    ]
    inside = len(table) <= _MAX_TABLE_IN_PAGE
    table_offset = capacity - PAGE + _TABLE_IN_PAGE if inside else capacity - PAGE - _table_room(blocks)
    page = bytearray(PAGE)

    def head(page_crc: int) -> bytes:
        return _HEAD.pack(
            MAGIC,
            page_crc,
            crc32c(table),
            info.crc32c,
            info.block_size,
            info.size,
            table_offset,
            blocks,
            info.object.version.container.step,
            info.object.version.generation,
            *map(len, strings),
        )

    page[: _HEAD.size] = head(0)
    page[_HEAD.size : _HEAD.size + sum(map(len, strings))] = b"".join(strings)
    if inside:
        page[_TABLE_IN_PAGE : _TABLE_IN_PAGE + len(table)] = table
    page[: _HEAD.size] = head(crc32c(page))
    pieces = [(capacity - PAGE, bytes(page))]
    return pieces if inside else [(table_offset, table), *pieces]


def write_trailer(view: memoryview, info: ObjectInfo) -> None:
    """Write the trailer into the end of a mapped segment, whose payload is in place."""
    for offset, piece in encode_trailer(info, len(view)):
        view[offset : offset + len(piece)] = piece


def read_trailer(fd: int) -> ObjectInfo:
    """What the file of a sealed object says of itself, its own checksums verified (the payload is not read).

    Raises:
        CorruptObjectError: with what is wrong.
    """
    capacity = os.fstat(fd).st_size
    if capacity < PAGE:
        raise CorruptObjectError(f"expected a sealed object of at least {PAGE} bytes, found {capacity}")
    page = bytearray(os.pread(fd, PAGE, capacity - PAGE))
    if len(page) != PAGE or page[:8] != MAGIC:
        raise CorruptObjectError(
            f"expected the trailer of a sealed object at the end of the file, found {bytes(page[:8])!r}"
        )
    head = _HEAD.unpack_from(page)
    (_, page_crc, table_crc, crc, block_size, size, table_offset, blocks, step, generation, *lengths) = head
    page[8:12] = bytes(4)
    if crc32c(page) != page_crc:
        raise CorruptObjectError("the trailer does not match its checksum")
    if not 0 < block_size <= _MAX_BLOCK or block_count(size, block_size) != blocks:
        raise CorruptObjectError(f"the trailer contradicts itself: {size} bytes in {blocks} blocks of {block_size}")
    if capacity < capacity_for(size, block_size) or not 0 <= table_offset <= capacity - 4 * blocks:
        raise CorruptObjectError(f"the trailer speaks of {size} bytes in a file of {capacity}")
    table = os.pread(fd, 4 * blocks, table_offset)
    if len(table) != 4 * blocks or crc32c(table) != table_crc:
        raise CorruptObjectError("the table of block checksums does not match its checksum")
    try:
        job, name, owner, client_id = _strings(bytes(page), lengths)
        one = ObjectVersion(ContainerVersion(CheckpointContainerId(job, step), generation), name)
        validate_node_id(owner)
    except (InvalidIdError, UnicodeDecodeError) as error:
        raise CorruptObjectError(f"the trailer has an invalid id: {error}") from None
    if not CLIENT_ID.fullmatch(client_id):
        raise CorruptObjectError(f"the trailer has an invalid client id: {client_id[:80]!r}")
    return ObjectInfo(one, size, crc, block_size, _table_of(table), owner, client_id)


def _strings(page: bytes, lengths: Sequence[int]) -> list[str]:
    result = []
    start = _HEAD.size
    for length in lengths:
        result.append(page[start : start + length].decode())
        start += length
    return result


def _table_bytes(crcs: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(crcs)}I", *crcs)


def _table_of(table: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(table) // 4}I", table)
