"""Writing one object into a mapped segment: each byte is copied once, its checksum computed on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicator.checksum import BLOCK_SIZE
from replicator.errors import SegmentError, StoreFullError
from replicator.faultpoints import reach
from replicator.ids import ObjectVersion
from replicator.native import combine_blocks, copy_parts, crc32c
from replicator.store.segment import MappedSegment
from replicator.store.trailer import ObjectInfo, capacity_for, payload_limit, write_trailer

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class ObjectWriter:
    """A file to write to, for one object. Not thread-safe.

    Args:
        mapped: where the object goes.
        grow: called with the capacity in bytes that is needed when `mapped` is too small; returns a larger
            segment, into which what was written is copied.
        retire: called with the segment that was outgrown, when nothing uses it any more.

    Attributes:
        mapped: the segment in use now.
    """

    def __init__(
        self,
        mapped: MappedSegment,
        object: ObjectVersion,
        owner_node_id: str,
        client_id: str,
        grow: Callable[[int], MappedSegment],
        retire: Callable[[MappedSegment], None] | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.mapped = mapped
        self.object = object
        self._owner_node_id = owner_node_id
        self._client_id = client_id
        self._grow = grow
        self._retire = retire
        self._block_size = block_size
        self._limit = payload_limit(mapped.capacity, block_size)
        self._size = 0
        # Bytes before this are in the checksums; those up to _size are in a slice that the caller fills.
        self._summed = 0
        self._crc = 0
        self._block_crcs: list[int] = []
        self._info: ObjectInfo | None = None
        self._aborted = False

    def write(self, data: ReadableBuffer) -> int:
        """Append; the number of bytes in `data`, all of which are taken.

        Raises:
            SegmentError: the writer is closed.
            StoreFullError: the segment is too small and there is no room for a larger one.
        """
        return self.write_many([data])

    def write_many(self, buffers: Sequence[ReadableBuffer]) -> int:
        """Append them all in one go, which large ones share several threads for. Returns and raises like `write`."""
        sources = [source for source in map(_bytes_of, buffers) if len(source)]
        size = sum(map(len, sources))
        self._make_room(size)
        self._sum_slice()
        view, start = self.mapped.view, self._summed
        parts: list[tuple[WriteableBuffer | None, ReadableBuffer]] = []
        for source in sources:
            parts.append((view[start : start + len(source)], source))
            start += len(source)
        crcs, self._crc = copy_parts(
            parts,
            block_size=self._block_size,
            prefix_crc=self._crc,
            prefix_size=self._summed % self._block_size,
        )
        self._block_crcs += crcs
        self._size = self._summed = start
        reach("write.copied")
        return size

    def next_buffer_slice(self, size: int) -> memoryview:
        """The next `size` bytes of the object, for the caller to fill before the next call of any method.

        Raises:
            ValueError: `size` is negative.
            SegmentError: the writer is closed.
            StoreFullError: the segment is too small and there is no room for a larger one.
        """
        if size < 0:
            raise ValueError(f"expected a slice of 0 bytes or more, found {size}")
        self._make_room(size)
        self._sum_slice()
        start = self._size
        self._size += size
        return self.mapped.view[start : self._size]

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> ObjectInfo:
        """End: the checksums and the trailer are put into the segment, which is then ready to be sealed. Idempotent.

        Raises:
            SegmentError: the writer was aborted.
        """
        if self._info is not None:
            return self._info
        self._check_open()
        self._sum_slice()
        crcs = self._block_crcs + ([self._crc] if self._summed % self._block_size else [])
        self._info = ObjectInfo(
            self.object,
            self._size,
            combine_blocks(crcs, self._size, self._block_size),
            self._block_size,
            tuple(crcs),
            self._owner_node_id,
            self._client_id,
        )
        write_trailer(self.mapped.view, self._info)
        reach("write.ended")
        return self._info

    def abort(self) -> None:
        """End without an object. The caller gives the segment back. Idempotent."""
        self._aborted = True

    @property
    def closed(self) -> bool:
        return self._aborted or self._info is not None

    def _check_open(self) -> None:
        if self._aborted:
            raise SegmentError(f"the writer of {self.object} was aborted; begin a new one")
        if self._info is not None:
            raise SegmentError(f"the writer of {self.object} is closed; a sealed object cannot be changed")

    def _make_room(self, size: int) -> None:
        self._check_open()
        needed = self._size + size
        if needed <= self._limit:
            return
        larger = self._larger(needed)
        if payload_limit(larger.capacity, self._block_size) < needed:
            raise SegmentError(f"asked for a segment that holds {needed} bytes of {self.object}, got {larger.capacity}")
        # Its checksums are not wanted; it is the copy that lets other threads run.
        copy_parts([(larger.view, self.mapped.view[: self._size])])
        outgrown, self.mapped = self.mapped, larger
        self._limit = payload_limit(larger.capacity, self._block_size)
        if self._retire is not None:
            self._retire(outgrown)

    def _larger(self, needed: int) -> MappedSegment:
        """Half as much again, so that many small writes copy each byte a bounded number of times; or what there is."""
        least = capacity_for(needed, self._block_size)
        wanted = capacity_for(max(needed, self._size + self._size // 2), self._block_size)
        try:
            return self._grow(wanted)
        except StoreFullError:
            if wanted == least:
                raise
            return self._grow(least)

    def _sum_slice(self) -> None:
        """Checksum what the caller put into the last slice."""
        while self._summed < self._size:
            step = min(self._size - self._summed, self._block_size - self._summed % self._block_size)
            piece = self.mapped.view[self._summed : self._summed + step]
            self._advance(crc32c(piece, self._crc), step)

    def _advance(self, crc: int, step: int) -> None:
        self._crc = crc
        self._summed += step
        if self._summed % self._block_size == 0:
            self._block_crcs.append(crc)
            self._crc = 0

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            self.abort()


def _bytes_of(buffer: ReadableBuffer) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")
