"""Hugging Face: the checkpoints of `transformers.Trainer` and of Accelerate in the memory of the nodes.

Both write directories. `commit_dir` makes checkpoints of them, and a restart lays the newest one out again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicator.checkpoint.directory import DirectoryCommit, commit_dir
from replicator.checkpoint.layout import restore_dir
from replicator.client.session import Session, current_session
from replicator.errors import ReplicatorError, StaleEpochError, StoreError
from replicator.integrations._needed import not_there

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainerCallback as _TrainerCallback
    from transformers import TrainerControl, TrainerState, TrainingArguments
elif importlib.util.find_spec("transformers") is not None:
    from transformers import TrainerCallback as _TrainerCallback
else:

    class _TrainerCallback:
        """Accelerate alone: the rest of this file is there."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            raise not_there("transformers>=5.0")


logger = logging.getLogger("replicator.integrations.huggingface")

_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")
_STATE_FILE = "trainer_state.json"
# What the Trainer writes for the whole job, and with `save_on_each_node` once on each node, where it may differ: in who
# wrote it, in paths of that node, and in buffers that ranks have of their own. Rank 0's is what all would go on from.
_OF_THE_JOB = (
    _STATE_FILE,
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "model*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.*",
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "README.md",
)
_PURPOSE = "huggingface"
_AGREEMENT_DEADLINES = 4


class ReplicatorCallback(_TrainerCallback):
    """For `Trainer(callbacks=...)`: every checkpoint that the Trainer writes is committed as well.

    The Trainer's directories stay where they are; `save_total_limit` bounds them, and `output_dir` may be on a disk of
    the node. Trouble with a commit does not stop the training: it is logged, and the next save is tried again. Only a
    newer incarnation of the job (StaleEpochError) ends this one.

    Args:
        session: from `replicator.init`; default: the open one of this process, or a new one at the first save.

    Attributes:
        last_commit: of the last save that was committed. last_error: of the last save, None when it went well.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session
        self.last_commit: DirectoryCommit | None = None
        self.last_error: ReplicatorError | None = None

    @property
    def session(self) -> Session:
        """The session it commits into. Raises the errors of `replicator.init` when it has to be made."""
        if self._session is None:
            self._session = current_session()
        return self._session

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """On every rank, after the Trainer has written its part. Returns when the bytes are in this node's memory."""
        session = self.session
        path = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        try:
            self.last_commit = commit_dir(
                path if path.is_dir() else None,
                session.job,
                state.global_step,
                session=session,
                resumable=not args.save_only_model,
                of_rank_0=_OF_THE_JOB if args.save_on_each_node else (),
            )
            self.last_error = None
        except StaleEpochError:
            raise
        except ReplicatorError as error:
            self.last_error = error
            logger.warning("step %d is on disk only: %s", state.global_step, error)


def resume_from(output_dir: str | os.PathLike[str], session: Session | None = None) -> str | None:
    """For `Trainer.train(resume_from_checkpoint=...)`: the newest checkpoint, laid out in `output_dir`.

    The newest recoverable one in the nodes' memory becomes `checkpoint-<step>` there, in place of what has that name
    and another content. A complete one that lies there on every rank's disk and is newer is taken instead. The same on
    all ranks; every rank must call it.

    Returns:
        Its path, or None when there is none: the training begins at its start.

    Raises:
        StoreError: the directory cannot be written; StoreFullError when the disk is full.
        ReplicatorError: an object cannot be had, or another rank failed. On all ranks.
    """
    session = session or current_session()
    root = Path(output_dir)
    plan = session.lookup()
    on_disk = _common_step(root, session)
    if on_disk is not None and (plan.step is None or on_disk > plan.step):
        logger.info("step %d is taken from %s: in memory is %s", on_disk, root, plan.reason)
        return str(root / f"checkpoint-{on_disk}")
    if not plan.found:
        logger.info("nothing to resume from: %s", plan.reason)
        return None
    path = root / f"checkpoint-{plan.step}"
    restore_dir(path, session=session, plan=plan, replace=True)
    return str(path)


def _common_step(root: Path, session: Session) -> int | None:
    """The newest checkpoint that is complete on the disk of every rank."""

    def tell() -> bytes:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {root}: {error.strerror}; give another output_dir") from None
        found = [_CHECKPOINT.fullmatch(entry.name) for entry in root.iterdir()]
        # The Trainer writes the state file after everything else.
        steps = [int(one[1]) for one in found if one and (root / one[0] / _STATE_FILE).is_file()]
        return json.dumps(steps).encode()

    def decide(told: Sequence[bytes]) -> bytes:
        common = set.intersection(*(set(json.loads(one)) for one in told))
        return json.dumps(max(common, default=None)).encode()

    ranks = session.ranks_for(_PURPOSE)
    deadline_s = _AGREEMENT_DEADLINES * session.deadline_s
    step: int | None = json.loads(ranks.agree(f"the checkpoints in {root}", tell, decide, deadline_s))
    return step


def save_state(
    accelerator: Accelerator,
    step: int,
    *,
    session: Session | None = None,
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> DirectoryCommit:
    """`Accelerator.save_state` into the nodes' memory. Every rank must call it.

    Args:
        step: under which it is committed.
        session: default: the open one of this process, or a new one.
        directory: where Accelerate writes, and what it writes stays; default: a temporary directory of each rank.
        options: for `Accelerator.save_state`.

    Returns:
        The commit, whose `wait_protected` waits for copies. Raises like `commit_dir`.
    """
    session = session or current_session()
    with _directory(directory) as root:
        accelerator.save_state(str(root), **options)
        return commit_dir(root, session.job, step, session=session)


def load_state(
    accelerator: Accelerator,
    step: int | None = None,
    *,
    session: Session | None = None,
    **options: Any,
) -> int | None:
    """`Accelerator.load_state` of the newest recoverable checkpoint, or only of `step`. Every rank must call it.

    Args:
        session: default: the open one of this process, or a new one.
        options: for `Accelerator.load_state`.

    Returns:
        The step, or None when there is none: nothing was loaded then. Raises like `restore_dir`.
    """
    session = session or current_session()
    plan = session.lookup(step)
    if not plan.found:
        logger.info("nothing to load: %s", plan.reason)
        return None
    with _directory(None) as root:
        found = restore_dir(root / "state", session=session, plan=plan)
        accelerator.load_state(str(found.path), **options)
        return plan.step


@contextlib.contextmanager
def _directory(given: str | os.PathLike[str] | None) -> Iterator[Path]:
    """What was given, or a temporary directory that goes afterwards."""
    if given is not None:
        yield Path(given)
        return
    root = Path(tempfile.mkdtemp(prefix="replicator-state-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
