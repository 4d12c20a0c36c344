"""The agent is killed under a running trainer: saves go on, and the next agent is told of everything."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from job_support import Job, nodes, run_job, wait_until

import replicator
from replicator.client.session import Session
from replicator.decide.types import Manifest, ManifestEntry
from replicator.errors import AgentUnavailableError
from replicator.ids import CheckpointContainerId, ContainerVersion


def write(session: Session, version: ContainerVersion, name: str, data: bytes) -> ManifestEntry:
    with session.create(version.object(name), len(data)) as sink:
        sink.write(data)
    return ManifestEntry(name, sink.info.size, sink.info.crc32c, sink.info.owner_node_id)


def manifest_of(session: Session, version: ContainerVersion, *entries: ManifestEntry) -> Manifest:
    node_id = session.node.node_id
    return Manifest(
        version, session.epoch, node_id, session.replicas, 1, 0, tuple(sorted(entries, key=lambda e: e.name))
    )


def save_over_the_loss(signs: str) -> list[str]:
    """Rank 0 begins an object with one agent, ends it with none, and commits; the next agent finishes it all."""
    import torch.distributed as dist

    session = replicator.init(auto_start=False)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.barrier()
        return []
    version = session.begin(CheckpointContainerId("job", 1))
    with session.create(version.object("before"), 10) as sink:
        sink.write(b"0123456789")
        Path(signs + "-kill").touch()
        wait_until(lambda: not session.agent.connected, 20)
    before = ManifestEntry("before", sink.info.size, sink.info.crc32c, sink.info.owner_node_id)
    during = write(session, version, "during", b"x" * 5_000_000)
    futures = [
        *session.replication.async_replicate(version.object("before")),
        *session.replication.async_replicate(version.object("during")),
    ]
    assert len(futures) == 2
    commit = session.agent.commit(manifest_of(session, version, before, during))
    second = session.begin(CheckpointContainerId("job", 2))
    assert second.generation > version.generation
    with pytest.raises(AgentUnavailableError):
        session.agent.wait_connected(0.1)
    assert not any(future.done() for future in [*futures, commit.committed])
    Path(signs + "-restart").touch()
    buddies = [future.result(30).buddy_node_id for future in futures]
    assert commit.protected.result(30).is_protected
    assert session.agent.node.identity.node_id == "n0"
    third = session.begin(CheckpointContainerId("job", 3))
    assert third.generation > second.generation
    # The lookup of all ranks is not needed here: one agent is asked.
    dist.barrier()
    session.close()
    return buddies


def step_found() -> int | None:
    with replicator.init() as session:
        return session.lookup().step


def test_a_save_goes_on_without_the_agent(shm_root: Path) -> None:
    with nodes(shm_root, 2) as two:
        signs = str(shm_root / "signs")
        job = Job(two, save_over_the_loss, signs)
        try:
            wait_until(Path(signs + "-kill").exists, 30)
            two[0].kill()
            wait_until(Path(signs + "-restart").exists, 30)
            two[0].start()
            assert job.results()[0] == ["n1", "n1"]
        finally:
            job.kill()
        assert run_job(two, step_found) == [1, 1]


def wait_for_a_new_agent(signs: str) -> tuple[bool, int | None]:
    session = replicator.init()
    first = session.node.identity.incarnation
    Path(signs + "-kill").touch()
    wait_until(lambda: not session.agent.connected, 20)
    version = session.begin(CheckpointContainerId("job", 4))
    entry = write(session, version, "alone", b"abc")
    commit = session.agent.commit(manifest_of(session, version, entry))
    commit.committed.result(30)
    changed: Any = session.node.identity.incarnation != first
    step = session.lookup().step
    session.close()
    return changed, step


def test_an_agent_of_the_library_is_started_again(shm_root: Path) -> None:
    """Zero configuration: nobody else would."""
    with nodes(shm_root, 1, start=False) as (node,):
        signs = str(shm_root / "signs")
        job = Job([node], wait_for_a_new_agent, signs)
        try:
            wait_until(Path(signs + "-kill").exists, 30)
            node.kill()
            assert job.results() == [(True, 4)]
        finally:
            job.kill()


def save_with_a_silent_agent(signs: str) -> tuple[bool, bool]:
    """(whether the object was there in time while the agent was silent, whether the next agent call worked)."""
    from replicator.store.reader import open_object

    session = replicator.init(auto_start=False)
    version = session.begin(CheckpointContainerId("job", 1))
    Path(signs + "-stop").touch()
    wait_until(Path(signs + "-stopped").exists, 30)
    began = time.monotonic()
    entry = write(session, version, "alone", b"abc")
    with open_object(session.agent.paths, version.object("alone")) as held:
        there = bytes(held.view) == b"abc" and time.monotonic() - began < 3.0
    commit = session.agent.commit(manifest_of(session, version, entry))
    Path(signs + "-continue").touch()
    good = commit.committed.result(30).version == version
    session.close()
    return there, good


def test_a_silent_agent_does_not_stop_a_save(shm_root: Path) -> None:
    """F15, F16: it is stopped, not dead: it accepts and never answers. One short deadline, and the save goes on."""
    with nodes(shm_root, 1, deadline_s=3.0) as (node,):
        record = node.start()
        signs = str(shm_root / "signs")
        job = Job([node], save_with_a_silent_agent, signs)
        try:
            wait_until(Path(signs + "-stop").exists, 30)
            os.kill(record.pid, signal.SIGSTOP)
            Path(signs + "-stopped").touch()
            wait_until(Path(signs + "-continue").exists, 60)
            os.kill(record.pid, signal.SIGCONT)
            assert job.results() == [(True, True)]
        finally:
            os.kill(record.pid, signal.SIGCONT)
            job.kill()


def ask_without_an_agent(signs: str) -> tuple[list[str], int | None]:
    """What every future raised; and the step that the next agent finds committed all the same."""
    session = replicator.init(auto_start=False)
    version = session.begin(CheckpointContainerId("job", 1))
    early = write(session, version, "early", b"abc")
    Path(signs + "-kill").touch()
    wait_until(lambda: not session.agent.connected, 20)
    late = write(session, version, "late", b"abcd")
    futures = session.replication.async_replicate(version.object("early"))
    commit = session.agent.commit(manifest_of(session, version, early, late))
    raised = []
    for future in [*futures, commit.committed, commit.protected]:
        error = future.exception(20)
        assert str(session.agent.root) in str(error)
        raised.append(type(error).__name__)
    Path(signs + "-restart").touch()
    wait_until(lambda: session.agent.connected and session.lookup().found, 30)
    step = session.lookup().step
    session.close()
    return raised, step


def test_futures_do_not_wait_for_ever_for_an_agent(shm_root: Path) -> None:
    """F15: nobody starts an agent again. What was asked for fails by the deadline; the commit is not forgotten."""
    with nodes(shm_root, 1, deadline_s=2.0) as (node,):
        signs = str(shm_root / "signs")
        job = Job([node], ask_without_an_agent, signs)
        try:
            wait_until(Path(signs + "-kill").exists, 30)
            node.kill()
            wait_until(Path(signs + "-restart").exists, 60)
            node.start()
            assert job.results() == [(["AgentUnavailableError"] * 2, 1)]
        finally:
            job.kill()
