"""The stages of a save on top of a session: `DefaultCheckpointSaver`."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from replicator.checkpoint.buckets import (
    ObjectWriteBucket,
    WriteItemResolver,
    check_names,
    check_unique,
    in_threads,
    split_items,
    write_object,
)
from replicator.checkpoint.committing import entry_of, wait_for_commit
from replicator.checkpoint.flat_state import stage_flat
from replicator.checkpoint.gathering import Sealed, collect, missing_ranks, report
from replicator.checkpoint.metadata_bytes import metadata_bytes
from replicator.checkpoint.names import METADATA_NAME, CheckpointId, container_of
from replicator.checkpoint.objects import CheckpointObjectManager
from replicator.checkpoint.rewriting import last_name, last_ones, next_name
from replicator.checkpoint.saver import CheckpointSaver
from replicator.checkpoint.staging import Stager
from replicator.checkpoint.torch_threads import bounded_threads
from replicator.client.outstanding import CommitInfo, ReplicaInfo
from replicator.client.replication import ReplicationManager
from replicator.decide.types import ManifestEntry
from replicator.errors import ConfigError, ObjectExistsError, SaveError
from replicator.ids import CheckpointContainerId, CheckpointObjectId, ContainerVersion

logger = logging.getLogger("replicator.checkpoint")

COORDINATOR = 0
"""The global rank that begins and commits."""


@dataclass
class OneSave:
    """The save at hand. `written`: whether this rank has begun to write objects. `sealed`: what this process wrote, by
    name. `listed`: names of the metadata that this rank knows of, and of objects that they list."""

    version: ContainerVersion
    written: bool = False
    buckets: list[ObjectWriteBucket] = field(default_factory=list)
    sealed: dict[str, ManifestEntry] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)


class DefaultCheckpointSaver(CheckpointSaver):
    """One per rank, for one save after another. Not thread-safe, but the stages of a save may run in several threads.

    May be pickled, for a process that is started and not forked: there `write_data` and `async_replicate_object` of the
    save at hand may be called.

    Args:
        global_rank_getter, local_rank_getter: this rank's number in the job, and on its node. Global rank 0 commits;
            local rank 0 writes the metadata.
        global_barrier_func: returns when every rank has called it; raises when one does not come.
        ckpt_obj_manager: the objects, of the session into which is saved.
        replication_manager: makes the copies; default: that of the session.
        initial_buffer_size_bytes: reserved for an object at first, which grows when that was too small; default: what
            its items take.
        use_optimized_save: write dense tensors with one copy; False: with `torch.save`. What is read is the same.
        copy_cpu_tensors: False: `stage_data` hands on tensors that are on the CPU as they are. Only for callers that
            leave them alone until `write_data` has returned.
        resumable: whether a job can go on from what is saved; False, for instance, for the model alone.
    """

    def __init__(
        self,
        global_rank_getter: Callable[[], int],
        local_rank_getter: Callable[[], int],
        global_barrier_func: Callable[[], None],
        ckpt_obj_manager: CheckpointObjectManager,
        replication_manager: ReplicationManager | None = None,
        initial_buffer_size_bytes: int | None = None,
        use_optimized_save: bool = True,
        *,
        copy_cpu_tensors: bool = True,
        resumable: bool = True,
    ) -> None:
        if initial_buffer_size_bytes is not None and initial_buffer_size_bytes < 1:
            raise ConfigError(f"initial_buffer_size_bytes: expected 1 or more, found {initial_buffer_size_bytes}")
        self._global_rank = global_rank_getter
        self._local_rank = local_rank_getter
        self._barrier = global_barrier_func
        self._objects = ckpt_obj_manager
        self._replication = replication_manager
        self._initial_size = initial_buffer_size_bytes
        self._stock = not use_optimized_save
        self._copy_cpu_tensors = copy_cpu_tensors
        self._resumable = resumable
        self._stager = Stager()
        self._save: OneSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            # The other process is no rank of its own, and torch.distributed is not initialised there.
            "_global_rank": Constant(self._global_rank()),
            "_local_rank": Constant(self._local_rank()),
            "_barrier": no_barrier,
            "_replication": None,
            "_stager": Stager(),
            "_save": None if self._save is None else OneSave(self._save.version),
        }

    # -- stages

    def initialize_checkpoint(self, checkpoint_id: CheckpointId) -> None:
        """Raises, beside the errors of `replicator.init`:

        InvalidIdError: the id names no step, the root for instance.
        ConfigError: ranks that cannot be.
        DeadlineExceededError: on another rank than the coordinator, which began nothing.
        StaleEpochError: a newer incarnation of the job exists.
        """
        container = self._container(checkpoint_id)
        self._mark(container)
        try:
            if self._save is not None:
                left = self._save.version
                logger.warning("%s was never finalized by rank %d; it is given up", left, self._global_rank())
                self._objects.forget(left.container)
                self._save = None
            self._save = OneSave(self._objects.take_part(self._begin(container)))
        except BaseException:
            self._unmark(container)
            raise

    def stage_data(
        self, checkpoint_id: CheckpointId, state_dict: dict[str, Any], non_blocking: bool = True
    ) -> dict[str, Any]:
        """Values that are no tensors pass through. The copies are owned by what is returned: training may go on (F02).

        Tensors of buckets that were prepared before are copied too, and the buckets hold the copies from then on; a
        tensor that is both in the state and in a bucket is copied once.

        Raises:
            ConfigError: the state is not flattened; with the key.
            UnsupportedError: a tensor that cannot be saved; with the key.
        """
        save = self._begun(checkpoint_id)
        return stage_flat(
            self._stager, state_dict, save.buckets, non_blocking=non_blocking, copy_cpu=self._copy_cpu_tensors
        )

    def prepare_write_data(
        self,
        checkpoint_id: CheckpointId,
        write_items: Sequence[WriteItem],
        resolver: WriteItemResolver,
        object_name_prefix: str,
        bucket_count: int,
    ) -> list[ObjectWriteBucket]:
        """CPU tensors that are views of something larger, or not contiguous, become contiguous copies; tensors on a
        device do when they are staged or written.

        Raises:
            SaveError: a key that occurs twice, or whose value cannot be had; with the key.
            InvalidIdError: a prefix that cannot be one.
        """
        save = self._begun(checkpoint_id)
        check_unique(write_items, self._global_rank())
        buckets = []
        for number, items in enumerate(split_items(write_items, bucket_count)):
            bucket = self._bucket(save.version.container, object_name_prefix, number)
            for item in items:
                bucket.add(item, resolver)
            buckets.append(bucket)
        save.buckets += buckets
        return buckets

    def write_data(
        self,
        checkpoint_id: CheckpointId,
        write_buckets: Sequence[ObjectWriteBucket],
        replicate_after_write: bool,
        thread_count: int = 1,
    ) -> list[WriteResult]:
        """May be called again, after an error or with other content, for objects that are there already. What has
        other content gets another name, in the bucket and in the results: those of the last call count. What an earlier
        attempt at the step left, in this or an earlier incarnation, is in nobody's way.

        Raises:
            SaveError, or what all errors have in common: with the object and the key of each.
            ConfigError: buckets with the same name, or of another container.
        """
        save = self._begun(checkpoint_id)
        save.written = True
        threads = max(thread_count, 1)
        check_names(write_buckets, save.version.container, self._global_rank())
        work = [
            (bucket.object_name, lambda bucket=bucket: self._write(save, bucket, replicate_after_write))
            for bucket in write_buckets
        ]
        with bounded_threads(threads):
            written = in_threads(work, threads, f"{save.version.container} on rank {self._global_rank()}")
        return [result for part in written for result in part]

    def async_replicate_object(self, object_id: CheckpointObjectId) -> list[Future[ReplicaInfo]]:
        """Of an object that was written again, also by another process, its last writing. Never waits for a peer.

        Raises StaleEpochError when a newer incarnation of the job exists.
        """
        one = CheckpointObjectId(object_id.container, self._last_name(object_id))
        return self._objects.replicate(one, self._replication)

    def write_metadata(
        self, checkpoint_id: CheckpointId, metadata: Metadata, md_object_name: str = METADATA_NAME
    ) -> None:
        """Writes nothing on other ranks than local rank 0, and global rank 0 wherever it is. All that write must give
        the same metadata; what these list cannot be written again with other content."""
        save = self._begun(checkpoint_id)
        if self._local_rank() == 0 or self._global_rank() == COORDINATOR:
            save.written = True
            one = CheckpointObjectId(save.version.container, md_object_name)
            save.sealed[md_object_name] = entry_of(self._objects.write_bytes(one, self._serialised(metadata)))
            self.async_replicate_object(one)
        save.listed.add(md_object_name)
        folder = posixpath.dirname(md_object_name)
        paths = {info.relative_path for info in (metadata.storage_data or {}).values()}
        save.listed |= {posixpath.normpath(posixpath.join(folder, path)) for path in paths}

    def finalize_checkpoint(self, checkpoint_id: CheckpointId) -> Future[CommitInfo] | None:
        """What is superseded is removed by the agents of all nodes, under their retention rules, from then on.

        Raises:
            SaveError: the barrier threw, a rank did not come or saved something else, or objects are missing or
                differ; with the ranks or the objects. The save has failed then, on the coordinator at least.
            ReplicatorError: on the coordinator: the commit was refused.
        """
        save = self._begun(checkpoint_id)
        self._save = None
        try:
            self._unmark(save.version.container)
            entries = self._gather(save)
            if entries is None:
                return None
            _check_complete(save, {entry.name for entry in entries})
            return self._commit(save.version, entries)
        except BaseException:
            self._give_up(save.version)
            raise
        finally:
            self._objects.forget(save.version.container)

    def close(self) -> None:
        """Let go of the memory that staging keeps for the next save. The saver may be used on."""
        self._stager.clear()

    # -- how the ranks come together, for those who have another way

    def _begin(self, container: CheckpointContainerId) -> ContainerVersion:
        """The attempt that all ranks write: the coordinator begins one."""
        if self._rank() != COORDINATOR:
            return self._objects.follow(container)
        return self._objects.begin(container, self)

    def _newest(self, version: ContainerVersion) -> ContainerVersion:
        """The attempt, or what has taken its place before this rank wrote anything."""
        return version if self._global_rank() == COORDINATOR else self._objects.catch_up(version)

    def _gather(self, save: OneSave) -> list[ManifestEntry] | None:
        """Return when every rank has sealed what it has: on the coordinator all of it, elsewhere None."""
        session, rank = self._objects.session, self._rank()
        entries = last_ones(self._objects.entries(save.version.container))
        mine = Sealed(rank, save.version, session.node.node_id, entries)
        report(session.ranks, mine)
        self._wait_for_all(mine)
        return collect(session.ranks, mine, session.deadline_s) if rank == COORDINATOR else None

    def _commit(self, version: ContainerVersion, entries: list[ManifestEntry]) -> Future[CommitInfo] | None:
        """On the coordinator."""
        session = self._objects.session
        futures = self._objects.commit(version, entries, session.ranks.world_size, self._resumable)
        wait_for_commit(session, version, futures, "seal", 0.0)
        return futures.protected

    def _give_up(self, version: ContainerVersion) -> None:
        """This rank has failed."""
        if self._global_rank() == COORDINATOR:
            self._objects.abandon(version)

    # -- parts

    def _serialised(self, metadata: Metadata) -> bytes:
        return metadata_bytes(metadata)

    def _bucket(self, container: CheckpointContainerId, prefix: str, number: int) -> ObjectWriteBucket:
        name = f"{prefix}_{number}_src{self._global_rank()}.distcp"
        return ObjectWriteBucket(CheckpointObjectId(container, name), name)

    def _container(self, checkpoint_id: CheckpointId) -> CheckpointContainerId:
        return container_of(checkpoint_id, self._objects.session.job)

    def _rank(self) -> int:
        rank, ranks = self._global_rank(), self._objects.session.ranks
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks.world_size:
            raise ConfigError(
                f"global_rank_getter: expected a rank of the {ranks.world_size} that this session has, found {rank!r}"
            )
        return rank

    def _begun(self, checkpoint_id: CheckpointId) -> OneSave:
        container = self._container(checkpoint_id)
        if self._save is None or self._save.version.container != container:
            at_hand = "none" if self._save is None else str(self._save.version.container)
            raise ConfigError(f"{container} is not being saved ({at_hand} is); call initialize_checkpoint first")
        if not self._save.written:
            self._save.version = self._newest(self._save.version)
        return self._save

    def _mark(self, container: CheckpointContainerId) -> None:
        """And take away those of saves that were not finalized: this rank's, on local rank 0 also those of earlier
        incarnations."""
        self._objects.mark_unfinished(container, self._local_rank(), self._rank())
        for (other, local_rank), writer in self._objects.unfinished().items():
            mine = local_rank == self._local_rank()
            old = self._local_rank() == 0 and (writer is None or writer.epoch != self._objects.session.epoch)
            if (other == container and mine) or not (mine or old):
                continue
            who = "a rank" if writer is None else f"rank {writer.global_rank} (pid {writer.pid}, epoch {writer.epoch})"
            logger.warning("%s was left unfinished by %s", other, who)
            self._objects.mark_finished(other, local_rank)

    def _unmark(self, container: CheckpointContainerId) -> None:
        self._objects.mark_finished(container, self._local_rank())

    def _write(self, save: OneSave, bucket: ObjectWriteBucket, replicate: bool) -> list[WriteResult]:
        bucket.rename(self._last_name(bucket.object_id))
        try:
            results = self._write_under_its_name(save, bucket)
        except ObjectExistsError:
            name = next_name(bucket.object_id.name)
            if name is None or bucket.object_id.name in save.listed:
                raise
            bucket.rename(name)
            logger.warning("%s is written again, with other content, as %s", save.version, bucket.object_name)
            results = self._write_under_its_name(save, bucket)
        if replicate:
            self.async_replicate_object(bucket.object_id)
        return results

    def _last_name(self, one: CheckpointObjectId) -> str:
        """Of the last writing of an object on this node."""
        return last_name(one.name, lambda name: self._objects.has(CheckpointObjectId(one.container, name)))

    def _write_under_its_name(self, save: OneSave, bucket: ObjectWriteBucket) -> list[WriteResult]:
        with self._objects.acquire_buffer(bucket.object_id, self._initial_size or bucket.size_bytes) as sink:
            results = write_object(sink, bucket.object_name, bucket.tensors(), bucket.bytesio_data, stock=self._stock)
        save.sealed[bucket.object_id.name] = entry_of(sink.info)
        return results

    def _wait_for_all(self, mine: Sealed) -> None:
        try:
            self._barrier()
        except Exception as error:
            raise SaveError(
                f"{mine.version.container} is not committed: the barrier threw on rank {mine.rank}, "
                f"{type(error).__name__}: {error}; {missing_ranks(self._objects.session.ranks, mine)}"
            ) from error


@dataclass(frozen=True)
class Constant:
    """A getter that can be pickled."""

    value: int

    def __call__(self) -> int:
        return self.value


def no_barrier() -> None:
    raise ConfigError("the barrier of the ranks is in the process that made the saver; call finalize_checkpoint there")


def _check_complete(save: OneSave, sealed: set[str]) -> None:
    """The metadata must be there, and what they speak of."""
    if not save.listed:
        raise SaveError(f"{save.version.container} has no metadata; call write_metadata before finalize_checkpoint")
    missing = sorted(save.listed - sealed)
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise SaveError(
            f"{save.version.container} is not committed: its metadata lists objects that no rank sealed, or that were "
            f"written again since: {shown}; give write_metadata the results of the last write_data"
        )
