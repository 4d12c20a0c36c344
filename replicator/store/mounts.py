"""What the machine gives a store: the file system under its root, and the memory that its cgroup may use."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replicator.errors import ConfigError, StoreFullError

BUDGET_FRACTION = 0.9
OWN_BYTES = 128 << 20
"""What an agent needs for itself: it is charged to the same cgroup as what it stores."""
MIN_BYTES = 1 << 20
SMALL_BYTES = 256 << 20
"""A store that gets less, unasked, is most likely in a container with the default size of /dev/shm (F22)."""
# cgroup v1 says "unlimited" with a number near 2^63.
_UNLIMITED = 1 << 60


def filesystem_of(path: Path) -> tuple[str, str]:
    """(type, huge pages) of the file system that `path` is on, for instance `tmpfs` and `within_size`.

    The type is `unknown` when the kernel does not say; the second is empty when a file there gets no huge pages.
    """
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                words = after.split()
                huge = next((one for one in words[-1].split(",") if one.startswith("huge=")), "").removeprefix("huge=")
                return words[0], huge if huge in ("always", "within_size") else ""
    except (OSError, IndexError):
        pass
    return "unknown", ""


@dataclass(frozen=True, slots=True)
class Space:
    """Of a file system, in bytes. `available`: free, and what the store has there already."""

    total: int
    available: int


def space_of(path: Path, used: int) -> Space:
    """The space of the file system of `path`, of which the store uses `used` bytes."""
    found = os.statvfs(path)
    total = found.f_blocks * found.f_frsize
    return Space(total, min(found.f_bavail * found.f_frsize + used, total))


def free_bytes(path: Path) -> int:
    """Bytes that may still be written to the file system of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def has_free_files(path: Path) -> bool:
    """Whether the file system of `path` may have another file."""
    found = os.statvfs(path)
    return found.f_favail > 0 or found.f_files == 0


def is_full(error: OSError) -> bool:
    """Whether a file system had no room: for bytes, for files, or within a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def room_for(what: str, root: Path) -> Iterator[None]:
    """Raises StoreFullError, with numbers, when the file system turns out to be full within the block."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise StoreFullError(
            f"no room for {what}: the file system of {root} has {free_bytes(root)} bytes and "
            f"{os.statvfs(root).f_favail} files left; make it larger, keep fewer checkpoints, or remove other files"
        ) from None


def cgroup_limit(processes: Path = Path("/proc/self/cgroup"), top: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of memory that this process's cgroup may use (v1 or v2, the lowest on the way up); None: no limit."""
    limits = [limit for limit in map(_read_limit, _limit_files(processes, top)) if limit is not None]
    return min(limits, default=None)


def _limit_files(processes: Path, top: Path) -> list[Path]:
    try:
        lines = processes.read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted, name = top, "memory.max"
        elif "memory" in controllers.split(","):
            mounted, name = top / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that of the host, and only the top is there.
        here = mounted / path.lstrip("/")
        files += [directory / name for directory in (here, *here.parents) if directory.is_relative_to(mounted)]
    return files


def _read_limit(path: Path) -> int | None:
    try:
        limit = int(path.read_text())
    except (OSError, ValueError):
        return None
    return limit if limit < _UNLIMITED else None


def settle_budget(asked: int, space: Space, limit: int | None, root: Path) -> tuple[int, str]:
    """(budget in bytes, warning or empty) of a store.

    Args:
        asked: the configured budget; 0: 90% of what there is.
        space: of the file system.
        limit: of the cgroup, None when there is none. Beyond it, allocating is answered with SIGKILL.
        root: of the store, for messages.

    Raises:
        ConfigError: more was asked for than the whole file system has, or the cgroup leaves nothing beside the agent.
    """
    if asked > space.total:
        raise ConfigError(
            f"budget_bytes is {asked}, and the whole file system of {root} has {space.total} bytes; make it larger "
            "(mount -o remount,size=..., docker run --shm-size, or sizeLimit of a Kubernetes emptyDir), or ask for less"
        )
    most, why = int(BUDGET_FRACTION * space.available), ""
    if limit is not None:
        allowed = min(int(BUDGET_FRACTION * limit), limit - OWN_BYTES)
        if allowed < MIN_BYTES:
            raise ConfigError(
                f"this process may use {limit} bytes of memory (the limit of its cgroup), of which the agent itself "
                f"needs {OWN_BYTES}: nothing is left for checkpoints. Raise the container's memory limit"
            )
        if allowed < most:
            most = allowed
            why = (
                f"this process may use {limit} bytes of memory (the limit of its cgroup), what it stores included, and "
                "would be killed beyond them. Raise the container's memory limit"
            )
    if not why:
        why = (
            f"the file system of {root} has {space.total} bytes, of which others take {space.total - space.available}. "
            "Make it larger (in a container /dev/shm has 64 MB, unless docker run --shm-size or a Kubernetes emptyDir "
            "of medium Memory says otherwise), or remove other files"
        )
    if asked > most:
        return most, f"budget_bytes is {asked}; the budget is {most} bytes instead: {why}"
    if not asked and most < SMALL_BYTES:
        return most, f"the store has room for {most} bytes only: {why}"
    return asked or most, ""
