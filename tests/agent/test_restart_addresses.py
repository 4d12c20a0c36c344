"""Agents that start again: where they are reached then, and how others hear of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import Cluster, Node, cluster

from replicator.agent.published import LAST, RECORD, last_address


def members_seen_by(node: Node) -> set[str]:
    (job,) = node.status().jobs
    return {member.grpc_address for member in job.members}


def alive_seen_by(node: Node) -> set[str]:
    return {peer.node.grpc_address for peer in node.status().peers if peer.state == "alive"}


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_an_agent_takes_the_port_that_it_had(shm_root: Path, killed: bool) -> None:
    """F34: whoever knew its address need not learn another one."""
    node = Node("n0", shm_root / "n0").start()
    try:
        before = node.address
        assert node.agent is not None
        if killed:
            node.kill()
        else:
            assert node.agent.terminate() == 0
            assert not (node.root / RECORD).exists()
            node.agent.close()
        node.start()
        assert node.address.grpc_address == before.grpc_address
        assert node.address.identity != before.identity
    finally:
        node.kill()


def test_a_port_that_somebody_else_has_is_left_to_them(shm_root: Path) -> None:
    """F35: the port is bound or it is not; nobody looks first whether it is free."""
    node = Node("n0", shm_root / "n0").start()
    try:
        before = node.address.grpc_address
        node.kill()
        node.start_elsewhere()
        assert node.address.grpc_address != before
    finally:
        node.kill()


def test_only_the_same_nodes_record_counts(tmp_path: Path) -> None:
    assert last_address(tmp_path, "n0") == ("", 0)
    for content in ("", "[]", "5", '{"node_id": "n0"}', '{"node_id": "n0", "grpc_address": "nowhere"}'):
        (tmp_path / RECORD).write_text(content)
        assert last_address(tmp_path, "n0") == ("", 0)
    (tmp_path / LAST).write_text('{"node_id": "n0", "grpc_address": "127.0.0.1:77"}')
    assert last_address(tmp_path, "n0") == ("127.0.0.1", 77)
    assert last_address(tmp_path, "n1") == ("", 0)


def test_agents_that_all_restart_at_once_find_each_other_again(own_three: Cluster) -> None:
    """F34, F19: nobody is left who could tell them where the others are."""
    for node in own_three.nodes:
        node.kill()
    for node in own_three.nodes:
        node.launch()
    for node in own_three.nodes:
        node.ready()
    for node in own_three.nodes:
        others = {other.address.grpc_address for other in own_three.nodes if other is not node}
        wait_until(lambda: alive_seen_by(node) == others, "all see all", 20)  # noqa: B023
        assert members_seen_by(node) == others | {node.address.grpc_address}


def test_who_joins_again_tells_where_the_others_are_now(shm_root: Path) -> None:
    """F34: both agents come back on new ports within one epoch, and only the ranks know."""
    with cluster(shm_root, 2) as made:
        made.join()
        n0, n1 = made.nodes
        n0.kill()
        n1.kill()
        n0.start_elsewhere()
        n1.start_elsewhere()
        rank = made.ranks[0]
        rank.attach()
        assert rank.join(1, made.nodes) == ("n1",)
        wait_until(lambda: n1.address.grpc_address in members_seen_by(n0), "n0 asked n1 where it is said to be")
        wait_until(lambda: n0.address.grpc_address in members_seen_by(n1), "and n1 heard of n0 by that")
