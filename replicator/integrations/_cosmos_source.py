"""Where a resume reads from: an iteration in the memory of the nodes, or a directory in durable storage.

All ranks get the same answer, or the same error (F09, F41).
"""

from __future__ import annotations

import io
import json
import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader

from replicator.checkpoint import ReplicatedStorageReader
from replicator.checkpoint.fetch import Fetcher
from replicator.checkpoint.names import METADATA_NAME
from replicator.client.plan import Plan
from replicator.client.session import AGREEMENT_DEADLINES, Session
from replicator.errors import ConfigError, InvalidIdError, NoRecoverableCheckpointError, NotFoundError, UnsupportedError
from replicator.ids import parse_step_name, validate_job
from replicator.integrations._cosmos_pointer import LATEST_NAME, iteration_name, parse_iteration
from replicator.integrations._cosmos_save import DATALOADER, PURPOSE

logger = logging.getLogger("replicator.integrations")

SCHEME = "replicator://"
_MODEL = "model"
_MAX_POINTER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LoadSource:
    """What is loaded.

    Attributes:
        name: for people. keys: what it has. warm_start: it is not this job's own.
        plan: when it is in memory; else it lies in `directory`.
        at_root: there are no keys in it: it is one checkpoint, with the model in it.
    """

    name: str
    keys: frozenset[str]
    warm_start: bool
    plan: Plan | None = None
    directory: Path | None = None
    at_root: bool = False

    def reader(self, session: Session, key: str) -> StorageReader:
        """Of the checkpoint under a key."""
        if self.plan is not None:
            return ReplicatedStorageReader(session, plan=self.plan, prefix="" if self.at_root else f"{key}/")
        assert self.directory is not None
        return FileSystemReader(self.directory if self.at_root else self.directory / key)

    def dataloader(self, session: Session, rank: int) -> Any:
        """What a rank saved of its data loader; None when it saved nothing."""
        if self.plan is not None:
            name = f"{DATALOADER}/rank_{rank}.pt"
            if all(source.name != name for source in self.plan.sources):
                return None
            with Fetcher(session, self.plan) as fetcher:
                return torch.load(io.BytesIO(fetcher.read_bytes(name)), weights_only=False)
        assert self.directory is not None
        path = self.directory / DATALOADER / f"rank_{rank}"
        if path.with_suffix(".pt").exists():
            return torch.load(path.with_suffix(".pt"), weights_only=False)
        if path.with_suffix(".pkl").exists():
            return pickle.loads(path.with_suffix(".pkl").read_bytes())
        return None


def own_source(session: Session, pointer: str, *, strict: bool) -> LoadSource | None:
    """The newest iteration of this job: what the agents offer or, when that is newer, what lies beside the pointer.

    Args:
        pointer: the path of latest_checkpoint.txt; empty when there is none.
        strict: an iteration that was committed once, of which nothing is left, is an error.

    Raises:
        NoRecoverableCheckpointError: it is, with the reason.
        StaleEpochError, AgentUnavailableError, DeadlineExceededError: as with `Session.lookup`.
    """
    plan = session.lookup()
    step = -1 if plan.step is None else plan.step
    if not pointer:
        return _in_memory(plan, warm_start=False) if plan.found else None
    named, keys = _agreed_pointer(session, Path(pointer))
    if named > step and keys:
        directory = Path(pointer).parent / iteration_name(named)
        logger.info("%s is newer than what the nodes have in memory: %s", directory, plan.reason)
        return LoadSource(str(directory), frozenset(keys), warm_start=False, directory=directory)
    if named > step:
        lost = f"{pointer} names {iteration_name(named)}, which was committed and cannot be recovered: {plan.reason}"
        if not plan.found and strict:
            raise NoRecoverableCheckpointError(
                f"{lost} Remove that file, or set strict_resume=False, to start from load_path or from scratch"
            )
        logger.warning("%s", lost)
    return _in_memory(plan, warm_start=False) if plan.found else None


def given_source(session: Session, load_path: str) -> LoadSource:
    """What `load_path` names: a directory, or `replicator://<job>` with or without a step.

    Raises:
        ConfigError, UnsupportedError: it cannot be read as either.
        NotFoundError: there is no checkpoint; with what was looked for.
        NoRecoverableCheckpointError: the job has none that could be restored, with the reason.
    """
    if load_path.startswith(SCHEME):
        job, step = parse_job_path(load_path)
        plan = session.lookup(step, job=job)
        plan.require()
        return _in_memory(plan, warm_start=True)
    if "://" in load_path:
        raise UnsupportedError(
            f"load_path: expected a directory or {SCHEME}<job>, found {load_path!r}; mount it, or copy it here"
        )
    if load_path.endswith(".pt"):
        raise ConfigError(
            f"load_path: expected the directory of a distributed checkpoint, found {load_path!r}; load a single file "
            "with torch.load"
        )
    directory, keys = _agreed_directory(session, Path(load_path))
    at_root = not keys
    return LoadSource(
        str(directory), frozenset(keys or [_MODEL]), warm_start=True, directory=directory, at_root=at_root
    )


def parse_job_path(text: str) -> tuple[str, int | None]:
    """(job, step or None) of `replicator://job`, `replicator://job/step-5` or `replicator://job/iter_000000005`.

    Raises:
        ConfigError: anything else.
    """
    job, _, name = text.removeprefix(SCHEME).strip("/").partition("/")
    try:
        validate_job(job)
        if not name:
            return job, None
        iteration = parse_iteration(name)
        return job, parse_step_name(name) if iteration is None else iteration
    except InvalidIdError as error:
        raise ConfigError(
            f"load_path: expected {SCHEME}<job>/step-<N> or {SCHEME}<job>, found {text!r}: {error}"
        ) from None


def _in_memory(plan: Plan, *, warm_start: bool) -> LoadSource:
    names = [source.name for source in plan.sources]
    keys = {name.removesuffix(f"/{METADATA_NAME}") for name in names if name.endswith(f"/{METADATA_NAME}")}
    if any(name.startswith(f"{DATALOADER}/") for name in names):
        keys.add(DATALOADER)
    at_root = warm_start and not keys and METADATA_NAME in names
    return LoadSource(
        f"{plan.container} ({iteration_name(plan.step or 0)})",
        frozenset({_MODEL} if at_root else keys),
        warm_start,
        plan=plan,
        at_root=at_root,
    )


def _agreed_pointer(session: Session, pointer: Path) -> tuple[int, list[str]]:
    """The iteration that the pointer names (-1: none), and the keys of its directory that every rank sees."""

    def look() -> bytes:
        named = _read_pointer(pointer)
        return json.dumps(
            [named, sorted(_keys_of(pointer.parent / iteration_name(named))) if named >= 0 else []]
        ).encode()

    def decide(answers: Sequence[bytes]) -> bytes:
        seen = [json.loads(answer) for answer in answers]
        named = max(one[0] for one in seen)
        everywhere = all(one == seen[0] for one in seen)
        return json.dumps([named, seen[0][1] if everywhere else []]).encode()

    deadline_s = AGREEMENT_DEADLINES * session.deadline_s
    found = session.ranks_for(PURPOSE).agree(f"what {pointer} names", look, decide, deadline_s)
    named, keys = json.loads(found)
    return named, keys


def _agreed_directory(session: Session, given: Path) -> tuple[Path, list[str]]:
    """Where the checkpoint lies, and its keys: none when it is one checkpoint with the model in it."""

    def look() -> bytes:
        pointers = [given / LATEST_NAME, given / "checkpoints" / LATEST_NAME]
        named = [path.parent / iteration_name(_read_pointer(path)) for path in pointers if _read_pointer(path) >= 0]
        for directory in (given, *named):
            if keys := _keys_of(directory):
                return json.dumps([str(directory), sorted(keys)]).encode()
        if (given / METADATA_NAME).exists():
            return json.dumps([str(given), []]).encode()
        raise NotFoundError(
            f"load_path: no checkpoint in {given}; expected {given}/{_MODEL}/{METADATA_NAME}, {given}/{METADATA_NAME}, "
            f"or a {LATEST_NAME} there that names an iteration with them"
        )

    def decide(answers: Sequence[bytes]) -> bytes:
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise ConfigError(
                    f"load_path: rank 0 sees {answers[0].decode()} and rank {rank} {answer.decode()}; it must be a "
                    "directory that all nodes share"
                )
        return answers[0]

    deadline_s = AGREEMENT_DEADLINES * session.deadline_s
    found = session.ranks_for(PURPOSE).agree(f"what is in {given}", look, decide, deadline_s)
    directory, keys = json.loads(found)
    return Path(directory), keys


def _read_pointer(path: Path) -> int:
    """The iteration that the file names; -1 for none."""
    try:
        with path.open() as stream:
            iteration = parse_iteration(stream.read(_MAX_POINTER_BYTES).strip())
    except (OSError, UnicodeDecodeError):
        return -1
    return -1 if iteration is None else iteration


def _keys_of(directory: Path) -> set[str]:
    try:
        names = [path.name for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return set()
    return {name for name in names if name == DATALOADER or (directory / name / METADATA_NAME).exists()}
