"""A checkpointer for trainers in the style of NVIDIA's Cosmos (imaginaire): `DistributedCheckpointer`.

It is called as theirs is: `load` once before the first step, `save` after some iterations, `finalize` at the end, with
the same configuration. An iteration is one container in the memory of the nodes, in which each key is a DCP checkpoint
of its own, and it is committed once, after all keys:

    <job>/step-5_ckpt     iter_000000005
        model/.metadata  model/__0_0.distcp ...  optim/...  scheduler/...  trainer/...
        dataloader/rank_0.pt ...                 what each rank's data loader says
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replicator.integrations._needed import needed

with needed("torch>=2.6"):
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from replicator.checkpoint.committing import WaitFor, check_options
from replicator.client.agreement import is_distributed
from replicator.client.session import AGREEMENT_DEADLINES, Session, current_session
from replicator.errors import ConfigError, NotFoundError, ReplicatorError, to_wire
from replicator.ids import validate_step
from replicator.integrations import _cosmos_state as states_of
from replicator.integrations._cosmos_agreement import all_succeeded, same_on_all
from replicator.integrations._cosmos_background import Background, Meeting, SaveDone, Terminate
from replicator.integrations._cosmos_config import AsyncMode, CheckpointConfig, checked_config
from replicator.integrations._cosmos_pointer import LATEST_NAME
from replicator.integrations._cosmos_save import DATALOADER, PURPOSE, IterationSaver, SaveOptions, typed_errors
from replicator.integrations._cosmos_source import LoadSource, given_source, own_source

__all__ = ["AsyncMode", "CheckpointConfig", "DistributedCheckpointer", "LoadSource", "SaveDone", "Terminate"]

logger = logging.getLogger("replicator.integrations")

_WAIT_DEADLINES = 20


class DistributedCheckpointer:
    """Every rank makes one, after `torch.distributed` is initialised, and all of them make the same calls.

    In asynchronous mode `save` copies the state into staging memory and returns; one background process for each rank
    saves it. The next `save` waits for it, and raises when it failed, on all ranks; the one after that works again.

    Args:
        config_checkpoint: see `CheckpointConfig`.
        config_job: its `path_local` says where `checkpoints/latest_checkpoint.txt` is written, by rank 0, when an
            iteration is committed; None: nowhere. What is resumed is what `session.lookup` says.
        callbacks: those of the trainer (`on_save_checkpoint_start` and so on); None: none.
        disable_async: save in the trainer, whatever the configuration says.
        session: from `replicator.init`; default: the session of this process, made when there is none.
        dataloader: with `state_dict()` and `load_state_dict()`, saved for each rank; default: the callback that has
            `checkpoint_component == "dataloader"`.
        process_group: for DCP in the trainer; default: all ranks. It must have those of the session.
        wait_for, thread_count: as for `ReplicatedStorageWriter`.
        wait_deadline_s: for a save in the background, and for `wait_for`; default: 20 times the session's deadline.

    Raises:
        ConfigError, UnsupportedError: settings that contradict each other, or that mean something this cannot do.
    """

    CHECKPOINT_KEYS: Sequence[str] = ("model", "optim", "scheduler", "trainer", DATALOADER)

    def __init__(
        self,
        config_checkpoint: Any,
        config_job: Any = None,
        callbacks: Any = None,
        disable_async: bool = False,
        *,
        session: Session | None = None,
        dataloader: Any = None,
        process_group: Any = None,
        wait_for: WaitFor = "seal",
        thread_count: int = 1,
        wait_deadline_s: float | None = None,
    ) -> None:
        self._config = checked_config(config_checkpoint, self.CHECKPOINT_KEYS)
        check_options(wait_for, wait_deadline_s, thread_count=thread_count)
        self.callbacks = callbacks
        self.session = session or current_session()
        self._ranks = self.session.ranks_for(PURPOSE)
        self._dataloader = dataloader
        self._process_group = process_group
        self._pointer = "" if config_job is None else str(Path(config_job.path_local) / "checkpoints" / LATEST_NAME)
        wait_s = wait_deadline_s or _WAIT_DEADLINES * self.session.deadline_s
        self._options = SaveOptions(wait_for, thread_count, wait_s, self._pointer)
        in_background = self._config.dcp_async_mode_enabled and not disable_async
        self.async_mode = AsyncMode.ASYNC_WITH_PINNED_MEM if in_background else AsyncMode.DISABLED
        self._finalized = False
        self._saver: IterationSaver | None = None
        self._background: Background | None = None
        self._meeting = Meeting(self.session)
        if in_background:
            # Now, so that it is ready when the first iteration is to be saved.
            self._background = Background(self.session, self._options, self._meeting.agree())
        else:
            self._saver = IterationSaver(self.session, self._options, process_group)

    @property
    def background_pid(self) -> int | None:
        """Of this rank's background process; None when there is none."""
        return None if self._background is None else self._background.pid

    # -- saving

    def save(self, model: Any, optimizer: Any, scheduler: Any, grad_scaler: Any, iteration: int) -> None:
        """Save all keys of an iteration; what is None has none.

        Raises:
            SaveFailedError: the asynchronous save before this one failed; this one was not begun.
            ConfigError: ranks that save different iterations or keys; with the rank.
            ReplicatorError: this one failed. On all ranks, and nothing of it is committed.
        """
        if self._finalized:
            raise ConfigError(f"save of iteration {iteration} after finalize(); make a new checkpointer")
        if self.async_mode != AsyncMode.DISABLED:
            self._settle_previous(go_on=True)
        self._call("on_save_checkpoint_start", model, iteration)
        started = time.monotonic()
        prepared: list[Any] = []

        def prepare() -> bytes:
            states = self._states(model, optimizer, scheduler, grad_scaler, validate_step(iteration))
            self._call("on_save_checkpoint", model, state_dict=states)
            keys = self._checked_keys(states)
            dataloader = states.pop(DATALOADER, None)
            kept = {key: states[key] for key in keys if key != DATALOADER}
            prepared.append(
                (kept, dataloader) if self._background is None else self._background.stage(kept, dataloader)
            )
            return json.dumps([iteration, list(kept)]).encode()

        self._ranks.agree(f"what iteration {iteration} has", prepare, same_on_all, self._patience_s)
        if self._background is not None:
            self._background.submit(iteration, prepared[0])
        else:
            assert self._saver is not None
            self._saver.save(iteration, *prepared[0])
            self._call("on_save_checkpoint_success", iteration=iteration, elapsed_time=time.monotonic() - started)
        self._call("on_save_checkpoint_end", model=None, iteration=iteration)

    def wait_for_save(self) -> None:
        """Wait for the asynchronous save that is under way, as the next `save` would. On all ranks together.

        Raises:
            SaveFailedError: it failed.
        """
        if self.async_mode != AsyncMode.DISABLED and not self._finalized:
            self._settle_previous(go_on=False)

    def finalize(self) -> None:
        """Wait for the last save, end the background process, and see the pointer written. Idempotent.

        Raises:
            SaveFailedError: the last asynchronous save failed.
        """
        if self._finalized:
            return
        self._finalized = True
        try:
            if self._background is not None:
                self._settle_previous(go_on=False)
        finally:
            if self._background is not None:
                self._background.close(2 * self.session.deadline_s)
                self._background = None
            if self._saver is not None:
                self._saver.settle(self.session.deadline_s)

    def _settle_previous(self, *, go_on: bool) -> None:
        """Wait for the asynchronous save before; it succeeded on all ranks, or all raise the same error."""
        results: list[SaveDone | None] = []

        def result() -> bytes:
            background = self._background
            error: ReplicatorError | None = None
            if background is not None:
                try:
                    results.append(background.result(self._options.wait_s))
                except ReplicatorError as failure:
                    error = failure
            alive = background is not None and background.alive
            return json.dumps([alive, to_wire(error) if error is not None else None]).encode()

        try:
            alive = json.loads(
                self._ranks.agree(
                    "the end of the save before", result, all_succeeded, self._options.wait_s + self._patience_s
                )
            )
        except BaseException:
            self._kill_background()  # those of a save that failed on one rank may wait for each other
            raise
        done = results[0] if results else None
        if done is not None:
            logger.info("iteration %d was saved in %.2f s", done.iteration, done.elapsed_time)
            self._call("on_save_checkpoint_success", iteration=done.iteration, elapsed_time=done.elapsed_time)
        if go_on and not alive:
            if self._background is not None:
                logger.warning("a background process has ended between two saves; all ranks start new ones")
            self._kill_background()
            self._background = Background(self.session, self._options, self._meeting.agree())

    def _kill_background(self) -> None:
        if self._background is not None:
            self._background.kill()
            self._background = None

    def _states(
        self, model: Any, optimizer: Any, scheduler: Any, grad_scaler: Any, iteration: int
    ) -> dict[str, dict[str, Any]]:
        states: dict[str, Any] = {"model": states_of.model_state(model)}
        if optimizer is not None:
            states["optim"] = states_of.optimizer_state(model, optimizer)
        if scheduler is not None:
            states["scheduler"] = scheduler.state_dict()
        states["trainer"] = states_of.trainer_state(iteration, grad_scaler, self._ranks.rank)
        dataloader = states_of.dataloader_of(self._dataloader, self.callbacks)
        if dataloader is not None:
            states[DATALOADER] = dataloader.state_dict()
        return states

    def _checked_keys(self, states: Mapping[str, Any]) -> list[str]:
        """The keys in their order."""
        for key, state in states.items():
            if key not in self.CHECKPOINT_KEYS:
                raise ConfigError(f"expected the keys {', '.join(self.CHECKPOINT_KEYS)}, found {key!r} to be saved")
            if key != DATALOADER and not isinstance(state, Mapping):
                raise ConfigError(f"key {key!r}: expected a state dict, found {type(state).__name__}")
        return [key for key in self.CHECKPOINT_KEYS if key in states]

    # -- loading

    def keys_to_resume_during_load(self) -> tuple[set[str], LoadSource | None]:
        """Which keys are loaded, and from where; None: nowhere, the training starts from scratch. On all ranks.

        Raises:
            NoRecoverableCheckpointError, NotFoundError: what there should be is not there; with the reason.
        """
        config = self._config
        source = own_source(self.session, self._pointer, strict=config.strict_resume)
        keys: set[str] = set()
        if source is not None:
            keys.update(self.CHECKPOINT_KEYS)
        elif config.load_path:
            source = given_source(self.session, config.load_path)
            keys.update(self.CHECKPOINT_KEYS if config.load_training_state else ("model",))
            if config.only_load_scheduler_state:
                keys.add("scheduler")
        return keys.difference(config.keys_not_to_resume), source

    def load(self, model: Any, optimizer: Any = None, scheduler: Any = None, grad_scaler: Any = None) -> int:
        """Load what is to be resumed; the iteration to go on from, 0 when the trainer's state was not loaded.

        Raises:
            NotFoundError: a key that is not there, with `strict_resume`.
            ConfigError: something to be loaded for which no object was given, or that does not match it.
            ReplicatorError: it cannot be had. On all ranks.
        """
        self._call("on_load_checkpoint_start", model)
        keys, source = self.keys_to_resume_during_load()
        iteration = 0
        if source is None:
            logger.info("nothing to resume; training starts from scratch")
        else:
            for key in self._present(keys, source, {"optim": optimizer, "scheduler": scheduler}):
                if key == "model":
                    self._load_model(source, model)
                elif key == "optim":
                    state = states_of.optimizer_state(model, optimizer)
                    wanted = self._not_skipped(source, state)
                    self._read(source, key, wanted)
                    states_of.load_optimizer(model, optimizer, {**state, **wanted})
                elif key == "scheduler":
                    state = scheduler.state_dict()
                    self._read(source, key, state)
                    scheduler.load_state_dict(state)
                elif key == "trainer":
                    iteration = self._load_trainer(source, grad_scaler)
                elif key == DATALOADER:
                    self._load_dataloader(source)
            self._call("on_load_checkpoint", model, state_dict={})
            logger.info("loaded %s, at iteration %d", source.name, iteration)
        self._call("on_load_checkpoint_end", model, iteration=iteration, checkpoint_path=source and source.name)
        return iteration

    def _present(self, keys: set[str], source: LoadSource, given: Mapping[str, Any]) -> list[str]:
        """The keys to load, in their order, before anything is changed."""
        present = []
        for key in (one for one in self.CHECKPOINT_KEYS if one in keys):
            is_given = key not in given or given[key] is not None
            if key in source.keys:
                if not is_given:
                    raise ConfigError(
                        f"key {key!r} is to be resumed from {source.name}, and load() was given None for it; give it, "
                        "or name it in keys_not_to_resume"
                    )
                present.append(key)
            elif key == DATALOADER or not is_given:
                logger.info("%s has no %s, and none is needed", source.name, key)
            elif self._config.strict_resume:
                raise NotFoundError(
                    f"{source.name} has no key {key!r}, it has {', '.join(sorted(source.keys)) or 'none'}; name it in "
                    "keys_not_to_resume, or set strict_resume=False"
                )
            else:
                logger.warning("%s has no key %r, which stays as it is", source.name, key)
        return present

    def _read(self, source: LoadSource, key: str, state: dict[str, Any]) -> None:
        """Fill a state dict in place."""
        hint = ". To load what matches and leave the rest as it is, set strict_resume=False"
        with typed_errors(
            f"cannot resume {key!r} from {source.name}", ConfigError, hint if self._config.strict_resume else ""
        ):
            dcp_load(
                state,
                storage_reader=source.reader(self.session, key),
                planner=DefaultLoadPlanner(allow_partial_load=not self._config.strict_resume),
                process_group=self._process_group,
                no_dist=not is_distributed(),
            )

    def _load_model(self, source: LoadSource, model: Any) -> None:
        state = states_of.model_state(model)
        wanted = self._not_skipped(source, state)
        if source.at_root and not any(name in self._names(source, "model") for name in wanted):
            # Saved with other things, as {"model": ...}.
            self._read(source, "model", {"model": wanted})
        else:
            self._read(source, "model", wanted)
        states_of.load_model(model, {**state, **wanted})

    def _load_trainer(self, source: LoadSource, grad_scaler: Any) -> int:
        rank = self._ranks.rank
        state = states_of.trainer_state(0, grad_scaler, rank)
        key = states_of.random_key(rank)
        # Of a rank that the job which saved did not have.
        if not any(name == key or name.startswith(f"{key}.") for name in self._names(source, "trainer")):
            del state[key]
        self._read(source, "trainer", state)
        if grad_scaler is not None:
            grad_scaler.load_state_dict(state["grad_scaler"])
        if key in state:
            states_of.set_random_state(state[key])
        return int(state["iteration"])

    def _load_dataloader(self, source: LoadSource) -> None:
        dataloader = states_of.dataloader_of(self._dataloader, self.callbacks)
        ranks = self._ranks

        def load() -> bytes:
            state = source.dataloader(self.session, ranks.rank)
            if dataloader is None or state is None:
                logger.info("the data loader of rank %d has no state in %s", ranks.rank, source.name)
            else:
                dataloader.load_state_dict(state)
            return b""

        ranks.agree("the state of every rank's data loader", load, lambda _: b"", self._patience_s)

    def _names(self, source: LoadSource, key: str) -> set[str]:
        """Of the tensors and values that are saved under the key."""
        names: set[str] = set()

        def read() -> bytes:
            with typed_errors(f"cannot resume {key!r} from {source.name}"):
                names.update(source.reader(self.session, key).read_metadata().state_dict_metadata)
            return b""

        self._ranks.agree(f"the names in {source.name}/{key}", read, lambda _: b"", self._patience_s)
        return names

    def _not_skipped(self, source: LoadSource, state: Mapping[str, Any]) -> dict[str, Any]:
        skipped = self._config.keys_to_skip_loading if source.warm_start else []
        return {name: value for name, value in state.items() if not any(part in name for part in skipped)}

    # -- parts

    @property
    def _patience_s(self) -> float:
        """For the slowest rank."""
        return AGREEMENT_DEADLINES * self.session.deadline_s

    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        callback = getattr(self.callbacks, name, None)
        if callback is not None:
            with torch.no_grad():
                callback(*args, **kwargs)
