"""Objects as files: one that is written and sealed at its end, a draft, and one that is read, wherever it is."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from replicator.checkpoint.fetch import Fetcher
from replicator.checkpoint.verified_copy import Extent
from replicator.checksum import BLOCK_SIZE
from replicator.client.plan import Plan
from replicator.client.segments import SegmentObject
from replicator.client.session import Session
from replicator.errors import ObjectNotFoundError
from replicator.first_error import FirstError
from replicator.store import mapping
from replicator.store.trailer import ObjectInfo

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

# Blocks that are brought at a time when somebody reads one after the other.
_READ_AHEAD = 8


class WrittenObject(io.RawIOBase):
    """A file that becomes an object when it is closed. Not thread-safe.

    When the `with` block of it raises, or when it is forgotten, there is no object. When a write failed, the block
    raises what it failed with, also where who wrote (`torch.save`) hides that behind another error.

    Args:
        sealed: called with what was sealed, before `close` returns.
        discarded: called when there is no object.
    """

    def __init__(
        self, sink: SegmentObject, sealed: Callable[[ObjectInfo], None], discarded: Callable[[], None]
    ) -> None:
        super().__init__()
        self._sink = sink
        self._sealed = sealed
        self._discarded = discarded
        self._fd = -1

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Append. Raises StoreFullError, and ValueError after the end."""
        self._check()
        return self._sink.write(data)

    def tell(self) -> int:
        return self._sink.tell()

    def fileno(self) -> int:
        """A descriptor for `fsync`; whoever tries to write through it gets an error."""
        self._check()
        self._close_fd()
        self._fd = mapping.open_parents_only(self._sink.path, os.O_RDONLY)
        return self._fd

    def close(self) -> None:
        """Seal the object. Idempotent. Raises the errors of `SegmentObject.seal`; then there is no object."""
        if self.closed:
            return
        self._close_fd()
        super().close()
        try:
            info = self._sink.seal()
        except BaseException:
            self._sink.abandon()
            self._discarded()
            raise
        self._sealed(info)

    def discard(self) -> None:
        """End without an object. Idempotent; does nothing after `close`."""
        if self.closed:
            return
        self._close_fd()
        super().close()
        self._sink.abandon()
        self._discarded()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
            self._sink.first_error.raise_for(error)
        self.close()

    def __del__(self) -> None:
        try:
            self.discard()
        except Exception:
            return  # the session is closed, or the interpreter is ending

    def _check(self) -> None:
        if self.closed:
            raise ValueError(f"{self._sink.object} is closed; a sealed object cannot be changed")

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            mapping.close(fd)


class Draft(io.FileIO):
    """A file in memory, for what may become an object later. It has a descriptor, for `fsync`. Not thread-safe.

    Args:
        drafts: where its content is when it is closed, by name; not when its `with` block raises.
    """

    def __init__(self, drafts: dict[str, bytes], name: str) -> None:
        super().__init__(os.memfd_create("replicator-draft", os.MFD_CLOEXEC), "w+b")
        self._drafts = drafts
        self._name = name
        self._first_error = FirstError()

    def write(self, data: ReadableBuffer, /) -> int:
        """All of it: who writes an archive does not look at how much was taken."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self._first_error.keep(error)
            raise
        return done

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            super().close()
            self._first_error.raise_for(error)
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.seek(0)
            self._drafts[self._name] = self.readall()
        super().close()


class _Range:
    """Bytes of an object that are copied to one place."""

    def __init__(self, offset: int, target: memoryview) -> None:
        self._extent = Extent(offset, target)
        self.ranges = [(offset, len(target))]

    def prepare(self, planner: object) -> list[Extent]:
        return [self._extent]

    def finish(self, planner: object) -> None:
        pass


class ReadObject(io.RawIOBase):
    """An object of a plan as a file: each byte is checked against the manifest before it is handed on. Not thread-safe.

    What is not on this node comes block by block from its holders, as it is read. When most of it was read, all of it
    is brought into this node's store afterwards, as with any other load.

    Raises:
        NoRecoverableCheckpointError: the plan found nothing.
        ObjectNotFoundError: the container has no such object.
    """

    _fetcher: Fetcher | None = None

    def __init__(self, session: Session, plan: Plan, name: str) -> None:
        super().__init__()
        version = plan.require()
        sizes = {source.name: source.size for source in plan.sources}
        if name not in sizes:
            raise ObjectNotFoundError(f"{version} has no object {name!r}")
        self._fetcher = Fetcher(session, plan)
        self._fetched = 0
        self.name = name
        self.size = sizes[name]
        self._at = 0
        self._kept_at = 0
        self._kept = memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"expected a position of 0 or more, found {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """As many bytes as fit and are there; less only at the end.

        Raises:
            CorruptObjectError, TransferError: no holder has good bytes; nothing that was not verified is in `buffer`.
        """
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self.size - self._at))
        done = 0
        while done < length:
            done += self._some(view[done:length])
        return length

    def peek(self, size: int = 0, /) -> bytes:
        """Some of the next bytes, at least one unless it is the end; the position stays. `readline` is quick by it."""
        if self._at < self.size and not self._is_kept():
            self._keep()
        kept = self._at - self._kept_at
        return bytes(self._kept[kept : kept + max(size, io.DEFAULT_BUFFER_SIZE)]) if self._is_kept() else b""

    def readall(self) -> bytes:
        rest = bytearray(max(0, self.size - self._at))
        self.readinto(rest)
        return bytes(rest)

    def _some(self, view: memoryview) -> int:
        """The next bytes into `view`: from what is kept, or straight to it when a block or more is wanted."""
        count = len(view)
        if self._is_kept() or count < BLOCK_SIZE:
            if not self._is_kept():
                self._keep()
            kept = self._at - self._kept_at
            count = min(count, len(self._kept) - kept)
            view[:count] = self._kept[kept : kept + count]
        else:
            self._fetch(self._at, view)
        self._at += count
        return count

    def _is_kept(self) -> bool:
        return 0 <= self._at - self._kept_at < len(self._kept)

    def _keep(self) -> None:
        """The block of the next byte, and more of them when the one before was read."""
        ahead = _READ_AHEAD if len(self._kept) and self._kept_at + len(self._kept) == self._at else 1
        start = self._at - self._at % BLOCK_SIZE
        kept = memoryview(bytearray(min(self.size - start, ahead * BLOCK_SIZE)))
        self._fetch(start, kept)
        self._kept_at, self._kept = start, kept

    def _fetch(self, offset: int, target: memoryview) -> None:
        if self._fetcher is None or self.closed:
            raise ValueError(f"{self.name} is closed")
        self._fetcher.read({self.name: [_Range(offset, target)]}, None)
        self._fetched += len(target)

    def close(self) -> None:
        super().close()
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            if fetcher.pulled and 2 * self._fetched >= self.size:
                fetcher.keep(self.name)
            fetcher.__exit__()
            self._kept = memoryview(b"")

    def __enter__(self) -> ReadObject:
        return self
