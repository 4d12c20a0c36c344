"""Child processes: started so that they cannot outlive who started them, and killed by their ids."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent ends, however that ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def start(command: Sequence[str], log: Path, environ: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    """Start a child in its own session (a Ctrl-C of the terminal reaches the driver alone), output to `log`."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environ),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def descendants(pid: int) -> list[int]:
    """The ids of all processes below `pid`, nearest first. Gone ones are left out."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop(0)
        try:
            threads = list(Path(f"/proc/{parent}/task").iterdir())
            children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        except OSError:
            continue
        found += children
        waiting += children
    return found


def kill_now(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """SIGKILL these children and everything below them; the ids of what was killed.

    Each child is stopped first: it can then neither start a process that is missed nor collect one whose id
    would be given to somebody else.
    """
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        _signal(process.pid, signal.SIGSTOP)
    killed = [pid for process in alive for pid in (process.pid, *descendants(process.pid))]
    for pid in reversed(killed):
        _signal(pid, signal.SIGKILL)
    for process in alive:
        process.wait()
    return killed


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented, for an error message."""
    try:
        text = log.read_text(errors="replace").strip()
    except OSError as error:
        return f"  ({log}: {error.strerror})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
