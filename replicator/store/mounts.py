"""What the machine gives a store: the file system under its root, and the memory that its cgroup may use."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from replicator.errors import StoreFullError

BUDGET_FRACTION = 0.9
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


def free_bytes(path: Path) -> int:
    """Bytes that may still be written to the file system of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


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


def settle_budget(asked: int, available: int, limit: int | None) -> tuple[int, str]:
    """(budget in bytes, warning or empty) of a store.

    Args:
        asked: the configured budget; 0: 90% of what there is.
        available: bytes free in the file system, those that the store uses already included.
        limit: of the cgroup, None when there is none. Beyond it, allocating is answered with SIGKILL.
    """
    most = int(BUDGET_FRACTION * (available if limit is None else min(available, limit)))
    if not asked:
        return most, ""
    if limit is not None and asked > limit:
        return most, (
            f"budget_bytes is {asked}, but this process may use {limit} bytes of memory (the limit of its cgroup) and "
            f"would be killed beyond them; the budget is {most} bytes instead. Raise the container's memory limit"
        )
    return asked, ""
