"""`torch.distributed.checkpoint` saves into the memory of the nodes.

Each rank writes its items into objects on its own node, in the layout of `FileSystemWriter`, and has each copied
to its buddies as soon as it is sealed. The coordinator writes `.metadata`, lists everything in a manifest and
commits it: before that the checkpoint does not exist for recovery.
"""

from __future__ import annotations

import dataclasses
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from replicator.checkpoint.collective_saver import CollectiveSaver
from replicator.checkpoint.committing import SaveInParts, WaitFor, check_options, wait_for_commit
from replicator.checkpoint.names import METADATA_NAME, CheckpointId, container_of, is_container
from replicator.client.outstanding import CommitInfo, ReplicaInfo
from replicator.client.session import Session
from replicator.decide.types import ManifestEntry
from replicator.errors import ConfigError, UnsupportedError
from replicator.ids import CheckpointContainerId, ContainerVersion

Backpressure = Literal["skip", "block"]
# `commit` and `protected` wait for transfers of any size; each object has a deadline of its own at the agents.
_WAIT_DEADLINES = 20


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the coordinator tells a rank with its part of the global plan."""

    version: ContainerVersion
    rank: int


@dataclass(frozen=True, slots=True)
class _Sealed:
    """What a rank tells the coordinator with its results: the objects it sealed."""

    version: ContainerVersion
    entries: tuple[ManifestEntry, ...]


class ReplicatedStorageWriter(StorageWriter, AsyncStager):
    """A storage writer for `dcp.save` and `dcp.async_save` (threads and processes).

    One writer serves many saves, one after another. It may be pickled: the other process attaches to the same
    agent in the same epoch. With `no_dist=True` a single rank is the whole checkpoint, so only one rank of a job
    may save a step that way.

    For `dcp.async_save` it is also the stager: the training is blocked for one copy of the state, into host memory that
    is kept for the next save. `close()` lets go of that memory.

    Args:
        session: from `replicator.init`; default: the session of this process, made by `replicator.init()` at the
            first save when there is none. All ranks must then save together.
        checkpoint_id: as for `dcp.save(checkpoint_id=...)`, which may give another one for each save: a step, see
            `names.container_of`.
        wait_for: what a save waits for. `seal`: every rank's objects are sealed on its node, and the manifest is
            stored there; copies and commit go on in the background, and their trouble never raises. `commit`:
            also, the manifest is on replicas + 1 nodes. `protected`: also, every object is with all its buddies.
        thread_count: objects per rank, written in parallel.
        wait_deadline_s: for `commit`, `protected` and `block`; default: 20 times the session's deadline.
        backpressure: when saves come faster than their copies are made, `skip` those in between, or `block` until at
            most one lacks copies; default: the session's. The coordinator's counts.
        resumable: whether a job can go on from what this writer saves; False, for instance, for the model alone.
        prefix: the folder of this writer's objects in the container, for instance "model/".
        part_of: a save of several parts in one container, which whoever made it commits; then `checkpoint_id`,
            `wait_for`, `resumable` and the futures of the commit are of no use here.

    The futures are None, or none, on other ranks; after an `async_save` in another process they stay in that process.
    """

    # What `stage` returns is complete.
    _synchronize_after_execute = False

    def __init__(
        self,
        session: Session | None = None,
        checkpoint_id: CheckpointId | None = None,
        *,
        wait_for: WaitFor = "seal",
        thread_count: int = 1,
        wait_deadline_s: float | None = None,
        backpressure: Backpressure | None = None,
        resumable: bool = True,
        prefix: str = "",
        part_of: SaveInParts | None = None,
    ) -> None:
        super().__init__()
        check_options(wait_for, wait_deadline_s, thread_count=thread_count)
        if backpressure not in (None, "skip", "block"):
            raise ConfigError(f"backpressure: expected skip or block, found {backpressure!r}")
        self._saver = CollectiveSaver(session, prefix, part_of)
        self._checkpoint_id = checkpoint_id
        self._save_id = str(uuid.uuid4())
        self.wait_for = wait_for
        self.thread_count = thread_count
        self.wait_deadline_s = wait_deadline_s
        self.backpressure = backpressure
        self.resumable = resumable

    # -- StorageWriter

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        if checkpoint_id is not None:
            self._checkpoint_id = checkpoint_id
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError without a step, UnsupportedError for `use_collectives=False`."""
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "use_collectives=False makes every rank write a checkpoint of its own, and a commit here covers all "
                "ranks; use the default, or no_dist=True in a single process"
            )
        self._saver.restart(is_coordinator, self.resumable)
        self._container()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if (self.backpressure or self.session.backpressure) == "block":
            self.session.keep_pace(self._wait_s)
        container = self._container()
        self._saver.initialize_checkpoint(container)
        version = self._saver.version_of(container)
        return [dataclasses.replace(plan, storage_data=_Turn(version, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        turn, saver, container = _turn(plan), self._saver, self._container()
        version = saver.take_turn(container, turn.version, turn.rank)
        prefix = f"__{turn.rank}"
        with saver.giving_up(version):
            # One rank's items in one object, unless several threads are to write.
            buckets = saver.prepare_write_data(container, plan.items, planner, prefix, self.thread_count)
            results = saver.write_data(container, buckets, True, self.thread_count)
        sealed = _Sealed(version, saver.sealed(container))
        results.append(WriteResult(MetadataIndex(f"replicator/{prefix}"), 0, sealed))
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        saver, container = self._saver, self._container()
        version = saver.version_of(container)
        with saver.giving_up(version):
            told = [one for rank in results for one in rank]
            for sealed in (one.storage_data for one in told if isinstance(one.storage_data, _Sealed)):
                if sealed.version != version:
                    raise ConfigError(f"expected objects of {version}, found some of {sealed.version}")
                saver.gathered += sealed.entries
            # PyTorch 2.6 has neither the constant nor the field.
            metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
            metadata.storage_data = {
                one.index: one.storage_data for one in told if isinstance(one.storage_data, _StorageInfo)
            }
            metadata.storage_meta = self.storage_meta()
            saver.write_metadata(container, metadata, self.prefix + METADATA_NAME)
        saver.world_size = len(results)
        saver.finalize_checkpoint(container)
        if saver.futures is not None:
            wait_for_commit(self.session, version, saver.futures, self.wait_for, self._wait_s)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str | None:
        """The id of the save at hand, as text."""
        return None if self._checkpoint_id is None else str(self._checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return is_container(checkpoint_id)

    # -- AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy on the CPU, which later training steps do not change (F02, F03)."""
        return self._saver.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns when it is complete."""

    def close(self) -> None:
        """Let go of the memory that `stage` keeps. The writer may be used on."""
        self._saver.close()

    # -- its own

    @property
    def session(self) -> Session:
        """The session it saves into. Raises the errors of `replicator.init` when it has to be made."""
        return self._saver.session

    @property
    def prefix(self) -> str:
        """Of the names of its objects."""
        return self._saver.prefix

    @property
    def part_of(self) -> SaveInParts | None:
        """The save that this is a part of."""
        return self._saver.part_of

    @property
    def replica_futures(self) -> list[Future[ReplicaInfo]]:
        """Of this rank's last save, one per object and buddy."""
        return self._saver.replica_futures

    @property
    def commit_future(self) -> Future[CommitInfo] | None:
        """Of the last save, on the coordinator."""
        return None if self._saver.futures is None else self._saver.futures.committed

    @property
    def protected_future(self) -> Future[CommitInfo] | None:
        """Of the last save, on the coordinator."""
        return None if self._saver.futures is None else self._saver.futures.protected

    def _container(self) -> CheckpointContainerId:
        if self.part_of is not None:
            return self.part_of.container
        if self._checkpoint_id is None:
            raise ConfigError(
                "expected a checkpoint_id that names the step, found none; give dcp.save one like 'step-100'"
            )
        return container_of(self._checkpoint_id, self.session.job)

    @property
    def _wait_s(self) -> float:
        return self.wait_deadline_s or _WAIT_DEADLINES * self.session.deadline_s


def _turn(plan: SavePlan) -> _Turn:
    turn = plan.storage_data
    if not isinstance(turn, _Turn):
        raise UnsupportedError(
            f"expected the global plan to carry what the storage writer put into it, found {type(turn).__name__}; "
            "the planner must keep SavePlan.storage_data"
        )
    return turn
