"""PyTorch Lightning saves into the memory of the nodes: a `CheckpointIO`, alone or under `AsyncCheckpointIO`.

For the packages `pytorch_lightning` and `lightning` alike. Lightning has rank 0 save and every rank load, so a
checkpoint is one object, written straight into memory with `torch.save`. Strategies that write sharded checkpoints do
so past every `CheckpointIO`: for them there is `replicator.commit_dir`.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from replicator.checkpoint.names import container_of
from replicator.checkpoint.plain_save import PlainSave
from replicator.client.outstanding import CommitFutures, CommitInfo
from replicator.client.plan import Plan
from replicator.client.session import Session, current_session, open_session
from replicator.errors import ConfigError, DeadlineExceededError, InvalidIdError, NotFoundError, ReplicatorError
from replicator.ids import CheckpointContainerId, validate_object_name

logger = logging.getLogger("replicator.integrations.lightning")

SCHEME = "replicator://"
_PLAIN_NAME = "checkpoint.ckpt"
_PURPOSE = "lightning"
_AGREEMENT_DEADLINES = 4
_WAIT_DEADLINES = 20
# Of everything in a checkpoint that is no tensor, and of the archive around tensors: a guess, the object grows.
_SPARE_BYTES = 1 << 20
_SPARE_PER_TENSOR = 1 << 10
_MAX_PATHS = 1024

if TYPE_CHECKING:
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO as _CheckpointIO
else:

    def _bases() -> tuple[type, ...]:
        """The interface of each of the two packages that is installed: each asks for its own."""
        found = []
        for package in ("lightning_fabric", "lightning.fabric"):
            if importlib.util.find_spec(package.partition(".")[0]) is not None:
                found.append(importlib.import_module(f"{package}.plugins.io.checkpoint_io").CheckpointIO)
        if not found:
            raise ModuleNotFoundError(
                "expected PyTorch Lightning, found neither lightning nor pytorch_lightning; "
                "pip install pytorch-lightning",
                name="pytorch_lightning",
            )
        return tuple(dict.fromkeys(found))

    _CheckpointIO = type("_CheckpointIO", _bases(), {})


def on_cpu(storage: Any, location: str) -> Any:
    """A `map_location`: the ranks of a node must not all load onto the device of the rank that saved."""
    return storage


class ReplicatorCheckpointIO(_CheckpointIO):
    """A plugin for `Trainer(plugins=...)`: checkpoints go into this node's memory and to its buddies.

    The session must exist on every rank before `Trainer.fit`, because only rank 0 saves: start the ranks with
    torchrun, and call `torch.distributed.init_process_group()` and `replicator.init()` first. A process that is alone
    needs neither.

    Args:
        session: from `replicator.init`; default: the open one of this process.
        durable_every: checkpoints whose global step is a multiple of it are also written as files, at the path that
            Lightning gives. 0: none.
        durable: what writes, reads and removes files; default: Lightning's `TorchCheckpointIO`.

    Attributes:
        committed, protected: of the last save, on rank 0; elsewhere None.
    """

    def __init__(
        self,
        session: Session | None = None,
        *,
        durable_every: int = 0,
        durable: _CheckpointIO | None = None,
    ) -> None:
        if durable_every < 0:
            raise ConfigError(f"durable_every: expected 0 or more steps, found {durable_every}")
        self._session = session
        self._durable_every = durable_every
        self._durable = durable
        self._plan: Plan | None = None
        self._steps: dict[str, int] = {}  # of the paths that were saved, on rank 0
        self.committed: Future[CommitInfo] | None = None
        self.protected: Future[CommitInfo] | None = None

    # -- CheckpointIO

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Returns when the checkpoint is in this node's memory; copies and the commit go on in the background.

        Raises:
            ConfigError: a checkpoint without a global step, or no session although there are other ranks.
            StoreFullError: no room in the memory of this node.
            StaleEpochError: a newer incarnation of the job exists.
        """
        step = checkpoint.get("global_step")
        if not isinstance(step, int):
            raise ConfigError(f"expected a checkpoint of a Trainer, with its global_step, found {step!r} in {path}")
        futures = self._commit(checkpoint, step, _object_name(path))
        self.committed, self.protected = futures.committed, futures.protected
        self._steps[os.fspath(path)] = step
        while len(self._steps) > _MAX_PATHS:
            del self._steps[next(iter(self._steps))]
        if self._durable_every and step % self._durable_every == 0:
            self.durable.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = on_cpu, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What `resume_path` named, what was saved under `path`, or the file there. Every rank must call it.

        On the CPU, as Lightning loads it, unless `map_location` says otherwise.

        Raises:
            FileNotFoundError, NoRecoverableCheckpointError: it is neither in the nodes' memory nor a file.
            ConfigError: the ranks asked for different checkpoints.
            CorruptObjectError: no holder has bytes that match their checksums.
        """
        text = os.fspath(path)
        step = self._step_of(text)
        if step is None:
            return self._load_file(path, map_location, weights_only)
        plan = self._plan if self._plan is not None and self._plan.step == step else self.session.lookup(step)
        if not plan.found and not text.startswith(SCHEME) and os.path.exists(path):
            return self._load_file(path, map_location, weights_only)
        return self._load(plan, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes the file, if one was written. What is in memory goes by the rules of retention."""
        if not os.fspath(path).startswith(SCHEME):
            self.durable.remove_checkpoint(path)

    # -- its own

    @property
    def session(self) -> Session:
        """The session it saves into. Raises the errors of `replicator.init` when it has to be made."""
        if self._session is None:
            self._session = current_session()
        return self._session

    @property
    def durable(self) -> _CheckpointIO:
        """What writes and reads files."""
        if self._durable is None:
            package = "lightning_fabric" if importlib.util.find_spec("lightning_fabric") else "lightning.fabric"
            self._durable = importlib.import_module(f"{package}.plugins.io.torch_io").TorchCheckpointIO()
        return self._durable

    def resume_path(self, step: int | None = None) -> str | None:
        """For `Trainer.fit(ckpt_path=...)`: the newest recoverable checkpoint (or only `step`), None when there is
        none. The same on all ranks; every rank must call it. Raises like `Session.lookup`."""
        self._plan = plan = self.session.lookup(step)
        logger.info("resume: %s", plan.reason)
        return f"{SCHEME}{plan.container}" if plan.found else None

    def wait_protected(self, deadline_s: float | None = None) -> None:
        """Until the loss of a node costs nothing of the last save; on ranks other than 0 at once.

        With `AsyncCheckpointIO`, after `Trainer.fit`, which ends when the last save has been made.

        Raises:
            ReplicationError, CommitError: a copy, or the commit, failed. DeadlineExceededError: it took longer.
        """
        if self.protected is None:
            return
        deadline = deadline_s or _WAIT_DEADLINES * self.session.deadline_s
        try:
            self.protected.result(deadline)
        except TimeoutError as error:
            if isinstance(error, ReplicatorError):
                raise
            raise DeadlineExceededError.of("the last save to be protected", "the agents of the job", deadline) from None

    def _commit(self, checkpoint: dict[str, Any], step: int, name: str) -> CommitFutures:
        session = self._session_of_all()
        if session.backpressure == "block":
            session.keep_pace(_WAIT_DEADLINES * session.deadline_s)
        attempt = PlainSave(session, session.begin(CheckpointContainerId(session.job, step), saver=self))
        try:
            entry = attempt.write(name, _size_of(checkpoint), lambda sink: torch.save(checkpoint, sink))  # type: ignore[arg-type]
            attempt.replicate([name])
            return attempt.commit([entry], 1)
        except BaseException:
            attempt.give_up()
            raise

    def _session_of_all(self) -> Session:
        if self._session is None and open_session() is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "expected a session on every rank, found none, and rank 0 alone cannot make one; call "
                "torch.distributed.init_process_group() and replicator.init() before Trainer.fit()"
            )
        return self.session

    def _step_of(self, path: str) -> int | None:
        """Of what is in memory; None for a file. The same on all ranks."""
        session = self.session if path.startswith(SCHEME) else self._session or open_session()
        if session is None:
            return None

        def decide(paths: Sequence[bytes]) -> bytes:
            # Only rank 0 saved, so only it knows what a path is.
            asked = [one.decode(errors="surrogateescape") for one in paths]
            steps = [self._step_known(one, session.job) for one in asked]
            for rank, step in enumerate(steps):
                if step != steps[0]:
                    raise ConfigError(
                        f"expected all ranks to load the same checkpoint, found {asked[0]!r} on rank 0 and "
                        f"{asked[rank]!r} on rank {rank}; give all of them one path, like that of resume_path()"
                    )
            return json.dumps(steps[0]).encode()

        answer = session.ranks_for(_PURPOSE).agree(
            f"what {path} is",
            lambda: path.encode(errors="surrogateescape"),
            decide,
            _AGREEMENT_DEADLINES * session.deadline_s,
        )
        step: int | None = json.loads(answer)
        return step

    def _step_known(self, path: str, job: str) -> int | None:
        """On rank 0. Raises InvalidIdError and ConfigError like `container_of`."""
        return container_of(path.removeprefix(SCHEME), job).step if path.startswith(SCHEME) else self._steps.get(path)

    def _load(self, plan: Plan, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
        from replicator.checkpoint.fetch import Fetcher

        version = plan.require()
        if len(plan.sources) != 1:
            raise NotFoundError(
                f"expected {version} to be a checkpoint of Lightning, which is one object, found {len(plan.sources)}; "
                "was it saved by something else under the same job?"
            )
        with Fetcher(self.session, plan) as fetcher:
            data = fetcher.read_bytes(plan.sources[0].name)
        loaded: dict[str, Any] = torch.load(io.BytesIO(data), map_location=map_location, weights_only=weights_only)
        return loaded

    def _load_file(self, path: str | Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
        return self.durable.load_checkpoint(path, map_location=map_location, weights_only=weights_only)


def _object_name(path: str | Path) -> str:
    """The file's own name where an object can have it."""
    try:
        return validate_object_name(os.path.basename(os.fspath(path)))
    except InvalidIdError:
        return _PLAIN_NAME


def _size_of(value: Any) -> int:
    """What `torch.save` will make of it, in bytes, roughly."""
    return _SPARE_BYTES + _tensor_bytes(value)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        # Sparse tensors do not say what they take.
        return _SPARE_PER_TENSOR + (value.nbytes if value.layout == torch.strided else 0)
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_tensor_bytes, value))
    return 0
