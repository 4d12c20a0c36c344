"""What surrounds a play on this machine: a directory in shared memory, and signals that leave nothing behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from replicator.errors import StoreRootError
from replicator.partial_dir import Terminated

SHM = Path("/dev/shm")
_LOCK = "driver.lock"
_KEPT = "kept"


@contextmanager
def workspace(prefix: str, needed_bytes: int, *, keep: bool) -> Iterator[Path]:
    """A new directory on the machine's shared memory, removed at the end unless it is to be kept.

    Leftovers of killed processes that used the same prefix go first.

    Args:
        prefix: of the directory's name: who works there.
        needed_bytes: fail at once when there is less room.

    Raises:
        StoreRootError: no shared memory, or too little of it.
    """
    who = prefix.removeprefix("replicator-").rstrip("-")
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        raise StoreRootError(f"the {who} needs a writable tmpfs at {SHM}; mount one: mount -t tmpfs tmpfs {SHM}")
    for old in SHM.glob(prefix + "*"):
        _remove_abandoned(old)
    free = shutil.disk_usage(SHM).free
    if free < needed_bytes:
        raise StoreRootError(
            f"the {who} needs {needed_bytes >> 20} MiB in {SHM}, found {free >> 20} MiB free; enlarge it "
            f"(mount -o remount,size=2G {SHM}; in a container: docker run --shm-size=2g)"
        )
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=SHM))
    with open(work / _LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield work
        finally:
            if keep:
                (work / _KEPT).touch()
            else:
                shutil.rmtree(work, ignore_errors=True)


def _remove_abandoned(work: Path) -> None:
    """Remove the directory of a driver that is gone, unless it was to be kept."""
    try:
        with open(work / _LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (work / _KEPT).exists():
                shutil.rmtree(work, ignore_errors=True)
    except OSError:
        return


@contextmanager
def raised_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, with Terminated, so that nothing is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_signals() -> Iterator[None]:
    """A second Ctrl-C waits until the processes that were started have been ended."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
