"""The store of one node, as its agent has it: objects and records, that are sealed, read and dropped.

Thread-safe. Files are the truth and the index follows them: every change is one rename, after which a crash
finds the new state and before which it finds the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Sequence

from replicator.errors import (
    CorruptObjectError,
    ReplicatorError,
    SegmentError,
    StoreError,
    StoreRootError,
)
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.native import crc32c
from replicator.store.index import Index
from replicator.store.ingest import Batch, Item
from replicator.store.mounts import cgroup_limit, settle_budget, space_of
from replicator.store.paths import StorePaths, check_client_id
from replicator.store.publish import publish
from replicator.store.quarantine import move_away
from replicator.store.reader import open_object
from replicator.store.rebuild import RebuildReport, rebuild
from replicator.store.records import JobState, Records, remove_empty
from replicator.store.room import Room
from replicator.store.trailer import ObjectInfo

logger = logging.getLogger("replicator.store")


class Store(Room):
    """One agent's store.

    Args:
        paths: from `open_root`.
        budget_bytes: the most that segments may take; 0: 90% of what the file system and the cgroup leave.

    Attributes: those of `Room`.

    Raises:
        StoreRootError: another agent has this root.
    """

    def __init__(self, paths: StorePaths, budget_bytes: int = 0) -> None:
        super().__init__(paths, budget_bytes)
        self._agent_lock = self._take_lock()
        self._records = Records(paths)
        self._jobs: dict[str, JobState] = {}
        self._asked_budget = budget_bytes

    def _take_lock(self) -> int:
        try:
            fd = os.open(self.paths.agent_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreRootError(f"cannot write in {self.paths.root}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise StoreRootError(
                f"another agent uses {self.paths.root}; stop it, or give this one another root with --root"
            ) from None
        return fd

    def close(self) -> None:
        """Let another agent have the root. Idempotent."""
        with self._lock:
            if self._agent_lock >= 0:
                os.close(self._agent_lock)
                self._agent_lock = -1

    def rebuild(self) -> RebuildReport:
        """Read the index from the files, and settle the budget. Call it once, before anything else.

        Raises:
            ConfigError: a budget that the file system or the cgroup can never give.
        """
        with self._changing():
            self._index = Index()
            self._pool = self._new_pool()
            self._jobs = {}
            report = rebuild(self.paths, self._index, self._pool, self._records, self._jobs)
            self._quarantine.look()
            space = space_of(self.paths.root, self._used())
            self._budget, warning = settle_budget(self._asked_budget, space, cgroup_limit(), self.paths.root)
            if warning:
                logger.warning("%s", warning)
            # Before anything new is allocated: what an earlier agent left is charged to this one, too.
            excess = self._used() - self._budget
            self._quarantine.trim(excess - self._pool.trim(excess))
            self._ballast.fill()
            return report

    # -- writing

    def ingest(
        self, items: Sequence[Item], before_seal: Callable[[], None] = lambda: None
    ) -> list[ReplicatorError | None]:
        """Write and seal small objects whose bytes are here and verified. May be called in any thread.

        Each object stands for itself: one that fails leaves the others alone, and nothing of its own behind.

        Args:
            items: written by living clients (`info.client_id`), all by the same one.
            before_seal: called, with the store locked, before some of them get their names; what it raises
                (ReplicatorError) keeps those from it.

        Returns:
            For each object None, when it is sealed here, or why not: StoreFullError, ObjectExistsError, StoreError.
        """
        batch = Batch(self.paths, items)
        try:
            if items:
                self._fund(check_client_id(items[0].info.client_id), batch)
            batch.write(self._relieve)
            reach("ingest.written")
            for part in batch.parts():
                with self._lock:
                    try:
                        before_seal()
                    except ReplicatorError as error:
                        batch.fail(part, error)
                        continue
                    for index in part:
                        sealed = batch.publish(index)
                        if sealed is not None:
                            self._index.add(*sealed)
                            reach("ingest.named")
        finally:
            unused = batch.end()
            with self._lock:
                self._in_flight -= batch.claimed
                for segment in unused:
                    self._pool.put_back(segment)
        return batch.errors

    def seal(self, client_id: str, segment: str, info: ObjectInfo) -> None:
        """Publish the object that a client wrote into its segment. Idempotent.

        Raises:
            SegmentError: no such reservation, or another client's.
            CorruptObjectError: the trailer in the segment is not that of `info`.
            ObjectExistsError: an object of this name and generation has other content.
            StoreFullError: no room for another file name.
        """
        if info.client_id != client_id:
            raise SegmentError(f"{info.object} belongs to client {info.client_id}, who wrote it, not to {client_id}")

        def change() -> None:
            self._pool.reservation(client_id, segment)
            publish(self.paths, segment, info)
            self._pool.sealed(segment)
            self._add(info.object)

        self._with_room(f"the name of {info.object}", 0, change)
        reach("seal.indexed")

    def adopt(self, one: ObjectVersion) -> ObjectInfo:
        """Take an object into the index that a trainer published without the agent. Idempotent.

        Raises:
            ObjectNotFoundError, CorruptObjectError: it is not there, or not valid.
        """
        with self._lock:
            self._pool.forget_removed()
            return self._add(one)

    def _add(self, one: ObjectVersion) -> ObjectInfo:
        with open_object(self.paths, one) as held:
            found = os.fstat(held.fd)
            self._index.add(held.info, found.st_size)
            self._pool.sealed_inode(found.st_ino)
            return held.info

    # -- reading

    def get(self, one: ObjectVersion) -> ObjectInfo | None:
        with self._lock:
            return self._index.get(one)

    def objects(self, version: ContainerVersion) -> dict[str, ObjectInfo]:
        """The sealed objects of a version, by name."""
        with self._lock:
            return self._index.objects(version)

    def bytes_of(self, version: ContainerVersion) -> int:
        """What `drop` would free."""
        with self._lock:
            return self._index.bytes_of(version)

    def versions(self, job: str | None = None) -> list[ContainerVersion]:
        """All versions of which an object or a manifest is here."""
        with self._lock:
            return self._index.versions(job)

    def jobs(self) -> list[str]:
        """All jobs of which anything is known."""
        with self._lock:
            return sorted({version.container.job for version in self._index.versions(None)} | set(self._jobs))

    # -- commits and jobs

    def put_manifest(self, version: ContainerVersion, data: bytes, crc: int) -> None:
        """Store a manifest; one that is there is kept, for a commit is never changed.

        Raises:
            CorruptObjectError: its checksum is not `crc`.
            StoreFullError: no room for it.
            StoreError: another manifest of this version is there.
        """
        if crc32c(data) != crc:
            raise CorruptObjectError(f"the manifest of {version} does not match its checksum {crc:08x}; send it again")

        def change() -> None:
            present = self._index.manifest(version)
            if present is not None:
                if present != data:
                    raise StoreError(f"{version} is committed with another manifest; a commit is never changed")
                return
            self._records.put_manifest(version, data, crc)
            self._index.set_manifest(version, data)

        self._with_room(f"the manifest of {version}", len(data), change)

    def manifest(self, version: ContainerVersion) -> bytes | None:
        with self._lock:
            return self._index.manifest(version)

    def mark_protected(self, version: ContainerVersion) -> bool:
        """Whether it is protected now: not when it is not committed here, or was dropped since the caller looked.

        Raises StoreFullError when there is no room.
        """

        def change() -> bool:
            if self._index.manifest(version) is None:
                return False
            if not self._index.is_protected(version):
                self._records.mark_protected(version)
                self._index.set_protected(version)
            return True

        return self._with_room(f"the mark of {version}", 0, change)

    def is_protected(self, version: ContainerVersion) -> bool:
        with self._lock:
            return self._index.is_protected(version)

    def job_state(self, job: str) -> JobState | None:
        with self._lock:
            return self._jobs.get(job)

    def put_job_state(self, state: JobState) -> None:
        """Raises StoreFullError when there is no room for it."""

        def change() -> None:
            self._records.put_job(state)
            self._jobs[state.job] = state

        self._with_room(f"what is known of job {state.job}", 0, change)
        reach("epoch.stored")

    # -- removing

    def drop(self, version: ContainerVersion) -> int:
        """Remove a container: first manifest and mark, then its objects, whose segments are recycled. Bytes freed."""
        with self._changing():
            self._records.drop(version)
            reach("drop.unlisted")
            self._index.drop_manifest(version)
            before = self._index.sealed_bytes
            for name, info in self._index.objects(version).items():
                self._index.remove(info.object)
                with contextlib.suppress(FileNotFoundError):
                    self._pool.recycle(self.paths.object(version.object(name)), info.client_id)
                reach("drop.recycled")
            remove_empty(self.paths.objects_of(version), self.paths.objects)
            self._ballast.fill()
            return before - self._index.sealed_bytes

    def quarantine(self, one: ObjectVersion, reason: str) -> None:
        """Take a damaged object out of sight for ever. Idempotent."""
        with self._lock:
            self._index.remove(one)
            path = self.paths.object(one)
            if not path.exists():
                return
            logger.error("%s is put in quarantine: %s", one, reason)
            move_away(self.paths, path)
            remove_empty(path.parent, self.paths.objects)
            self._quarantine.look()
