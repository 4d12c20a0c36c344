"""Objects of a committed container as files. Every byte is checked against the manifest before it is handed on."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import LoadPlanner

from replicator.checkpoint.fetch import Fetcher
from replicator.checkpoint.verified_copy import Extent
from replicator.checksum import BLOCK_SIZE
from replicator.client.plan import Plan
from replicator.client.session import Session

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class _Range:
    """For `Fetcher.read`: bytes from an offset on, into memory of the caller."""

    def __init__(self, offset: int, target: memoryview) -> None:
        self.ranges = [(offset, len(target))]
        self._extent = Extent(offset, target)

    def prepare(self, planner: LoadPlanner) -> list[Extent]:
        return [self._extent]

    def finish(self, planner: LoadPlanner) -> None:
        return None


class VerifiedStream(io.RawIOBase):
    """One object, open for reading; not thread-safe. What is not on this node is brought from its holders.

    Args:
        whole: bring all of it at once.
        size: in bytes, as the manifest says.
    """

    def __init__(self, session: Session, plan: Plan, name: str, size: int, *, whole: bool) -> None:
        super().__init__()
        self._fetcher = Fetcher(session, plan)
        self._name = name
        self._size = size
        self._position = 0
        self._ahead_at = 0
        self._ahead = self._fetcher.read_bytes(name) if whole and size else bytearray()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"{self._name}: expected a position of 0 or more, found {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer).cast("B")
        length = min(len(target), self._size - self._position)
        if length <= 0:
            return 0
        target = target[:length]
        if length >= BLOCK_SIZE and not self._is_ahead(length):
            self._fetch(self._position, target)
        else:
            if not self._is_ahead(length):
                start = self._position // BLOCK_SIZE * BLOCK_SIZE
                self._ahead_at = start
                self._ahead = bytearray(min(2 * BLOCK_SIZE, self._size - start))
                self._fetch(start, memoryview(self._ahead))
            start = self._position - self._ahead_at
            target[:] = memoryview(self._ahead)[start : start + length]
        self._position += length
        return length

    def close(self) -> None:
        """Idempotent."""
        if not self.closed:
            self._ahead = bytearray()
            self._fetcher.__exit__(None, None, None)
        super().close()

    def _is_ahead(self, length: int) -> bool:
        return self._ahead_at <= self._position and self._position + length <= self._ahead_at + len(self._ahead)

    def _fetch(self, offset: int, target: memoryview) -> None:
        self._fetcher.read({self._name: [_Range(offset, target)]}, None)
