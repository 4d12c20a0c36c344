"""Many small objects at once: one file, one write and one rename each, and the budget settled once for all of them.

A reservation, a mapping and a seal cost an object of 4 KiB many times its copy. So an object whose bytes are here
already is written straight into a free segment, or into a new file under a temporary name. Until its rename it
is nothing but that, whatever crashes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from replicator.errors import ObjectExistsError, ReplicatorError, StoreError, StoreFullError
from replicator.ids import ContainerVersion
from replicator.store.mounts import room_for
from replicator.store.paths import TEMPORARY, StorePaths, quote_name
from replicator.store.pool import Recycled
from replicator.store.publish import rename_new, trailer_of
from replicator.store.trailer import ObjectInfo, capacity_for, encode_trailer

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Renames under one lock of the store: others wait for it.
PUBLISHED_AT_ONCE = 32
_ZEROS = bytes(1 << 17)


class Item(NamedTuple):
    """A small object that is not here: what it is, written by the client `info.client_id`; and its bytes, verified."""

    info: ObjectInfo
    payload: ReadableBuffer


class _File(NamedTuple):
    """A file that holds an object with its trailer, under a name that is no object's."""

    path: str
    capacity: int


class Batch:
    """The objects of one `Store.ingest`, from their bytes to their names. Only `Store` uses it.

    Attributes:
        errors: of each object, in order; None: it is sealed, or on the way to it.
        claimed: bytes that were taken from the budget or the free segments for it.
    """

    def __init__(self, paths: StorePaths, items: Sequence[Item]) -> None:
        self._paths = paths
        self._items = items
        self._segments = str(paths.segments)
        self._directories: dict[ContainerVersion, str] = {}
        self._capacities = [capacity_for(item.info.size, item.info.block_size) for item in items]
        self._lent: dict[int, Recycled] = {}
        self._files: dict[int, _File] = {}
        self._funded = len(items)
        self.errors: list[ReplicatorError | None] = [None] * len(items)
        self.claimed = 0

    # -- room

    def borrow(self, lend: Callable[[int], Recycled | None]) -> int:
        """Take free segments as far as there are some that fit; bytes of new files that are needed beside them."""
        needed = 0
        for index, capacity in enumerate(self._capacities):
            if index not in self._lent:
                segment = lend(capacity)
                if segment is None:
                    needed += capacity
                    continue
                self._lent[index] = segment
                self.claimed += segment.capacity
        return needed

    def fund(self, room: int) -> int:
        """Claim new files of at most `room` bytes: all of them, or as many as fit, from the first on. Bytes claimed."""
        taken = 0
        for index, capacity in enumerate(self._capacities):
            if index in self._lent:
                continue
            if taken + capacity > room:
                self._funded = index
                break
            taken += capacity
        self.claimed += taken
        return taken

    def refuse(self, error: ReplicatorError) -> None:
        """The objects for which there is no room get this error."""
        for index in range(self._funded, len(self._items)):
            if index not in self._lent:
                self.errors[index] = error

    @property
    def is_short(self) -> bool:
        """Whether there is no room for some."""
        return any(index not in self._lent for index in range(self._funded, len(self._items)))

    # -- bytes

    def write(self, make_room: Callable[[int], object]) -> None:
        """Write every object that has room into its file. `make_room` is called once when the file system is full."""
        relieved = False
        for index, (info, payload) in enumerate(self._items):
            if self.errors[index] is not None:
                continue
            try:
                try:
                    self._files[index] = self._write(index, info, payload)
                except StoreFullError:
                    if relieved:
                        raise
                    relieved = True
                    make_room(sum(self._capacities[index:]))
                    self._files[index] = self._write(index, info, payload)
            except ReplicatorError as error:
                self.errors[index] = error
            except OSError as error:
                self.errors[index] = self._refusal(f"{info.object} of {info.size} bytes", error)

    def _write(self, index: int, info: ObjectInfo, payload: ReadableBuffer) -> _File:
        segment = self._lent.get(index)
        if segment is not None:
            path = f"{self._segments}/{segment.name.text}"
            with contextlib.suppress(FileNotFoundError):
                return self._fill(path, os.O_WRONLY, segment.capacity, info, payload)
            del self._lent[index]
        path = f"{self._segments}/{TEMPORARY}{secrets.token_hex(8)}"
        try:
            return self._fill(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._capacities[index], info, payload)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise

    def _fill(self, path: str, flags: int, capacity: int, info: ObjectInfo, payload: ReadableBuffer) -> _File:
        pieces: list[ReadableBuffer] = [payload]
        at = info.size
        for offset, piece in encode_trailer(info, capacity):
            pieces += [_zeros(offset - at), piece]
            at = offset + len(piece)
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            try:
                written = os.pwritev(fd, pieces, 0)
                if written != capacity:
                    # The rest tells why.
                    rest = b"".join(memoryview(piece).cast("B") for piece in pieces)[written:]
                    while rest:
                        count = os.pwrite(fd, rest, written)
                        written, rest = written + count, rest[count:]
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._refusal(f"{info.object} of {info.size} bytes", error) from None
        return _File(path, capacity)

    def _refusal(self, what: str, error: OSError) -> StoreError:
        """What an error of the file system means: StoreFullError with numbers when it is full."""
        try:
            with room_for(what, self._paths.root):
                raise error
        except StoreFullError as full:
            return full
        except OSError:
            return StoreError(f"cannot write {what} in {self._paths.root}: {error.strerror}")

    # -- names

    def parts(self) -> Iterator[list[int]]:
        """The objects that were written, a few at a time."""
        written = list(self._files)
        for start in range(0, len(written), PUBLISHED_AT_ONCE):
            yield written[start : start + PUBLISHED_AT_ONCE]

    def publish(self, index: int) -> tuple[ObjectInfo, int] | None:
        """Give one written object its name; it and the bytes that it takes. None, with an error noted, if that fails.

        When the same content has that name already, that is what counts, and the file goes.
        """
        info, (path, capacity) = self._items[index].info, self._files[index]
        version = info.object.version
        directory = self._directories.get(version)
        if directory is None:
            directory = self._directories[version] = str(self._paths.objects_of(version))
        target = f"{directory}/{quote_name(info.object.name)}"
        try:
            try:
                rename_new(path, target)
            except FileNotFoundError:
                self._paths.objects_of(version).mkdir(mode=0o700, parents=True, exist_ok=True)
                rename_new(path, target)
            self._done(index)
            return info, capacity
        except FileExistsError:
            return self._existing(index, target)
        except OSError as error:
            self.errors[index] = self._refusal(f"the name of {info.object}", error)
        return None

    def _existing(self, index: int, target: str) -> tuple[ObjectInfo, int] | None:
        info = self._items[index].info
        try:
            found = trailer_of(target)
            if found is not None and found.same_content(info):
                return found, os.stat(target).st_size
        except (ReplicatorError, OSError):
            pass
        self.errors[index] = ObjectExistsError(
            f"{info.object} is sealed already, with other content; sealed objects are immutable: save the step "
            "again, which makes a new generation"
        )
        return None

    def fail(self, indexes: Sequence[int], error: ReplicatorError) -> None:
        """None of these gets its name."""
        for index in indexes:
            self.errors[index] = error

    def _done(self, index: int) -> None:
        del self._files[index]
        self._lent.pop(index, None)

    def end(self) -> list[Recycled]:
        """Remove new files that got no name; the free segments that got none."""
        for index, file in self._files.items():
            if index not in self._lent:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)
        self._files.clear()
        return list(self._lent.values())


def _zeros(count: int) -> ReadableBuffer:
    return memoryview(_ZEROS)[:count] if count <= len(_ZEROS) else bytes(count)
