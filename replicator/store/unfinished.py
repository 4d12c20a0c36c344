"""Marks of saves that are being made: one small file per container and rank of this node.

A container without a commit is invisible to recovery whatever these files say. They are for people, and for the next
save: a mark that nobody took away names the rank that a save was lost with.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from replicator.errors import ConfigError, InvalidIdError
from replicator.ids import CheckpointContainerId, parse_step_name, validate_job
from replicator.small_json import parse_json
from replicator.store.mounts import room_for
from replicator.store.paths import StorePaths, read_small, write_atomic

_FILE = re.compile(r"(step-[0-9]+_ckpt)__([0-9]+)__unfinished")


@dataclass(frozen=True, slots=True)
class Writer:
    """The rank that a mark is of: its number in the job, its process, and the job's incarnation."""

    global_rank: int
    pid: int
    epoch: int


def mark(paths: StorePaths, container: CheckpointContainerId, local_rank: int, writer: Writer) -> None:
    """Say that a rank saves a container. Replaces its earlier mark of the same container.

    Raises:
        ConfigError: a local rank that cannot be one.
        StoreFullError: no room for the file.
    """
    path = _path(paths, container, local_rank)
    with room_for(f"the mark of {container}", paths.root):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(writer)).encode())


def unmark(paths: StorePaths, container: CheckpointContainerId, local_rank: int) -> bool:
    """Take a mark away; whether there was one."""
    try:
        _path(paths, container, local_rank).unlink()
    except FileNotFoundError:
        return False
    return True


def marks(paths: StorePaths, job: str) -> dict[tuple[CheckpointContainerId, int], Writer | None]:
    """The marks of a job on this node, by container and local rank; None for one that cannot be read."""
    try:
        names = sorted(path.name for path in (paths.unfinished / validate_job(job)).iterdir())
    except FileNotFoundError:
        return {}
    found: dict[tuple[CheckpointContainerId, int], Writer | None] = {}
    for name in names:
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        try:
            container = CheckpointContainerId(job, parse_step_name(match[1]))
        except InvalidIdError:
            continue
        writer = _read(paths, container, int(match[2]))
        if writer is not _GONE:
            found[container, int(match[2])] = writer
    return found


_GONE = Writer(-1, -1, -1)


def _read(paths: StorePaths, container: CheckpointContainerId, local_rank: int) -> Writer | None:
    try:
        fields = parse_json(read_small(_path(paths, container, local_rank)))
        return Writer(int(fields["global_rank"]), int(fields["pid"]), int(fields["epoch"]))
    except FileNotFoundError:
        return _GONE
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(paths: StorePaths, container: CheckpointContainerId, local_rank: int) -> Path:
    if isinstance(local_rank, bool) or not isinstance(local_rank, int) or not 0 <= local_rank < 1 << 20:
        raise ConfigError(f"expected a local rank from 0 on, found {local_rank!r}; see local_rank_getter")
    return paths.unfinished / container.job / f"{container.step_name}__{local_rank}__unfinished"
