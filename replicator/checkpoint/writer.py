"""`torch.distributed.checkpoint` saves into the memory of the nodes.

Each rank writes its items into objects on its own node, in the layout of `FileSystemWriter`, and has each copied
to its buddies as soon as it is sealed. The coordinator writes `.metadata`, lists everything in a manifest and
commits it: before that the checkpoint does not exist for recovery.
"""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from replicator.checkpoint.buckets import is_blob, naming, resolve_blob, resolve_tensor
from replicator.checkpoint.committing import (
    WAITS,
    SaveInParts,
    WaitFor,
    commit,
    entry_of,
    give_up,
    replicate,
    wait_for_commit,
)
from replicator.checkpoint.items import Gathering, write_item
from replicator.checkpoint.names import METADATA_NAME, CheckpointId, container_of, is_container
from replicator.checkpoint.staging import Stager
from replicator.checkpoint.template import PAYLOAD_ALIGNMENT, template_of
from replicator.client.outstanding import CommitInfo, ReplicaInfo
from replicator.client.segments import SegmentObject
from replicator.client.session import Session, current_session, open_session
from replicator.decide.types import ManifestEntry
from replicator.errors import (
    ConfigError,
    UnsupportedError,
)
from replicator.ids import CheckpointContainerId, ContainerVersion

Backpressure = Literal["skip", "block"]
# `commit` and `protected` wait for transfers of any size; each object has a deadline of its own at the agents.
_WAIT_DEADLINES = 20


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the coordinator tells a rank with its part of the global plan."""

    version: ContainerVersion
    prefix: str


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
        prefix: of the names of this writer's objects, for instance "model/".
        part_of: a save of several parts in one container, which whoever made it commits; then `checkpoint_id`,
            `wait_for`, `resumable` and the futures of the commit are of no use here.

    Attributes:
        replica_futures: of this rank's last save, one per object and buddy.
        commit_future, protected_future: of the last save, on the coordinator; elsewhere None. After an
            `async_save` in another process these stay in that process.
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
        if wait_for not in WAITS:
            raise ConfigError(f"wait_for: expected one of {', '.join(WAITS)}, found {wait_for!r}")
        if thread_count < 1:
            raise ConfigError(f"thread_count: expected 1 or more, found {thread_count}")
        if backpressure not in (None, "skip", "block"):
            raise ConfigError(f"backpressure: expected skip or block, found {backpressure!r}")
        self._session = session
        self._checkpoint_id = checkpoint_id
        self._save_id = str(uuid.uuid4())
        self._begun: ContainerVersion | None = None
        self._stager = Stager()
        self.wait_for = wait_for
        self.thread_count = thread_count
        self.wait_deadline_s = wait_deadline_s
        self.backpressure = backpressure
        self.resumable = resumable
        self.prefix = prefix
        self.part_of = part_of
        self.replica_futures: list[Future[ReplicaInfo]] = []
        self.commit_future: Future[CommitInfo] | None = None
        self.protected_future: Future[CommitInfo] | None = None

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
        self._begun = None
        self.replica_futures = []
        self.commit_future = self.protected_future = None
        self._container()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if (self.backpressure or self.session.backpressure) == "block":
            self.session.keep_pace(self._wait_s)
        if self.part_of is not None:
            self._begun = self.part_of.begin()
        else:
            self._begun = self.session.begin(self._container(), saver=self)
        return [
            dataclasses.replace(plan, storage_data=_Turn(self._begun, f"__{rank}_")) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        turn = self._turn(plan)
        # One rank's items in one object, unless several threads are to write.
        buckets = [bucket for bucket in _split_by_size_and_type(self.thread_count, list(plan.items)) if bucket]
        named = [(f"{turn.prefix}{number}.distcp", bucket) for number, bucket in enumerate(buckets)]
        results: list[WriteResult] = []
        entries: list[ManifestEntry] = []
        try:
            written = self._write_all(turn.version, named, planner)
        except Exception:
            self._give_up()
            raise
        for part, entry in written:
            results += part
            entries.append(entry)
        sealed = _Sealed(turn.version, tuple(entries))
        results.append(WriteResult(MetadataIndex(f"replicator/{turn.prefix}"), 0, sealed))
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        version = self._begun
        if version is None:
            raise ConfigError("finish() was called before prepare_global_plan()")
        try:
            entries = self._finish_part(version, metadata, results)
            if self.part_of is not None:
                self.part_of.add(entries)
                return
            futures = commit(self.session, version, entries, len(results), self.resumable)
        except Exception:
            self._give_up()
            raise
        self.commit_future, self.protected_future = futures.committed, futures.protected
        wait_for_commit(self.session, version, futures, self.wait_for, self._wait_s)

    def _finish_part(
        self, version: ContainerVersion, metadata: Metadata, results: list[list[WriteResult]]
    ) -> list[ManifestEntry]:
        entries: list[ManifestEntry] = []
        storage_data: dict[MetadataIndex, _StorageInfo] = {}
        for result in (one for rank in results for one in rank):
            if not isinstance(result.storage_data, _Sealed):
                storage_data[result.index] = result.storage_data
                continue
            if result.storage_data.version != version:
                raise ConfigError(f"expected objects of {version}, found some of {result.storage_data.version}")
            entries += result.storage_data.entries
        # PyTorch 2.6 has neither the constant nor the field.
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        metadata.storage_data = storage_data
        metadata.storage_meta = self.storage_meta()
        entries.append(self.write_bytes(version, METADATA_NAME, pickle.dumps(metadata)))
        return entries

    def _give_up(self) -> None:
        if self._begun is not None:
            give_up(self.session, self._begun)

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
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns when it is complete."""

    def close(self) -> None:
        """Let go of the memory that `stage` keeps. The writer may be used on."""
        self._stager.clear()

    # -- its own

    @property
    def session(self) -> Session:
        """The session it saves into. Raises the errors of `replicator.init` when it has to be made."""
        if self._session is None:
            self._session = current_session()
        return self._session

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(replica_futures=[], commit_future=None, protected_future=None, _begun=None)
        state["_session"] = self._session or open_session()
        state["_stager"] = Stager()
        return state

    def _container(self) -> CheckpointContainerId:
        if self.part_of is not None:
            return self.part_of.container
        if self._checkpoint_id is None:
            raise ConfigError(
                "expected a checkpoint_id that names the step, found none; give dcp.save one like 'step-100'"
            )
        return container_of(self._checkpoint_id, self.session.job)

    def _turn(self, plan: SavePlan) -> _Turn:
        """The coordinator's word for this save.

        A planner that caches plans gives back the plan of an earlier save, with that save's word in it; then
        the generation is asked for at the coordinator, and the prefix is still the right one.
        """
        turn = plan.storage_data
        if not isinstance(turn, _Turn):
            raise UnsupportedError(
                f"expected the global plan to carry what the storage writer put into it, found {type(turn).__name__}; "
                "the planner must keep SavePlan.storage_data"
            )
        container = self._container()
        version = self._begun or (self.part_of and self.part_of.version)
        version = version or self.session.follow(container, turn.version)
        if version.container != container:
            raise ConfigError(f"the coordinator saves {version.container}, this rank was told to save {container}")
        if self.part_of is not None:
            self.part_of.version = version
        return _Turn(version, turn.prefix)

    def _write_all(
        self, version: ContainerVersion, named: Sequence[tuple[str, list[WriteItem]]], planner: SavePlanner
    ) -> list[tuple[list[WriteResult], ManifestEntry]]:
        if len(named) < 2:
            return [self._write_object(version, name, items, planner) for name, items in named]
        with ThreadPoolExecutor(len(named), thread_name_prefix="replicator-save") as pool:
            writes = [pool.submit(self._write_object, version, name, items, planner) for name, items in named]
        return [write.result() for write in writes]

    def _write_object(
        self, version: ContainerVersion, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[list[WriteResult], ManifestEntry]:
        blobs = [(item, resolve_blob(planner, item)) for item in items if is_blob(item)]
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        size = sum(blob.getbuffer().nbytes for _, blob in blobs) + sum(_tensor_bytes(item) for item in tensors)
        results: list[WriteResult] = []
        with self.session.create(version.object(self.prefix + name), size) as sink:
            gathering = Gathering(sink)

            def write(item: WriteItem, data: Any) -> None:
                with naming(item, "it cannot be saved", UnsupportedError):
                    offset, length = write_item(gathering, data)
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))

            for item, blob in blobs:
                write(item, blob)
            for item in tensors:
                write(item, resolve_tensor(planner, item))
            gathering.flush()
        return results, self._replicate(sink)

    def write_bytes(self, version: ContainerVersion, name: str, data: bytes) -> ManifestEntry:
        """One more object of this rank, under this writer's prefix, for a save that is under way.

        Raises:
            StoreFullError, StaleEpochError: as with `Session.create`.
        """
        with self.session.create(version.object(self.prefix + name), len(data)) as sink:
            sink.write(data)
        return self._replicate(sink)

    def _replicate(self, sink: SegmentObject) -> ManifestEntry:
        self.replica_futures += replicate(self.session, [sink.info.object])
        return entry_of(sink.info)

    @property
    def _wait_s(self) -> float:
        return self.wait_deadline_s or _WAIT_DEADLINES * self.session.deadline_s


def _tensor_bytes(item: WriteItem) -> int:
    """What the item will take, when it is a dense tensor; a guess for others, of which the object grows."""
    tensor = item.tensor_data
    if tensor is None:
        return 0
    try:
        template = template_of(tensor.properties.dtype, tuple(tensor.chunk.sizes))
    except (RuntimeError, TypeError, KeyError):  # a dtype that has no plain tensors
        return PAYLOAD_ALIGNMENT
    return template.total_bytes + PAYLOAD_ALIGNMENT
