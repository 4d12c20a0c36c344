"""Joining a job: alone and under torch.distributed, over restarts, and when something is wrong."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from job_support import Node, RankError, nodes, run_alone, run_job

import replicator
from replicator.client.session import Session, open_session
from replicator.errors import ConfigError, ForkedClientError, InvalidIdError, ReplicatorError, StaleEpochError
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation


def alone(node: Node, **settings: Any) -> Session:
    return replicator.init("job", root=node.root, deadline_s=node.deadline_s, **settings)


def test_alone_on_one_node(shm_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Works without replicas and says so once; each start of the job gets a greater epoch (F11)."""
    with nodes(shm_root, 1) as (node,), caplog.at_level(logging.WARNING, "replicator"):
        with alone(node) as session:
            assert (session.job, session.node.node_id) == ("job", "n0")
            assert [member.node_id for member in session.members] == ["n0"]
            first = session.epoch
            plan = session.lookup()
            assert not plan.found
            assert plan.step is None
            assert plan.reason
            with pytest.raises(replicator.ReplicatorError):
                plan.require()
            for impossible in (-1, 1 << 63):
                with pytest.raises(InvalidIdError, match="step must lie in"):
                    session.lookup(step=impossible)
        assert len([record for record in caplog.records if "replica" in record.message.lower()]) == 1
        with alone(node) as session:
            assert session.epoch == first + 1


def test_objects_commit_and_lookup(shm_root: Path) -> None:
    with nodes(shm_root, 1) as (node,), alone(node) as session:
        version = session.begin(CheckpointContainerId("job", 0))
        with session.create(version.object("data"), 5) as sink:
            sink.write(b"hello")
        assert session.replication.async_replicate(sink.info.object) == []
        futures = session.agent.commit(manifest(session, version, [sink.info]))
        assert futures.committed.result(10).version == version
        assert futures.protected.result(10).is_protected
        plan = session.lookup()
        assert plan.version == version
        assert plan.step == 0, "F14: step 0 is a step"
        assert [(source.name, source.size, source.crc32c) for source in plan.sources] == [("data", 5, sink.info.crc32c)]
        (retrieved,) = session.replication.sync_bulk_retrieve(plan)
        assert retrieved.was_local
        assert session.begin(CheckpointContainerId("job", 0)).generation > version.generation


def manifest(session: Session, version: Any, infos: Any) -> Any:
    from replicator.decide.types import Manifest, ManifestEntry

    entries = sorted(
        (ManifestEntry(info.object.name, info.size, info.crc32c, info.owner_node_id) for info in infos),
        key=lambda entry: entry.name,
    )
    return Manifest(version, session.epoch, session.node.node_id, session.replicas, 1, 0, tuple(entries))


def test_an_older_incarnation_is_refused(shm_root: Path) -> None:
    """F11: it gets a clear error from everything that matters."""
    with nodes(shm_root, 1) as (node,), alone(node) as old, alone(node) as new:
        version = new.begin(CheckpointContainerId("job", 1))
        with pytest.raises(StaleEpochError):
            old.lookup()
        with pytest.raises(StaleEpochError):
            old.begin(CheckpointContainerId("job", 1))
        with pytest.raises(StaleEpochError):
            old.create(version.object("data"), 10)
        with pytest.raises(StaleEpochError):
            old.replication.async_replicate(version.object("data"))


def test_a_block_that_raises_leaves_nothing(shm_root: Path) -> None:
    """F40: neither an object nor a reservation, and the name can be used again."""
    with nodes(shm_root, 1) as (node,), alone(node) as session:
        version = session.begin(CheckpointContainerId("job", 1))
        with pytest.raises(ZeroDivisionError), session.create(version.object("data"), 10) as sink:  # noqa: PT012
            sink.write(b"x")
            raise ZeroDivisionError
        with pytest.raises(ReplicatorError):
            session.replication.async_replicate(version.object("data"))
        with session.create(version.object("data"), 10) as sink:
            sink.write(b"y" * 100)
        assert sink.info.size == 100


def test_pickled_within_a_process(shm_root: Path) -> None:
    with nodes(shm_root, 1) as (node,), alone(node) as session:
        assert pickle.loads(pickle.dumps(session)) is session
        assert open_session() is session


def test_closed(shm_root: Path) -> None:
    with nodes(shm_root, 1) as (node,):
        session = alone(node)
        session.close()
        session.close()
        assert open_session() is None
        with pytest.raises(replicator.ReplicatorError, match="closed"):
            session.lookup()


def test_ranks_that_cannot_agree(shm_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="init_process_group"):
        replicator.init("job", root=shm_root / "n0")


def test_no_agent_and_none_to_be_started(shm_root: Path) -> None:
    with pytest.raises(replicator.ReplicatorError, match="no agent runs in"):
        replicator.init("job", root=shm_root, auto_start=False)


def who() -> tuple[str, int, str, list[str], bool]:
    with replicator.init() as session:
        plan = session.lookup()
        with pytest.raises(InvalidIdError):
            session.lookup(step=-1 if os.environ["RANK"] == "0" else None)
        return session.job, session.epoch, session.node.node_id, [one.node_id for one in session.members], plan.found


def test_four_ranks_on_two_nodes_without_configuration(shm_root: Path) -> None:
    """No agent runs beforehand: each node's first rank starts one. All ranks get the same epoch (F11), the one plan
    that one agent was asked for, and the same error where it cannot be asked (F09, F41)."""
    with nodes(shm_root, 2, start=False) as two:
        placement = [two[0], two[0], two[1], two[1]]
        first = run_job(placement, who)
        assert [(job, node, members, found) for job, _, node, members, found in first] == [
            ("job", node.node_id, ["n0", "n1"], False) for node in placement
        ]
        assert len({epoch for _, epoch, _, _, _ in first}) == 1
        assert [node.counter("lookups") for node in two] == [1, 0]
        again = run_job(placement, who)
        assert {epoch for _, epoch, _, _, _ in again} == {first[0][1] + 1}


def broken_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        os.environ["REPLICATOR_ROOT"] = "/proc/nothing"
    try:
        replicator.init()
    except ReplicatorError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_of_one_rank_is_everybodys(shm_root: Path) -> None:
    """F41: the same class and text on all ranks, and no rank hangs."""
    with nodes(shm_root, 1) as (node,):
        outcomes = set(run_job([node, node, node], broken_on_rank_1))
    (outcome,) = outcomes
    assert outcome.startswith("StoreRootError: rank 1: ")


def same_name() -> None:
    os.environ["REPLICATOR_NODE_ID"] = "same"
    replicator.init()


def test_two_nodes_of_one_name(shm_root: Path) -> None:
    with nodes(shm_root, 2, start=False) as two, pytest.raises(RankError, match="two agents call themselves 'same'"):
        run_job(two, same_name)


def forked() -> str:
    session = replicator.init()
    mine, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            session.lookup()
            answer = "no error"
        except ForkedClientError as error:
            answer = str(error)
        except BaseException as error:
            answer = repr(error)
        os.write(theirs, answer.encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    session.close()
    return os.read(mine, 4096).decode()


def test_used_in_a_forked_child(shm_root: Path) -> None:
    """F32"""
    with nodes(shm_root, 1) as (node,):
        assert "forked" in run_alone(node, forked)


def retrieve_by_name() -> tuple[list[bool], list[str], str]:
    """Rank 0 writes two objects and commits them; rank 2, on the third node, asks for them by name."""
    import torch.distributed as dist

    with replicator.init() as session:
        version, message = None, ""
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            version = session.begin(CheckpointContainerId("job", 1))
            infos = []
            for name in ("one", "two"):
                with session.create(version.object(name), 5_000_000) as sink:
                    sink.write(name.encode() * 1_500_000)
                infos.append(sink.info)
                for future in session.replication.async_replicate(sink.info.object):
                    assert future.result(20).crc32c == sink.info.crc32c
            session.agent.commit(manifest(session, version, infos)).committed.result(20)
            box = [version]
        dist.broadcast_object_list(box)
        version = box[0]
        progress: list[str] = []
        objects = [version.object("two"), version.object("one")]
        retrieved = session.replication.sync_bulk_retrieve(objects, on_progress=lambda name, _: progress.append(name))
        assert [one.object for one in retrieved] == objects
        try:
            session.replication.sync_bulk_retrieve([version.object("three")])
        except replicator.ReplicatorError as error:
            message = f"{type(error).__name__}: {error}"
        dist.barrier()
        return [one.was_local for one in retrieved], sorted(set(progress)), message


def test_bulk_retrieve(shm_root: Path) -> None:
    with nodes(shm_root, 3) as three:
        for rank, (was_local, progress, message) in enumerate(run_job(three, retrieve_by_name)):
            assert was_local == [rank == 0] * 2 or rank == 1
            assert progress == ["one", "two"]
            assert message.startswith("ObjectNotFoundError")
            assert "'three'" in message


def test_the_socket_of_an_agent_elsewhere(shm_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REPLICATOR_SOCKET: the operator's agent, which is not started when it is missing."""
    with nodes(shm_root, 1) as (node,):
        monkeypatch.setenv("REPLICATOR_SOCKET", str(node.root / "agent.sock"))
        with replicator.init("job") as session:
            assert session.node.node_id == "n0"
            assert session.agent.root == node.root
    monkeypatch.setenv("REPLICATOR_SOCKET", str(shm_root / "nowhere" / "agent.sock"))
    with pytest.raises(replicator.ReplicatorError, match="no agent runs in"):
        replicator.init("job")


def test_only_attempts_of_the_session_can_be_abandoned_also_without_an_agent(shm_root: Path) -> None:
    """One that the next agent would refuse must not keep every later save from beginning."""
    with nodes(shm_root, 1) as (node,), alone(node) as session:
        begun = session.begin(CheckpointContainerId("job", 1))
        foreign = ContainerVersion(CheckpointContainerId("other", 1), begun.generation)
        later = ContainerVersion(begun.container, make_generation(session.epoch + 1, 1))
        node.kill()
        for version in (foreign, later):
            with pytest.raises(InvalidIdError):
                session.abandon(version)
        node.start()
        assert session.begin(CheckpointContainerId("job", 2)).generation > begun.generation
