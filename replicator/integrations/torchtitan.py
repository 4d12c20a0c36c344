"""`torchtitan` (0.3.0) keeps its checkpoints in the memory of the nodes, through `torch_checkpointing`.

    torchrun ... -m torchtitan.train --module replicator.integrations.torchtitan --config llama3.llama3_debugmodel

runs torchtitan's own config of that name with this checkpoint manager. A config of your own gets it by `replicated`,
in the module that `--module` names. All of torchtitan's options under `--checkpoint.` mean what they mean there.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from replicator.integrations._needed import needed

with needed("torchtitan>=0.3.0"):
    from torchtitan.components.checkpointer.base import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        TRAIN_STATE,
        BaseCheckpointManager,
        ModelWrapper,
    )
    from torchtitan.components.checkpointer.dcp import CheckpointManager as DcpCheckpointManager
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem
    from torchtitan.tools.utils import GarbageCollection
with needed("torch_checkpointing==0.1.0"):
    from torch_checkpointing.checkpoint_manager import CheckpointManager as Backend
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.base_storage import Storage

from replicator.client.plan import Plan
from replicator.client.session import Session, init, open_session
from replicator.errors import ConfigError
from replicator.integrations._logical.backend import close_backend, item_specs, saver_config, storage_of
from replicator.integrations._logical.purging import Purger
from replicator.integrations.torch_checkpointing import ReplicatorStorageConfig, prune, without_cuda
from replicator.integrations.torch_checkpointing import replicated as replicated_backend

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

logger = logging.getLogger("replicator.integrations")

# The same on all ranks: rank 0 writes them, all read them. Beside them and model and optimizer, each rank has its own.
SHARED = (LR_SCHEDULER, TRAIN_STATE)


class ReplicatedCheckpointManager(BaseCheckpointManager):
    """torchtitan's checkpoint manager on the memory of the nodes. Made by its `Config`, after torch.distributed.

    A save that fails in the store or among the agents is logged, its step does not come to exist, and training and the
    next save go on. What a job resumes from is what all ranks find by one lookup: the newest step that is committed and
    recoverable.

    Attributes:
        save_future: of the asynchronous save under way, else None. session: of the job.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, and those of Replicator."""

        asynchronous: bool = True
        """Write in a process beside the trainer, from a copy that is made in host memory. The last step never is."""

        barrier: Literal["job", "none"] = "job"
        """Where ranks wait for each other's files: in the store of torch.distributed; "none" for a single rank."""

        barrier_timeout_s: int = 600
        """For ranks that wait for each other, and for staging and writing."""

        await_copies: bool = True
        """A save is done when its files have their copies on other nodes."""

        wait_for: Literal["seal", "commit", "protected"] = "commit"
        """What the end of a save waits for: see ReplicatorStorageConfig."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.last_save_in_hf:
                raise ConfigError(
                    "checkpoint.last_save_in_hf: a Hugging Face export is read from a directory on a disk, and this "
                    "manager saves into memory; export with torchtitan's scripts/checkpoint_conversion, or save the "
                    "last step with torchtitan's own CheckpointManager"
                )
            if self.barrier_timeout_s < 1:
                raise ConfigError(f"checkpoint.barrier_timeout_s: expected 1 or more, found {self.barrier_timeout_s}")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.save_future: Future[Any] | None = None
        self._config = config
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if config.barrier == "none" and world_size > 1 and not config.load_only:
            raise ConfigError(
                f"checkpoint.barrier: expected job, because {world_size} ranks save together, found none; without a "
                "barrier a step is committed before all ranks have written it"
            )
        self.folder = filesystem.join(base_folder, config.folder)
        self.states = states
        self.states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        self.sd_adapter = sd_adapter
        self.session: Session = open_session() or init()
        self._prewarmed = config.load_only or not config.asynchronous
        self._manager = self._backend(synchronous=config.load_only or not config.asynchronous)
        self._purger: Purger | None = None
        if config.keep_latest_k > 0 and self._rank == 0 and not config.load_only:
            self._purger = Purger(storage_of(self._manager), self._superseded)
        logger.info("checkpoints of job %s are saved as %s/step-N", self.session.job, self.folder)

    # -- what torchtitan calls

    def _load(self, step: int = -1) -> bool:
        """Raises FileNotFoundError, on all ranks, when `step` is asked for and cannot be recovered."""
        plan = self.session.lookup(None if step == -1 else step)
        if plan.step is not None:
            self._resume(plan)
            return True
        if step != -1:
            raise FileNotFoundError(f"--checkpoint.load_step={step} cannot be recovered: {plan.reason}")
        logger.info("there is no checkpoint to resume from: %s", plan.reason)
        return self._load_initial()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            self._prewarm()
            return False
        self.maybe_wait_for_saving()
        if last_step:
            self._save_last(curr_step)
            return True
        GarbageCollection.collect("GC collection invoked by checkpointer.")
        self._prewarmed = True
        self.save_future = self._manager.save(self._path(curr_step), self._payload())
        if self._purger is not None:
            self._purger.look()
        return True

    def _maybe_wait_for_staging(self) -> None:
        # Held for writing as long as the state is being copied.
        with self._manager.lock():
            pass

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        if future is None:
            return
        try:
            future.result(self._config.barrier_timeout_s)
        except BaseException:
            # Its saver does not work any more after a failure.
            self._replace_backend()
            raise

    def _close(self) -> None:
        manager: Backend | None = self.__dict__.pop("_manager", None)
        if manager is None:  # closed before, or never finished
            return
        try:
            if self.save_future is not None:
                self.save_future.result(self._config.barrier_timeout_s)
        except Exception as error:
            logger.error("the last asynchronous save failed: %s", error)
        finally:
            self.save_future = None
            if self._purger is not None:
                self._purger.close(self.session.deadline_s)
            close_backend(manager)

    def __del__(self) -> None:
        self.close()

    # -- saving

    def _should_save(self, step: int, last_step: bool) -> bool:
        config = self._config
        if config.load_only:
            return False
        if step == 1 and config.enable_first_step_checkpoint:
            return True
        return last_step or step % config.interval == 0

    def _prewarm(self) -> None:
        """Once, at a step with no save and before the first one: make the memory that saves are staged in."""
        if not self._prewarmed:
            self._prewarmed = True
            self._manager.prewarm_staging(self._payload())

    def _save_last(self, step: int) -> None:
        """Synchronously, and by a manager of its own: nothing of the asynchronous one must still be working then."""
        config = self._config
        model_only = config.last_save_model_only
        # The model alone does not take the place of what a job resumes from (F43). A seed, of step 0, is meant to be
        # begun with.
        fresh = self._backend(synchronous=True, resumable=not model_only or step == 0, name="torchtitan-last")
        try:
            if model_only:
                dtype = TORCH_DTYPE_MAP[config.export_dtype]
                payload = {MODEL: {key: _as(value, dtype) for key, value in self.states[MODEL].state_dict().items()}}
            else:
                payload = self._payload()
            fresh.save(self._path(step), payload)
        finally:
            close_backend(fresh)
        logger.info("saved %s at the last step, %d", "the model" if model_only else "everything", step)

    def _payload(self) -> dict[str, Any]:
        return {key: state.state_dict() for key, state in self._present() if self._rank == 0 or key not in SHARED}

    def _present(self) -> list[tuple[str, Any]]:
        return [(key, state) for key, state in self.states.items() if state is not None]

    def _path(self, step: int) -> str:
        return str(filesystem.join(self.folder, f"step-{step}"))

    def _superseded(self, storage: Storage) -> list[Path]:
        return prune(storage, self.folder, self._config.keep_latest_k)

    # -- loading

    def _resume(self, plan: Plan) -> None:
        files = {source.name for source in plan.sources}
        assert plan.step is not None
        wanted = dict(self._present())
        if plan.step == 0 or not any(name.startswith(f"{OPTIMIZER}_") for name in files):
            if plan.step:
                logger.warning("step %d has the model alone; optimizer and step begin anew", plan.step)
            wanted = {MODEL: self.states[MODEL]}
        for key in self._config.exclude_from_loading:
            if key not in self.states:
                raise ValueError(f"{key} not found in state_dict.")
            wanted.pop(key, None)
        into: dict[str, Any] = {}
        for key, state in wanted.items():
            if key in (MODEL, OPTIMIZER):
                into[key] = state.state_dict()
            elif key in SHARED or f"{key}_{self._rank}.pt" in files:
                into[key] = None
            else:
                logger.warning("rank %d has saved no %s at step %d, and begins it anew", self._rank, key, plan.step)
        # A manager of its own: what one has loaded it takes for all that will ever be saved.
        fresh = self._backend(synchronous=True)
        try:
            with storage_of(fresh).catalogue.pinned(plan), torch.no_grad():
                loaded = fresh.load(self._path(plan.step), into=into, map_location="cpu", strict=True)
        finally:
            close_backend(fresh)
        for key in into:
            wanted[key].load_state_dict(loaded[key])
        GarbageCollection.collect("GC collection for checkpoint loading.")
        logger.info("resumed from step %d: %s", plan.step, plan.reason)

    def _load_initial(self) -> bool:
        """From a directory on a disk, as torchtitan's own manager does it."""
        config = self._config
        path = config.initial_load_path
        if path is None and config.initial_load_in_hf and self.sd_adapter is not None:
            path = self.sd_adapter.hf_assets_path
        if path is None:
            return False
        if not filesystem.isdir(path):
            raise ValueError(f"checkpoint.initial_load_path: no directory {path}")
        states: dict[str, Any] = self.states[MODEL].state_dict()
        if not config.initial_load_model_only:
            skipped = {MODEL, *config.exclude_from_loading}
            states = {**{key: state for key, state in self._present() if key not in skipped}, **states}
        with torch.no_grad():
            DcpCheckpointManager.dcp_load(
                self, states, path, config.initial_load_in_hf, config.initial_load_in_hf_quantized
            )
        logger.info("began with the checkpoint in %s", path)
        return True

    # -- the backend

    def _backend(self, *, synchronous: bool, resumable: bool = True, name: str = "torchtitan") -> Backend:
        config = self._config
        timeout = config.barrier_timeout_s
        storage = ReplicatorStorageConfig(
            session=self.session, wait_for=config.wait_for, resumable=resumable, name=name, wait_s=timeout
        )
        save = saver_config(storage, timeout, synchronous=synchronous, barrier=not config.load_only)
        backend = Backend.Config(items=item_specs(SHARED), default=ItemSpec(), save=save)
        if config.load_only:
            backend = replace(backend, storage_config=storage)
        else:
            backend = replicated_backend(backend, storage, await_copies=config.await_copies)
        return without_cuda(Backend(backend))

    def _replace_backend(self) -> None:
        close_backend(self._manager)
        self._manager = self._backend(synchronous=not self._config.asynchronous)
        self._prewarmed = not self._config.asynchronous


def replicated(config: Trainer.Config, **options: Any) -> Trainer.Config:
    """The same trainer's config with this checkpoint manager, switched on, and its checkpoint options kept.

    Args:
        options: fields of `ReplicatedCheckpointManager.Config` that are to be different.

    Raises:
        ConfigError: an option of the config that this manager does not have.
    """
    kept = {field.name: getattr(config.checkpoint, field.name) for field in fields(BaseCheckpointManager.Config)}
    return replace(config, checkpoint=ReplicatedCheckpointManager.Config(**{**kept, "enable": True, **options}))


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """`llama3.llama3_debugmodel`: a config of torchtitan, or of the module before the last dot, with this manager."""
    module_name, _, function = name.rpartition(".")
    if not module_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for candidate in (
        f"torchtitan.models.{module_name}.config_registry",
        f"{module_name}.config_registry",
        module_name,
    ):
        try:
            module = importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name is not None and not f"{candidate}.".startswith(f"{error.name}."):
                raise
            continue
        make = getattr(module, function, None)
        if make is not None:
            return lambda: replicated(make())
    raise AttributeError(
        f"expected --config MODEL.FUNCTION, as in llama3.llama3_debugmodel, or MODULE.FUNCTION, found {name!r}"
    )


def _as(value: Any, dtype: torch.dtype) -> Any:
    is_other = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_other else value
