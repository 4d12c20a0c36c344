"""`torch_checkpointing` (0.1.0, 0.1.1) saves into the memory of the nodes.

    manager = CheckpointManager(replicated(CheckpointManager.Config()))
    manager.save("/ckpt/step-100", {"model": model.state_dict(), "step": 100})
    step = load_latest(manager, into={"model": model.state_dict(), "step": 0})

A file in its storage is an object of a container on the node of the rank that wrote it; a directory is the whole
container, on all nodes alike. Its commit, one rename on rank 0, becomes the commit of a manifest of all ranks' files
(F42): after it every rank sees the step, and before it none does. Saving a step again makes a new generation, which
takes the place of the old one when it is committed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from replicator.integrations._needed import needed

with needed("torch_checkpointing==0.1.0"):
    from torch_checkpointing.barriers import Barrier, BarrierConfig
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.storage.base_storage import Storage, StorageConfig
    from torch_checkpointing.types import RankInfo

from replicator.checkpoint.committing import WaitFor, check_options
from replicator.client.session import Session, attach, current_session
from replicator.client.session_spec import SessionSpec
from replicator.errors import ConfigError
from replicator.integrations._logical.layout import Layout
from replicator.integrations._logical.saves import SavePolicy, Saves
from replicator.integrations._logical.storage import ReplicatorStorage
from replicator.integrations._logical.writers import Writers


@dataclass
class ReplicatorStorageConfig(StorageConfig):
    """What a process needs to reach the job's checkpoints. May be pickled; makes nothing until it is used.

    Args:
        session: from `replicator.init`; default: the session of this process, made when there is none, and then every
            rank must make this config.
        directory: how a step's directory is called. The last part of a path that is one counts, and nothing above it;
            only where steps are listed, the directory above them must not be called like one.
        temporary_prefix: of the directory that is written before it is renamed.
        name: managers whose saves may overlap in time need different ones; the same on all ranks.
        wait_for: what the end of a save waits for, in the process that writes: `seal`, nothing but the commit's being
            asked for; `commit`, the manifest is on replicas + 1 nodes; `protected`, also, all files have all copies.
        resumable: whether a job can go on from these saves; False, for instance, for the model alone.
        strict: raise what goes wrong in the store or with a commit. The asynchronous saver of `torch_checkpointing`
            does not work any more after that; otherwise it is logged and the step does not come to exist.
        wait_s: for the slowest rank, copies and commits; default: 20 times the session's deadline.
    """

    directory: str = "step-{step}"
    temporary_prefix: str = "tmp_"
    name: str = "checkpoints"
    wait_for: WaitFor = "commit"
    resumable: bool = True
    strict: bool = False
    wait_s: float | None = None
    session: Session | None = field(default=None, repr=False, compare=False)
    _spec: SessionSpec | None = field(default=None, init=False, repr=False)
    _writers: Writers | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        Layout(self.directory, self.temporary_prefix)
        check_options(self.wait_for, self.wait_s, "wait_s")
        self.session = self.session or current_session()
        self._spec = self.session.spec
        self._writers = Writers.of_this_job()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "session": None}

    @property
    def world_size(self) -> int:
        """Ranks that save together."""
        assert self._writers is not None
        return self._writers.world_size

    def create_storage(self) -> ReplicatorStorage:
        """The storage of this process. Equal configs have the same one: a callback finds what the writer wrote."""
        assert self._spec is not None
        assert self._writers is not None
        key = (os.getpid(), self._spec.root, self._spec.job, self._spec.epoch, repr(self))
        with _storages_lock:
            for other in [other for other, (config, _) in _storages.items() if other[0] != key[0] or config._is_over]:
                del _storages[other]
            if key not in _storages:
                policy = SavePolicy(self.wait_for, self.resumable, self.strict, self.wait_s)
                saves = Saves(self._session, self._writers, self.name, policy)
                layout = Layout(self.directory, self.temporary_prefix)
                _storages[key] = self, ReplicatorStorage(self._session, layout, saves)
                while len(_storages) > MAX_STORAGES:
                    del _storages[next(iter(_storages))]
            return _storages[key][1]

    @property
    def _is_over(self) -> bool:
        return self.session is not None and self.session.agent.closed

    def _session(self) -> Session:
        assert self._spec is not None
        if self.session is None:
            self.session = attach(self._spec)
        return self.session


MAX_STORAGES = 64
"""Of the sessions that this process has open; the oldest ones are forgotten."""
_storages: dict[tuple[Any, ...], tuple[ReplicatorStorageConfig, ReplicatorStorage]] = {}
_storages_lock = threading.Lock()


@dataclass(frozen=True)
class AwaitBuddies:
    """`pre_finalize_callback`: the copies of this rank's files are made, or it is logged why not."""

    storage: ReplicatorStorageConfig
    await_copies: bool = True

    def __call__(self, args: Any, event_logger: Any = None) -> None:
        # 0.1.0 gives the path, 0.1.1 an object that has it.
        self.storage.create_storage().ready(getattr(args, "path", args), await_copies=self.await_copies)


@dataclass(frozen=True)
class Commit:
    """`finalize_callback`: the step is committed, or it is logged why not; then it does not exist."""

    storage: ReplicatorStorageConfig

    def __call__(self, args: Any, event_logger: Any = None) -> None:
        self.storage.create_storage().finish(getattr(args, "path", args))


@dataclass
class JobBarrierConfig(BarrierConfig):
    """A barrier of the processes that write, in the store that torch.distributed has: it needs no port of its own."""

    timeout_barrier_init_sec: int
    storage: ReplicatorStorageConfig

    def create_barrier(self, rank_info: RankInfo) -> JobBarrier:
        return JobBarrier(self)


class JobBarrier(Barrier):
    """See its config."""

    def __init__(self, config: JobBarrierConfig) -> None:
        self._saves = config.storage.create_storage().saves

    def execute_barrier(self, timeout_secs: int) -> None:
        """Raises DeadlineExceededError, which names the ranks that did not come."""
        self._saves.barrier(timeout_secs)


def replicated(
    config: CheckpointManager.Config | None = None,
    storage: ReplicatorStorageConfig | None = None,
    *,
    await_copies: bool = True,
) -> CheckpointManager.Config:
    """The same config, with storage, callbacks and (for several ranks) a barrier that make its saves replicated.

    Args:
        storage: default: that of this process's session; every rank must call this then. Several ranks get a barrier
            when there is none.
        await_copies: a save's future is done when its files have their copies.

    Raises:
        ConfigError: a storage or callbacks are set already.
    """
    config = config or CheckpointManager.Config()
    if config.storage_config is not None or config.pre_finalize_callback or config.finalize_callback:
        raise ConfigError(
            "expected a config without storage_config, pre_finalize_callback and finalize_callback, which are what "
            "makes its saves replicated; call `AwaitBuddies` and `Commit` from callbacks of your own"
        )
    storage = storage or ReplicatorStorageConfig()
    writer = config.save.writer_config
    if storage.world_size > 1 and writer.barrier_config is None:
        barrier = JobBarrierConfig(writer.checkpoint_write_barrier_timeout_sec, storage)
        writer = replace(writer, barrier_config=barrier)
    return replace(
        config,
        save=replace(config.save, writer_config=writer),
        storage_config=storage,
        pre_finalize_callback=AwaitBuddies(storage, await_copies),
        finalize_callback=Commit(storage),
    )


def without_cuda(manager: CheckpointManager) -> CheckpointManager:
    """The same manager, able to reshard where there is no CUDA: metadata go through the process group as it is.

    `torch_checkpointing` gathers them in CUDA tensors alone. Nothing is changed where CUDA is there, or without a
    resharder.
    """
    metadata: Any = manager._metadata_manager
    if metadata is not None and not torch.cuda.is_available():
        metadata._all_gather_pickled_data = _gather
    return manager


def _gather(data: Any, process_group: Any = None) -> dict[int, Any]:
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, data, process_group)
    return dict(enumerate(gathered))


def load_latest(
    manager: CheckpointManager, into: Mapping[str, Any] | None = None, *, step: int | None = None, **options: Any
) -> tuple[int, Mapping[str, Any]] | None:
    """Load the newest step that can be recovered, or `step`: the same one on all ranks, all of which call this.

    Args:
        manager: made with `replicated`. options: of `CheckpointManager.load`.

    Returns:
        The step and what was loaded; None when there is nothing.

    Raises:
        The errors of `Session.lookup`, on all ranks.
    """
    config = manager._storage_config
    if not isinstance(config, ReplicatorStorageConfig):
        raise ConfigError(f"expected a manager made with `replicated`, found one on {type(config).__name__}")
    storage = config.create_storage()
    plan = config._session().lookup(step)
    if plan.step is None:
        return None
    with storage.catalogue.pinned(plan):
        return plan.step, manager.load(storage.layout.name_of(plan.step), into, **options)


def prune(storage: Storage, folder: str | Path, keep_latest: int, layout: Layout | None = None) -> list[Path]:
    """Directories of steps that may go, oldest first: all but the `keep_latest` newest steps.

    Any storage will do. Left-overs of unfinished saves (`tmp_step-N`, `step-N.partial`) of older steps are among them.
    """
    layout = layout or Layout()
    found = []
    for name in storage.ls(Path(folder)):
        step, temporary = layout.any_step_of(name)
        if step is not None:
            found.append((step, not temporary, name))
    committed = sorted(step for step, is_final, _ in found if is_final)
    if keep_latest < 1 or len(committed) <= keep_latest:
        return []
    oldest_kept = committed[-keep_latest]
    return [Path(folder) / name for step, _, name in sorted(found) if step < oldest_kept]
