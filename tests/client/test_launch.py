"""An agent is found, or exactly one is started, detached; an agent that cannot start says why."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_support import nodes

from replicator.client.launch import START_LOCK, ensure_agent, find_agent, read_record
from replicator.errors import AgentUnavailableError, DeadlineExceededError, StoreRootError

PARALLEL = """
import sys
from replicator.client.launch import ensure_agent
print(ensure_agent(sys.argv[1], flags=["--node-id", "n0"]).pid)
"""


def test_racing_processes_start_exactly_one(shm_root: Path) -> None:
    root = shm_root / "n0"
    racers = [
        subprocess.Popen([sys.executable, "-c", PARALLEL, str(root)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        pids = {racer.communicate(timeout=60)[0].strip() for racer in racers}
        record = find_agent(root)
        assert record is not None
        assert pids == {str(record.pid)}
        assert (root / "agent.log").read_text().count("Traceback") == 0
    finally:
        for racer in racers:
            racer.kill()
        record = read_record(root)
        if record is not None:
            os.kill(record.pid, 15)


def test_detached_with_its_environment(shm_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the trainer, its signals and its terminal; settings in the environment reach it."""
    monkeypatch.setenv("REPLICATOR_KEEP_LAST", "3")
    with nodes(shm_root, 1, start=False) as (node,):
        record = node.start_detached()
        assert os.getsid(record.pid) == record.pid
        environment = Path(f"/proc/{record.pid}/environ").read_bytes().split(b"\0")
        assert b"REPLICATOR_KEEP_LAST=3" in environment
        assert b"MALLOC_MMAP_THRESHOLD_=1073741824" in environment
        assert b"MALLOC_TRIM_THRESHOLD_=8589934592" in environment
        assert str(Path(f"/proc/{record.pid}/fd/0").readlink()) == "/dev/null"
        for descriptor in (1, 2):
            assert Path(f"/proc/{record.pid}/fd/{descriptor}").readlink() == node.root / "agent.log"
        command = Path(f"/proc/{record.pid}/cmdline").read_bytes().split(b"\0")
        assert b"--idle-exit-s" in command


def test_a_dead_agents_record_is_not_an_agent(shm_root: Path) -> None:
    with nodes(shm_root, 1, start=False) as (node,):
        first = node.start_detached()
        node.kill()
        assert read_record(node.root) is not None
        assert find_agent(node.root) is None
        second = node.start_detached()
        assert second.pid != first.pid
        assert second.incarnation != first.incarnation


def test_an_agent_that_cannot_start_says_why(shm_root: Path) -> None:
    with pytest.raises(AgentUnavailableError, match=r"ended with status 2.*(?s:.*)insecure = true"):
        ensure_agent(shm_root / "n0", flags=["--bind", "192.0.2.1"], deadline_s=30)


def test_a_stuck_start_is_named(shm_root: Path) -> None:
    """F15: bounded, and says what it waited for."""
    descriptor = os.open(shm_root / START_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=START_LOCK):
            ensure_agent(shm_root, deadline_s=0.3)
        assert time.monotonic() - started < 5
    finally:
        os.close(descriptor)


def test_a_root_that_cannot_be_made() -> None:
    with pytest.raises(StoreRootError, match="can be written"):
        ensure_agent("/proc/nothing/here", deadline_s=5)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_broken_record(shm_root: Path, text: str) -> None:
    (shm_root / "agent.json").write_text(text)
    with pytest.raises(AgentUnavailableError, match="not an agent's record"):
        read_record(shm_root)
    assert find_agent(shm_root) is None
