"""Niceness and CPUs of a real agent, of all its threads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from agent_harness import AgentProcess, running_agent


def test_all_threads_have_the_niceness_and_the_cpus(shm_root: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    wanted = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
    with running_agent(shm_root, "--nice", str(wanted), "--cpu-affinity", str(cpu)) as agent:
        threads = [int(entry.name) for entry in Path(f"/proc/{agent.process.pid}/task").iterdir()]
        assert len(threads) > 1
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                assert os.sched_getaffinity(thread) == {cpu}
                assert os.getpriority(os.PRIO_PROCESS, thread) == wanted


def test_cpus_that_are_not_there_end_the_agent(shm_root: Path) -> None:
    agent = AgentProcess(shm_root, "--cpu-affinity", "99999")
    try:
        assert agent.wait() == 2
    finally:
        agent.close()
    assert "cpu_affinity: this process cannot run on CPUs 99999" in "".join(agent.output)
