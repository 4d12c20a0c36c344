"""Placement of replicas for every size of cluster: complete, balanced, the same for everybody."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.decide.placement import BLOCKED, DEFAULT_STRATEGY, STRATEGIES, Placement, note, restore, strategy
from replicator.errors import ConfigError, NotFoundError
from replicator.ids import AgreedPlacement, Labels

Members = dict[str, Labels]
BUILT_IN = sorted(BLOCKED)


def unlabelled(size: int) -> Members:
    return {f"node-{i}": () for i in range(size)}


def place(members: Members, replicas: int, name: str = DEFAULT_STRATEGY) -> Placement:
    return strategy(name).arrange(members, replicas)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("replicas", range(5))
def test_every_cluster_size_is_placed_and_balanced(name: str, replicas: int) -> None:
    """Distinct others, all asked for (or all others), and every node keeps the copies of as many as keep its own."""
    for size in (*range(1, 34), 64, 97):
        members = unlabelled(size)
        placement = place(members, replicas, name)
        assert bool(note(placement, "node-0", members)) == (replicas > size - 1)
        kept = Counter[str]()
        for node in members:
            chosen = placement.buddies_of(node)
            assert len(chosen) == len(set(chosen)) == min(replicas, size - 1)
            assert node not in chosen
            assert set(chosen) <= set(members)
            kept.update(chosen)
        assert all(kept[node] == min(replicas, size - 1) for node in members)


def test_groups_are_small() -> None:
    """No group has more than twice the replicas and one, whatever is left over."""
    for size, replicas in itertools.product(range(1, 60), range(5)):
        groups = place(unlabelled(size), replicas).blocks
        assert sorted(node for group in groups for node in group) == sorted(unlabelled(size))
        assert all(len(group) <= 2 * replicas + 1 for group in groups)
        assert len(groups) == max(1, size // (replicas + 1))


def test_partners_are_mutual() -> None:
    for size, replicas in ((8, 1), (12, 2), (16, 3), (16, 5)):
        placement = place(unlabelled(size), replicas, "pairwise")
        for node, chosen in placement.buddies.items():
            assert all(node in placement.buddies_of(buddy) for buddy in chosen)


def test_a_ring_is_one_circle() -> None:
    placement = place(unlabelled(7), 1, "ring")
    seen = ["node-0"]
    while len(seen) < 7:
        (following,) = placement.buddies_of(seen[-1])
        assert following not in seen
        seen.append(following)
    assert placement.buddies_of(seen[-1]) == ("node-0",)


@settings(deadline=None)
@given(
    st.lists(st.text("abcn0123456789-", min_size=1, max_size=6), min_size=1, max_size=30, unique=True),
    st.integers(0, 4),
    st.sampled_from(BUILT_IN),
    st.randoms(use_true_random=False),
)
def test_every_member_computes_the_same_answer(
    nodes: list[str], replicas: int, name: str, chance: random.Random
) -> None:
    """The order of the members does not matter, nor whether the placement was computed or carried."""
    members: Members = {node: (("zone", node[0]), ("rack", node[-1])) for node in nodes}
    shuffled = list(members.items())
    chance.shuffle(shuffled)
    placement = place(members, replicas, name)
    assert place(dict(shuffled), replicas, name) == placement
    assert restore(placement.agreed, members, replicas) == placement


def test_nodes_that_are_left_over_make_a_circle_of_three() -> None:
    placed = place(dict.fromkeys("abcde", ()), 1).buddies
    assert placed == {"a": ("c",), "c": ("a",), "b": ("d",), "d": ("e",), "e": ("b",)}


@pytest.mark.parametrize("name", BUILT_IN)
def test_any_replicas_losses_leave_a_copy(name: str) -> None:
    """Loss of any R nodes leaves the owner or a buddy of every object."""
    for size, replicas in ((7, 2), (6, 1), (9, 3)):
        members = unlabelled(size)
        placement = place(members, replicas, name)
        for lost in itertools.combinations(members, replicas):
            for owner in members:
                assert {owner, *placement.buddies_of(owner)} - set(lost)


def test_single_node_works_and_says_what_it_cannot_promise() -> None:
    members: Members = {"only": ()}
    placement = place(members, 1)
    assert placement.buddies_of("only") == ()
    assert "if this node is lost, its checkpoints in memory are lost too" in note(placement, "only", members)
    assert note(place(members, 0), "only", members) == ""


def test_too_few_nodes_take_all_others_and_say_so() -> None:
    members: Members = {"a": (), "b": (), "c": ()}
    placement = place(members, 4)
    assert placement.buddies_of("b") == ("c", "a")
    assert note(placement, "b", members) == (
        "The job has 3 nodes, too few for 4 replicas of every object beside the owner's: "
        "every object is copied to all 2 other nodes."
    )


# -- explicit


def test_an_explicit_map_is_taken_as_it_is() -> None:
    """Of each list the first that are members: a list may name nodes to fall back on."""
    wanted = {"a": ["gone", "b", "c"], "b": ["a"], "c": ["a"], "spare": ["a"]}
    members: Members = {"a": (), "b": (), "c": ()}
    placement = strategy("explicit", wanted).arrange(members, 1)
    assert placement.buddies == {"a": ("b",), "b": ("a",), "c": ("a",)}
    assert restore(placement.agreed, members, 1) == placement
    assert note(placement, "b", members) == ("The map is uneven: node a keeps the copies of 2 nodes, 1 would do.")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"a": ["b"]}, "node b is a member of the job and has no buddies in it"),
        ({"a": ["a"], "b": ["a"]}, "expected other nodes as buddies of a, each once, found a"),
        ({"a": ["b", "b"], "b": ["a"]}, "each once, found b, b"),
        ({"a": ["x"], "b": ["a"]}, "expected at least 1 node of the job among the buddies of a, found 0 among x"),
    ],
)
def test_an_explicit_map_that_cannot_be_is_refused(wanted: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy("explicit", wanted).arrange({"a": (), "b": ()}, 1)


# -- wrong input


def test_wrong_input() -> None:
    with pytest.raises(NotFoundError, match="node x is not among the 2 members"):
        place({"a": (), "b": ()}, 1).buddies_of("x")
    for name in BUILT_IN:
        with pytest.raises(ConfigError, match="replicas: expected 0 or more, found -1"):
            place({"a": (), "b": ()}, -1, name)
    with pytest.raises(ConfigError, match="expected one of group, pairwise, ring, explicit, found 'star'"):
        strategy("star")
    with pytest.raises(ConfigError, match="'explicit' needs a placement_map"):
        strategy("explicit")
    with pytest.raises(ConfigError, match="placement_map is for placement = 'explicit', found 'ring'"):
        strategy("ring", {"a": ["b"]})
    assert set(STRATEGIES) == {*BUILT_IN, "explicit"}


@pytest.mark.parametrize("blocks", [(("a", "b"),), (("a", "b"), ("b", "c")), (("a", "b", "c", "d"),), ()])
def test_what_is_carried_is_of_the_members_or_refused(blocks: tuple[tuple[str, ...], ...]) -> None:
    with pytest.raises(ConfigError, match=r"every member of the job in one group, found otherwise for [abcd]"):
        restore(AgreedPlacement("group", blocks), {"a": (), "b": (), "c": ()}, 1)
