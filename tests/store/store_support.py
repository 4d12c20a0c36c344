"""What the tests of the store share."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

from replicator.ids import CheckpointContainerId, ContainerVersion, ObjectVersion
from replicator.store import Store
from replicator.store.client_lock import ClientLock
from replicator.store.paths import StorePaths
from replicator.store.segment import MappedSegment, MappingCache
from replicator.store.trailer import capacity_for
from replicator.store.writer import ObjectWriter

MIB = 1 << 20
BUDGET = 64 * MIB


def version(step: int = 1, generation: int = 1 << 20, job: str = "job") -> ContainerVersion:
    return ContainerVersion(CheckpointContainerId(job, step), generation)


class Trainer:
    """A client in this process, with its own lock and mappings."""

    def __init__(self, paths: StorePaths, client_id: str | None = None) -> None:
        self.paths = paths
        self.client_id = client_id or secrets.token_hex(16)
        self.lock = ClientLock(paths, self.client_id)
        self.lock.acquire()
        self.mappings = MappingCache(paths)

    def reserve(self, store: Store, capacity: int) -> MappedSegment:
        got = store.reserve(self.client_id, capacity)
        return self.mappings.get(got.segment, got.inode, got.capacity)

    def writer(self, store: Store, one: ObjectVersion, capacity: int, block_size: int = 4 * MIB) -> ObjectWriter:
        grow: Callable[[int], MappedSegment] = lambda size: self.reserve(store, size)  # noqa: E731
        return ObjectWriter(
            self.reserve(store, capacity),
            one,
            "node-a",
            self.client_id,
            grow,
            lambda old: store.release(self.client_id, old.name),
            block_size,
        )

    def save(self, store: Store, one: ObjectVersion, data: bytes) -> int:
        """Seal an object; the inode of its segment."""
        writer = self.writer(store, one, capacity_for(len(data)))
        writer.write(data)
        info = writer.close()
        store.seal(self.client_id, writer.mapped.name, info)
        return writer.mapped.inode

    def close(self) -> None:
        self.mappings.close()
        self.lock.close()


def reopened(store: Store) -> Store:
    """Another agent on the root of one that ended."""
    store.close()
    again = Store(store.paths, BUDGET)
    again.rebuild()
    return again


def bytes_on_disk(paths: StorePaths) -> int:
    """Sizes of all files that the budget must know of."""
    return sum(
        os.lstat(os.path.join(directory, name)).st_size
        for top in (paths.segments, paths.objects, paths.quarantine)
        for directory, _, names in os.walk(top)
        for name in names
    )


def check_accounts(store: Store) -> None:
    """What the store thinks it uses is what is there."""
    assert store.usage().used_bytes == bytes_on_disk(store.paths)
