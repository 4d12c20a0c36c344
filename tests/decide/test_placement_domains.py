"""Placement over failure domains and over time: spread as far as labels allow, and little moves when nodes change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replicator.decide.domains import Domains
from replicator.decide.placement import BLOCKED, Placement, note, strategy
from replicator.errors import ConfigError
from replicator.ids import Labels

Members = dict[str, Labels]
LEVELS = ("zone", "rack", "slice")


@st.composite
def clusters(draw: st.DrawFn, most: int = 40) -> Members:
    """Nodes with up to three levels of labels; domains are of any size, and some labels may be missing."""
    levels = LEVELS[: draw(st.integers(0, 3))]
    width = draw(st.integers(1, 5))
    value = st.integers(0, width).map(lambda number: f"v{number}" if number else "")
    rows = draw(st.lists(st.tuples(*(value for _ in levels)), min_size=1, max_size=most))
    return {
        f"n{i:02}": tuple((level, one) for level, one in zip(levels, row, strict=True) if one)
        for i, row in enumerate(rows)
    }


def zones(*sizes: int) -> Members:
    return {
        f"{'abcdefgh'[zone]}{i}": (("zone", "abcdefgh"[zone]),) for zone, size in enumerate(sizes) for i in range(size)
    }


def shares(members: Members, placement: Placement) -> dict[tuple[str, ...], int]:
    """For each domain of every level, the most nodes of it in one group."""
    paths = Domains(members).paths
    most: Counter[tuple[str, ...]] = Counter()
    for block in placement.blocks:
        found = Counter(paths[node][:depth] for node in block for depth in range(1, len(paths[node]) + 1))
        for domain, number in found.items():
            most[domain] = max(most[domain], number)
    return most


def sizes(members: Members) -> Counter[tuple[str, ...]]:
    paths = Domains(members).paths
    return Counter(path[:depth] for path in paths.values() for depth in range(1, len(path) + 1))


def moved(before: Placement, after: Placement) -> set[str]:
    """Owners that were there before and after, and whose copies are asked of another node."""
    both = before.buddies.keys() & after.buddies.keys()
    return {node for node in both if set(before.buddies_of(node)) != set(after.buddies_of(node))}


def check_balance(members: Mapping[str, Labels], placement: Placement, replicas: int) -> None:
    wanted = min(replicas, len(members) - 1)
    kept = Counter(holder for chosen in placement.buddies.values() for holder in chosen)
    assert placement.buddies.keys() == members.keys()
    for node, chosen in placement.buddies.items():
        assert node not in chosen
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= members.keys()
        if replicas <= len(members) - 1:
            # Groups never have fewer nodes than that.
            assert len(chosen) == kept[node] == wanted


@settings(deadline=None)
@given(clusters(), st.integers(0, 3), st.sampled_from(["group", "pairwise"]))
@example(zones(6, 2), 1, "group")
@example(zones(3, 3, 3), 2, "group")
def test_no_cut_spreads_better_at_any_level(members: Members, replicas: int, name: str) -> None:
    """A group has at most ceil(d / groups) of a domain of d nodes: some group must have so many."""
    placement = strategy(name).arrange(members, replicas)
    check_balance(members, placement, replicas)
    groups = len(placement.blocks)
    for domain, number in shares(members, placement).items():
        assert number <= math.ceil(sizes(members)[domain] / groups)


@settings(deadline=None)
@given(clusters(), st.integers(1, 3))
def test_what_can_be_in_domains_of_its_own_is(members: Members, replicas: int) -> None:
    """When no zone has more nodes than there are groups, no copy is in the zone of its owner; and nobody is told so."""
    placement = strategy("group").arrange(members, replicas)
    largest = max((size for domain, size in sizes(members).items()), default=0)
    if largest <= len(placement.blocks) and len(members) > replicas:
        for node in members:
            assert note(placement, node, members) == ""


@pytest.mark.parametrize("name", sorted(BLOCKED))
def test_three_zones_of_racks(name: str) -> None:
    """Every strategy keeps the copies of a node in all three zones, and a zone can be lost whole."""
    members: Members = {
        f"{zone}{rack}{i}": (("zone", zone), ("rack", f"r{rack}"))
        for zone in "abc"
        for rack in range(4)
        for i in range(4)
    }
    placement = strategy(name).arrange(members, 2)
    if name == "pairwise":  # blocks of four over three zones: one pair is in the same one, and not in the same rack
        assert all(len({node[:2] for node in (owner, *chosen)}) == 3 for owner, chosen in placement.buddies.items())
        assert all({node[0] for node in (owner, *chosen)} != {owner[0]} for owner, chosen in placement.buddies.items())
        return
    assert all(len({node[0] for node in (owner, *chosen)}) == 3 for owner, chosen in placement.buddies.items())


@settings(deadline=None)
@given(clusters(most=25), st.integers(1, 3), st.sampled_from(sorted(BLOCKED)), st.data())
def test_a_replacement_moves_only_what_touched_the_node(
    members: Members, replicas: int, name: str, data: st.DataObject
) -> None:
    """Another node in the same place of the building: it takes over what the old one kept, and nothing else moves."""
    old = data.draw(st.sampled_from(sorted(members)))
    before = strategy(name).arrange(members, replicas)
    now = {("new" if node == old else node): labels for node, labels in members.items()}
    after = strategy(name).arrange(now, replicas, before.agreed)
    renamed = {
        "new" if node == old else node: tuple("new" if one == old else one for one in chosen)
        for node, chosen in before.buddies.items()
    }
    assert {node: set(chosen) for node, chosen in after.buddies.items()} == {
        node: set(chosen) for node, chosen in renamed.items()
    }
    check_balance(now, after, replicas)


def most_moved(replicas: int, name: str) -> int:
    """Owners that one change of the members may touch: of two of the largest groups, and of one for each of the
    node's mates that had to find another; a ring has two places."""
    if name == "ring":
        return 2 * replicas
    least = replicas + 1 if name == "group" else 1 << replicas.bit_length()
    return (least + 1) * (2 * least - 1)


@settings(deadline=None)
@given(clusters(), st.integers(1, 3), st.sampled_from(sorted(BLOCKED)), st.data())
def test_one_node_more_or_less_moves_little(members: Members, replicas: int, name: str, data: st.DataObject) -> None:
    """However large the job is. What is spread better for it is counted too, within the same bound."""
    before = strategy(name).arrange(members, replicas)
    change = data.draw(st.sampled_from(["grow", "shrink", "replace"]))
    now = dict(members)
    if change != "grow":
        del now[data.draw(st.sampled_from(sorted(members)))]
    if change != "shrink":
        now["new"] = data.draw(st.sampled_from(sorted(members.values())))
    if not now:
        return
    after = strategy(name).arrange(now, replicas, before.agreed)
    check_balance(now, after, replicas)
    assert len(moved(before, after)) <= most_moved(replicas, name)


@settings(deadline=None)
@given(clusters(), st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=30))
def test_a_long_life_keeps_balance_and_spread(members: Members, replicas: int, changes: list[tuple[bool, int]]) -> None:
    """Any number of changes, one after another. The outermost level stays spread as well as in a fresh start, but for
    groups of unequal size."""
    placement = strategy("group").arrange(members, replicas)
    labels = sorted(members.values())
    for number, (grow, chosen) in enumerate(changes):
        if grow or len(members) == 1:
            members = {**members, f"m{number}": labels[chosen % len(labels)]}
        else:
            leaver = sorted(members)[chosen % len(members)]
            members = {node: of for node, of in members.items() if node != leaver}
        placement = strategy("group").arrange(members, replicas, placement.agreed)
        check_balance(members, placement, replicas)
    assert len(placement.blocks) == max(1, len(members) // (replicas + 1))
    assert all(len(block) <= 2 * replicas + 1 for block in placement.blocks)
    paths = Domains(members).paths
    for domain, most in shares(members, placement).items():
        if len(domain) == 1:
            held = [sum(paths[node][:1] == domain for node in block) for block in placement.blocks]
            assert most <= math.ceil(sum(held) / len(held)) + 1


def test_the_same_members_again_move_nothing() -> None:
    for name in BLOCKED:
        before = strategy(name).arrange(zones(5, 9, 2), 2)
        assert strategy(name).arrange(zones(5, 9, 2), 2, before.agreed) == before


def test_another_strategy_starts_anew() -> None:
    ring = strategy("ring").arrange(zones(4, 4), 1)
    assert strategy("group").arrange(zones(4, 4), 1, ring.agreed) == strategy("group").arrange(zones(4, 4), 1)


# -- in words


def test_why_copies_are_in_one_zone() -> None:
    members = zones(6, 2)
    placement = strategy("group").arrange(members, 1)
    told = [note(placement, node, members) for node in sorted(members)]
    assert sum(bool(one) for one in told) == 4
    assert told[0] == (
        "Copies of what node a0 writes are not all apart: a0, a4 are in zone 'a', because 6 of the job's 8 nodes are "
        "there. What takes all of it away takes these copies away together."
    )


def test_too_few_zones_and_what_is_apart_all_the_same() -> None:
    members: Members = {f"{zone}{i}": (("zone", zone), ("rack", f"r{i}")) for zone in "ab" for i in range(3)}
    placement = strategy("group").arrange(members, 2)
    assert "because the job has 2 zones for 3 copies; each has a rack of its own there." in note(
        placement, "a0", members
    )


def test_nodes_without_a_label_are_one_domain_and_named() -> None:
    members: Members = {"a": (("zone", "1"),), "b": (), "c": (), "d": ()}
    placement = strategy("group").arrange(members, 1)
    told = " ".join(note(placement, node, members) for node in members)
    assert "are in one domain, having no label 'zone', because 3 of the job's 4 nodes are there" in told


def test_levels_that_contradict_each_other() -> None:
    members: Members = {"a": (("zone", "1"), ("rack", "2")), "b": (("rack", "2"), ("zone", "1"))}
    with pytest.raises(ConfigError, match="node a has zone, rack, node b has rack, zone, outermost first"):
        strategy("group").arrange(members, 1)
    missing: Members = {"a": (("zone", "1"), ("rack", "2")), "b": (("rack", "2"),)}
    assert strategy("group").arrange(missing, 1).buddies_of("a") == ("b",)


@pytest.mark.parametrize(
    ("members", "replicas", "crowded"),
    [(zones(2, 2, 1), 2, 2), (zones(2, 2, 2, 1), 3, 3), (zones(1, 1, 1, 1, 1), 3, 0), (zones(2, 1, 1), 2, 2)],
)
def test_in_a_larger_group_the_copies_of_a_node_are_apart_from_each_other_too(
    members: Members, replicas: int, crowded: int
) -> None:
    """Two holders in one zone are as one. `crowded`: owners of whom two copies must share one, by trying all orders."""
    placement = strategy("group").arrange(members, replicas)
    domains = Domains(members)
    copies = [(owner, *holders) for owner, holders in placement.buddies.items()]
    together = [nodes for nodes in copies if len({domains.paths[node] for node in nodes}) < len(nodes)]
    assert len(together) == crowded
