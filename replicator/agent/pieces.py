"""The bytes of a store in pieces of bounded work, in a fixed order, so that checking all of them can stop and go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replicator.errors import CorruptObjectError, ObjectNotFoundError
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.store import Store
from replicator.store.paths import StorePaths
from replicator.store.reader import open_object
from replicator.store.trailer import ObjectInfo

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
MAX_PARTS = 64
# Opening a file costs as much as checking so many bytes.
OPEN_COST_BYTES = 64 << 10

Bad = tuple[ObjectVersion, CorruptObjectError]


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks `first` to `last` (excluded) of an object; `cost` in bytes, opening included."""

    info: ObjectInfo
    first: int
    last: int

    @property
    def size(self) -> int:
        """Bytes of payload."""
        end = min(self.last * self.info.block_size, self.info.size)
        return max(end - self.first * self.info.block_size, 0)

    @property
    def cost(self) -> int:
        return self.size + OPEN_COST_BYTES

    @property
    def is_last(self) -> bool:
        """Whether the object ends with it."""
        return self.last >= len(self.info.block_crcs)


@dataclass(frozen=True, slots=True)
class Place:
    """Everything before this block of this object has been taken."""

    version: ContainerVersion
    name: str
    block: int


class Pieces:
    """Goes once through the objects of a store, as they are when their container is reached, up to a last container.

    Not thread-safe.

    Args:
        start: where to go on; None: at the beginning.
        wanted: which containers.

    Attributes:
        place: how far it is; None before the first piece.
    """

    def __init__(
        self, store: Store, start: Place | None = None, wanted: Callable[[ContainerVersion], bool] = lambda one: True
    ) -> None:
        self._store = store
        self._wanted = wanted
        # What is saved meanwhile is not waited for: there would be no end.
        self._last = max((version for version in store.versions() if wanted(version)), default=None)
        self._version = start.version if start is not None else None
        self._infos: list[ObjectInfo] = []
        self._block = 0
        self.place = start
        if start is not None:
            self._load(start.version, start)

    def next(self) -> list[Part]:
        """The next parts, about `PIECE_BYTES` of them; empty at the end."""
        parts: list[Part] = []
        left = PIECE_BYTES
        while left > 0 and len(parts) < MAX_PARTS and self._find():
            info = self._infos[-1]
            last = min(len(info.block_crcs), self._block + max(left // info.block_size, 1))
            part = Part(info, self._block, last)
            parts.append(part)
            left -= part.cost
            self.place = Place(info.object.version, info.object.name, last)
            self._block = last
            if part.is_last:
                self._infos.pop()
                self._block = 0
        return parts

    def _find(self) -> bool:
        """Whether there is another object, which is then the last of `_infos`."""
        while not self._infos:
            before, last = self._version, self._last
            following = [
                version
                for version in self._store.versions()
                if last is not None
                and (before is None or before < version)
                and version <= last
                and self._wanted(version)
            ]
            if not following:
                return False
            self._load(min(following), None)
        return True

    def _load(self, version: ContainerVersion, start: Place | None) -> None:
        """The objects of a container that are left to be taken, the first one last."""
        held = self._store.objects(version)
        left = [held[name] for name in sorted(held, reverse=True) if start is None or name >= start.name]
        self._version, self._infos, self._block = version, left, 0
        if start is not None and left and left[-1].object.name == start.name:
            self._block = start.block
            if start.block >= len(left[-1].block_crcs):
                left.pop()
                self._block = 0


def verify(paths: StorePaths, parts: Sequence[Part]) -> list[Bad]:
    """Check parts against the checksums in their objects' trailers; what is gone meanwhile is passed over.

    An object is open, and so kept from being recycled, only while its part is read. Blocking: for a thread.
    """
    bad: list[Bad] = []
    for part in parts:
        one = part.info.object
        try:
            with open_object(paths, one) as reader:
                reader.verify(range(part.first, min(part.last, len(reader.info.block_crcs))))
        except ObjectNotFoundError:
            continue
        except CorruptObjectError as error:
            bad.append((one, error))
        except OSError as error:
            # Too many open files, or no memory for the mapping: that says nothing of the object.
            log.warning("an object could not be read to be verified", extra={"object": str(one), "reason": error})
    return bad
