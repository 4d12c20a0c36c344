"""A lookup while an agent is away: it is waited for where it may have something newer, and never for long."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import Cluster, Rank, cluster

from replicator.decide.types import Manifest
from replicator.v1 import types_pb2
from replicator.wire import version_from_pb


class _Asking(threading.Thread):
    """A lookup under way."""

    def __init__(self, rank: Rank, deadline_s: float) -> None:
        super().__init__(daemon=True)
        self.rank, self.deadline_s = rank, deadline_s
        self.plan: types_pb2.Plan | None = None
        self.began = time.monotonic()
        self.start()

    def run(self) -> None:
        self.plan = self.rank.lookup(deadline_s=self.deadline_s)
        self.took_s = time.monotonic() - self.began

    def result(self) -> types_pb2.Plan:
        self.join(20)
        assert self.plan is not None
        return self.plan


def _save(made: Cluster, step: int, *, replicas: int) -> Manifest:
    """A protected container. Without replicas each object is on its owner only, and everybody has the manifest."""
    manifest = dataclasses.replace(made.save(step, replicate=replicas > 0), replicas=replicas)
    made.ranks[0].commit(manifest)
    made.ranks[0].protected(manifest.version)
    for node in made.nodes:
        wait_until(lambda node=node: manifest.version in node.protected(), "everybody knows")
    return manifest


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    path = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    try:
        with cluster(path, 3) as three:
            yield three
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def all_are_there(made: Cluster) -> None:
    assert made.nodes[2].agent is not None
    if made.nodes[2].agent.process.poll() is not None:
        made.nodes[2].start()
        made.ranks[2].attach()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same port", "other port"])
def test_an_agent_that_is_just_restarting_is_asked_again(made: Cluster, elsewhere: bool) -> None:
    """F09, F13: only its node has the objects of the newest step; all ranks get that step, well within the deadline."""
    made.new_job(replicas=0)
    newest = _save(made, 1, replicas=0)
    refused, again = (made.nodes[0].counter(name) for name in ("lookups_refused", "lookups_asked_again"))
    made.nodes[2].kill()
    asking = [_Asking(rank, 30.0) for rank in made.ranks[:2]]
    wait_until(lambda: made.nodes[0].counter("lookups_refused") > refused, "it refused")
    assert all(one.is_alive() for one in asking)
    made.nodes[2].start(*(("--port", str(_free_port())) if elsewhere else ()))
    plans = [one.result() for one in asking]
    assert [version_from_pb(plan.container) for plan in plans] == [newest.version] * 2
    assert not any(plan.unanswered for plan in plans)
    assert {plan.SerializeToString(deterministic=True) for plan in plans} == {
        plans[0].SerializeToString(deterministic=True)
    }
    assert made.nodes[0].counter("lookups_asked_again") == again + 1


def test_a_dead_agent_is_waited_for_only_where_that_may_help_and_never_long(made: Cluster) -> None:
    """F15, F19."""
    rank, node = made.ranks[0], made.nodes[0]
    old = _save(made.new_job(), 1, replicas=1)
    refused = node.counter("lookups_refused")
    made.nodes[2].kill()
    # Everything is on the two that are there.
    plan = rank.lookup(deadline_s=20.0)
    assert version_from_pb(plan.container) == old.version
    assert [one.node_id for one in plan.unanswered] == ["n2"]
    assert node.counter("lookups_refused") == refused + 1
    # The only copy of a newer one may be there: it is asked again, for half of the deadline.
    made.nodes[2].start()
    made.ranks[2].attach()
    made.join(2, replicas=0)
    newest = _save(made, 2, replicas=0)
    made.nodes[2].kill()
    asking = _Asking(rank, 2.0)
    plan = asking.result()
    assert version_from_pb(plan.container) == old.version
    assert version_from_pb(plan.rejected[0].container) == newest.version
    assert "times" in plan.unanswered[0].reason
    assert 0.3 < asking.took_s < 1.9
    # Once it is known to be dead, nobody waits for it.
    gone = (made.nodes[2].address.identity.incarnation, "dead")
    wait_until(
        lambda: gone in {(peer.node.identity.incarnation, peer.state) for peer in node.status().peers},
        "the node is dead for its peers",
    )
    refused = node.counter("lookups_refused")
    plan = rank.lookup(deadline_s=20.0)
    assert version_from_pb(plan.container) == old.version
    assert node.counter("lookups_refused") == refused + 1
