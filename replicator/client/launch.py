"""Find the agent of this node, or start one.

A running agent publishes itself in `<root>/agent.json` and listens on the unix socket named there. Where nobody
runs one (zero configuration under torchrun), the first process that needs it starts it detached: own session,
output to `<root>/agent.log`. Racing ranks are put in a row by a lock file, so exactly one agent comes to life.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from replicator.errors import AgentUnavailableError, DeadlineExceededError, StoreRootError
from replicator.small_json import parse_json

AGENT_FILE = "agent.json"
LOG_FILE = "agent.log"
START_LOCK = "agent.start"
DEFAULT_IDLE_EXIT_S = 3600.0
"""An agent started on behalf of a job ends when no trainer was attached for this long."""
MAX_LOG_BYTES = 16 << 20
_SHOWN_LOG_LINES = 12
_POLL_S = 0.02

# glibc gives memory of finished transfers back page by page; the agent would fault it in again at once.
AGENT_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """What a running agent published about itself."""

    pid: int
    node_id: str
    incarnation: int
    socket: str
    grpc_address: str
    bulk_address: str
    version: str


def read_record(root: str | Path) -> AgentRecord | None:
    """The content of `<root>/agent.json`, or None where there is none (yet). Says nothing about life.

    Raises:
        AgentUnavailableError: it is something else.
    """
    try:
        raw = parse_json((Path(root) / AGENT_FILE).read_bytes())
        return AgentRecord(
            pid=int(raw["pid"]),
            node_id=str(raw["node_id"]),
            incarnation=int(raw["incarnation"]),
            socket=str(raw["socket"]),
            grpc_address=str(raw["grpc_address"]),
            bulk_address=str(raw["bulk_address"]),
            version=str(raw["version"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AgentUnavailableError(f"{Path(root) / AGENT_FILE} is not an agent's record: {error}") from None


def find_agent(root: str | Path) -> AgentRecord | None:
    """The agent that serves `root` now: published, and somebody accepts on its socket. Else None.

    What is no valid record counts as none: an agent that starts replaces it.
    """
    try:
        record = read_record(root)
    except AgentUnavailableError:
        return None
    return record if record is not None and _accepts(record.socket) else None


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def ensure_agent(
    root: str | Path,
    *,
    deadline_s: float = 30.0,
    idle_exit_s: float | None = None,
    flags: Sequence[str] = (),
) -> AgentRecord:
    """The agent of `root`, started when there is none.

    Args:
        root: directory of the store; created when missing.
        deadline_s: for all of it, the wait for another process that is starting one included.
        idle_exit_s: given to an agent started here; None: one hour, unless the environment says.
        flags: more arguments of `python -m replicator.agent`. REPLICATOR_* of the environment reach it anyway.

    Raises:
        AgentUnavailableError: it ended before it was ready; with the last lines of its log.
        DeadlineExceededError: it was not ready in time; with the same.
        StoreRootError: the root cannot be made.
    """
    deadline = time.monotonic() + deadline_s
    record = find_agent(root)
    if record is not None:
        return record
    root = Path(root)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreRootError(
            f"cannot make the store's root {root}: {error.strerror}; give a directory that can be written"
        ) from None
    with _start_lock(root, deadline, deadline_s):
        record = find_agent(root)
        if record is not None:
            return record
        log = root / LOG_FILE
        offset = _rotate(log)
        process = _spawn(root, log, idle_exit_s, flags)
        return _await_ready(root, process, log, offset, deadline, deadline_s)


@contextmanager
def _start_lock(root: Path, deadline: float, deadline_s: float) -> Iterator[None]:
    """Held by the one process that starts the agent of `root`. Goes away with the process."""
    try:
        descriptor = os.open(root / START_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreRootError(f"cannot write in the store's root {root}: {error.strerror}") from None
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceededError.of(
                        "the agent to start", f"the process that holds {root / START_LOCK}", deadline_s
                    ) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _rotate(log: Path) -> int:
    """Set a large log of earlier agents aside; the size of what stays."""
    try:
        size = log.stat().st_size
        if size <= MAX_LOG_BYTES:
            return size
        log.replace(log.with_suffix(".log.1"))
    except FileNotFoundError:
        pass
    return 0


def _spawn(root: Path, log: Path, idle_exit_s: float | None, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise AgentUnavailableError(
            f"no agent runs in {root}, and this process does not know its Python interpreter to start one; "
            "start replicator-agent beside the job"
        )
    if idle_exit_s is None and "REPLICATOR_IDLE_EXIT_S" not in os.environ:
        idle_exit_s = DEFAULT_IDLE_EXIT_S
    command = [sys.executable, "-m", "replicator.agent", "--root", str(root.resolve())]
    if idle_exit_s is not None:
        command += ["--idle-exit-s", str(idle_exit_s)]
    environment = {**AGENT_ENVIRONMENT, **os.environ}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )
    # Collects the exit status, whenever it comes: no zombie, and no warning when this process ends first.
    threading.Thread(target=process.wait, name="replicator-agent-reaper", daemon=True).start()
    return process


def _await_ready(
    root: Path, process: subprocess.Popen[bytes], log: Path, offset: int, deadline: float, deadline_s: float
) -> AgentRecord:
    while True:
        # Asked before the record is read: an agent that ended after it found another one is not an error.
        ended = process.poll()
        record = find_agent(root)
        if record is not None:
            return record
        if ended is not None:
            raise AgentUnavailableError(
                f"the agent for {root} ended with status {ended} before it was ready{_tail(log, offset)}"
            )
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                f"waited {deadline_s:.1f} s for the agent (pid {process.pid}) of {root} to be ready, "
                f"in vain{_tail(log, offset)}"
            )
        time.sleep(_POLL_S)


def _tail(log: Path, offset: int) -> str:
    """The last lines that this start wrote, as the end of an error message."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(offset, log.stat().st_size - 8192))
            lines = stream.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LOG_LINES:]
    except OSError:
        lines = []
    return f"; last lines of {log}:\n  " + "\n  ".join(lines) if lines else f"; it wrote nothing to {log}"
