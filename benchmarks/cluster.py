"""Real agents on loopback: each one a process with its own store on the tmpfs, as on a node of its own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Settings

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0
# As the library starts an agent: memory of finished transfers is not given back page by page.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


@dataclass
class Agent:
    """A running agent. `record` is what it published about itself."""

    name: str
    root: Path
    process: subprocess.Popen[bytes]
    record: dict[str, Any]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """End it and remove its store."""
        self.process.terminate()
        try:
            self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def log(self) -> str:
        """The last lines of its output."""
        return "\n".join((self.root / "agent.log").read_text(errors="replace").splitlines()[-12:])


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the new process: the kernel ends it when the program dies, whatever it dies of."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def start_agents(count: int, settings: Settings, flags: Sequence[str] = (), prefix: str = "node") -> list[Agent]:
    """Start agents and wait until all are ready.

    Raises:
        RuntimeError: one ended or was not ready in time; with the end of its log.
    """
    base = Path(tempfile.mkdtemp(prefix="replicator-bench-", dir=settings.directory))
    agents: list[Agent] = []
    try:
        for index in range(count):
            root = base / f"{prefix}-{index}"
            root.mkdir(mode=0o700)
            command = [sys.executable, "-m", "replicator.agent", "--root", str(root), "--node-id", root.name]
            command += ["--bind", "127.0.0.1", "--connections-per-peer", str(settings.connections)]
            command += [
                "--log-level",
                "warning",
                *(("--congestion", settings.congestion) if settings.congestion else ()),
            ]
            with open(root / "agent.log", "ab") as output:
                process = subprocess.Popen(
                    [*command, *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=_end_with_parent,
                    env={**os.environ, **ENVIRONMENT},
                )
            agents.append(Agent(root.name, root, process, {}))
        end = time.monotonic() + START_DEADLINE_S
        for agent in agents:
            agent.record = _await_record(agent, end)
    except BaseException:
        stop_agents(agents)
        raise
    return agents


def stop_agents(agents: Sequence[Agent]) -> None:
    """End all of them, remove their stores and the directory above them."""
    for agent in agents:
        agent.process.terminate()
    for agent in agents:
        agent.stop()
    for parent in {agent.root.parent for agent in agents}:
        shutil.rmtree(parent, ignore_errors=True)


@contextmanager
def running_agents(count: int, settings: Settings, flags: Sequence[str] = ()) -> Iterator[list[Agent]]:
    agents = start_agents(count, settings, flags)
    try:
        yield agents
    finally:
        stop_agents(agents)


def _await_record(agent: Agent, end: float) -> dict[str, Any]:
    path = agent.root / "agent.json"
    while True:
        if agent.process.poll() is not None:
            raise RuntimeError(f"the agent {agent.name} ended with status {agent.process.returncode}: {agent.log()}")
        if path.exists():
            record: dict[str, Any] = json.loads(path.read_text())
            if record["pid"] == agent.pid:
                return record
        if time.monotonic() > end:
            raise RuntimeError(f"the agent {agent.name} was not ready within {START_DEADLINE_S:.0f} s: {agent.log()}")
        time.sleep(0.02)
