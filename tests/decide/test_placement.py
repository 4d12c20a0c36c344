"""Placement of replicas for every size of cluster."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.decide.placement import buddies
from replicator.errors import ConfigError, NotFoundError


@pytest.mark.parametrize("replicas", range(5))
def test_every_cluster_size_is_placed_and_balanced(replicas: int) -> None:
    """Distinct others, all asked for (or all others), and nobody has to keep more than its share."""
    for size in range(1, 201):
        members = [f"node-{i}" for i in range(size)]
        kept = Counter[str]()
        pairs = {}
        for node in members:
            result = buddies(node, members, replicas)
            assert len(result.node_ids) == len(set(result.node_ids)) == min(replicas, size - 1)
            assert node not in result.node_ids
            assert set(result.node_ids) <= set(members)
            assert bool(result.note) == (replicas > size - 1)
            kept.update(result.node_ids)
            pairs[node] = set(result.node_ids)
        assert all(kept[node] == min(replicas, size - 1) for node in members)
        assert all(len(_group(node, pairs)) <= 2 * replicas + 1 for node in members)


def _group(node: str, pairs: dict[str, set[str]]) -> set[str]:
    """All nodes that hold something of each other, directly or through others."""
    group = {node}
    while True:
        wider = group.union(*(pairs[member] for member in group))
        if wider == group:
            return group
        group = wider


@given(
    st.lists(st.text("abcn0123456789-", min_size=1, max_size=6), min_size=1, max_size=30, unique=True),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_every_member_computes_the_same_answer(members: list[str], replicas: int, chance: random.Random) -> None:
    """Neither the order of the members nor repeated ones matter."""
    other = [*members, chance.choice(members)]
    chance.shuffle(other)
    for node in members:
        assert buddies(node, members, replicas) == buddies(node, other, replicas)


def test_odd_cluster_with_one_replica() -> None:
    """The odd node out joins the last pair, in a circle of three."""
    members = ["a", "b", "c", "d", "e"]
    placed = {node: buddies(node, members, 1).node_ids for node in members}
    assert placed == {"a": ("b",), "b": ("a",), "c": ("d",), "d": ("e",), "e": ("c",)}


def test_any_replicas_losses_leave_a_copy() -> None:
    """Loss of any R nodes leaves the owner or a buddy of every object."""
    for size, replicas in ((7, 2), (6, 1), (9, 3)):
        members = [f"n{i}" for i in range(size)]
        for lost in itertools.combinations(members, replicas):
            for owner in members:
                assert {owner, *buddies(owner, members, replicas).node_ids} - set(lost)


def test_single_node_works_and_says_what_it_cannot_promise() -> None:
    result = buddies("only", ["only"], 1)
    assert result.node_ids == ()
    assert "if this node is lost, its checkpoints in memory are lost too" in result.note
    assert buddies("only", ["only"], 0).note == ""


def test_too_few_nodes_take_all_others_and_say_so() -> None:
    result = buddies("b", ["a", "b", "c"], 4)
    assert result.node_ids == ("c", "a")
    assert result.note == (
        "The job has 3 nodes, too few for 4 replicas of every object beside the owner's: "
        "every object is copied to all 2 other nodes."
    )


def test_wrong_input() -> None:
    with pytest.raises(NotFoundError, match="node x is not among the 2 members"):
        buddies("x", ["a", "b"], 1)
    with pytest.raises(ConfigError, match="replicas: expected 0 or more, found -1"):
        buddies("a", ["a", "b"], -1)
