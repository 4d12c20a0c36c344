"""Which copies are made again, by hand-written cases: the rules one by one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
from decide_samples import entry, holds, manifest, node, version

from replicator.decide import heal
from replicator.decide.heal import Standing, candidates
from replicator.decide.placement import Buddies, buddies
from replicator.decide.types import ContainerInventory, NodeInventory


def pairs(owner: str, members: Sequence[str], replicas: int) -> Buddies:
    """n0 and n1 are buddies, n2 and n3 too; then the next ones in a circle."""
    nodes = sorted(members)
    place = nodes.index(owner)
    partner = f"n{int(owner[1:]) ^ 1}"
    circle = [node for node in nodes[place + 1 :] + nodes[:place] if node != partner]
    return Buddies(tuple([partner] * (partner in nodes) + circle)[:replicas])


plan_healing = functools.partial(heal.plan_healing, place=pairs)
standing_buddies = functools.partial(heal.standing_buddies, place=pairs)

MEMBERS = ("n0", "n1", "n2", "n3")
OF_N0, OF_N1 = entry("a", "n0"), entry("b", "n1", size=200)
V = version(5)
BOTH = {V: manifest(V, OF_N0, OF_N1)}


def standing(**more: object) -> Standing:
    return dataclasses.replace(Standing(MEMBERS), **more)  # type: ignore[arg-type]


def protected(one: NodeInventory) -> NodeInventory:
    return NodeInventory(one.node, tuple(dataclasses.replace(held, is_protected=True) for held in one.containers))


ALL = [protected(node("n0", holds(V, OF_N0, OF_N1))), protected(node("n1", holds(V, OF_N0, OF_N1)))]
EMPTY = [node("n2"), node("n3")]


def test_nothing_is_moved_while_everything_has_its_copies() -> None:
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing())
    assert plan.moves == ()
    assert plan.short == ()


def test_what_a_dead_node_held_is_offered_by_one_survivor_to_one_node() -> None:
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(dead=frozenset({"n1"})))
    assert [(move.owner_node_id, move.names, move.responsible, move.new_holder) for move in plan.moves] == [
        ("n0", ("a",), "n0", "n2"),
        ("n1", ("b",), "n0", "n2"),
    ]
    assert plan.moves[0].reason == (
        "1 object of step 5 (epoch 1, attempt 0) has 1 of 2 copies (n1 is dead); n0 offers it to n2"
    )
    (short,) = plan.short
    assert (short.objects, short.size_bytes, short.unplaced, short.lost) == (2, 300, 0, 0)


def test_nothing_is_moved_for_a_suspect() -> None:
    """It answered before, or it has the objects by right: either way its copies count."""
    suspect = standing(silent=frozenset({"n1"}))
    assert plan_healing(BOTH, [*ALL, *EMPTY], suspect).moves == ()
    assert plan_healing(BOTH, [ALL[0], *EMPTY], suspect).moves == ()


def test_a_suspect_gets_nothing_and_is_not_read() -> None:
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(dead=frozenset({"n1"}), silent=frozenset({"n2"})))
    assert {move.new_holder for move in plan.moves} == {"n3"}
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(dead=frozenset({"n1"}), silent=frozenset({"n0"})))
    assert plan.moves == ()
    assert plan.short[0].lost == 0


def test_a_node_that_returned_with_its_memory_ends_it() -> None:
    moved = node("n2", holds(V, OF_N0))
    plan = plan_healing(BOTH, [*ALL, moved, EMPTY[1]], standing())
    assert plan == plan_healing(BOTH, [*ALL, *EMPTY], standing())


def test_a_node_that_returned_empty_is_filled_with_what_was_not_moved_meanwhile() -> None:
    plan = plan_healing(BOTH, [ALL[0], node("n1"), protected(node("n2", holds(V, OF_N0))), EMPTY[1]], standing())
    assert [(move.names, move.sources, move.new_holder) for move in plan.moves] == [(("b",), ("n0",), "n1")]
    assert "n1 lacks it" in plan.moves[0].reason


def test_the_newest_step_comes_first() -> None:
    old, new = version(9, epoch=1), version(2, epoch=2)
    manifests = {one: manifest(one, OF_N0) for one in (old, new)}
    held = protected(node("n0", holds(old, OF_N0), holds(new, OF_N0)))
    plan = plan_healing(manifests, [held, *EMPTY], standing(dead=frozenset({"n1"})))
    assert [move.version for move in plan.moves] == [new, old]
    assert [short.version for short in plan.short] == [new, old]


def test_what_its_owner_is_still_copying_is_left_to_it() -> None:
    only = node("n0", holds(V, OF_N0))
    of_n0 = {V: manifest(V, OF_N0)}
    assert plan_healing(of_n0, [only, node("n1"), *EMPTY], standing()).moves == ()
    assert plan_healing(of_n0, [only, *EMPTY], standing(dead=frozenset({"n1"}))).moves != ()
    # Without its owner nobody else would.
    orphan = node("n1", holds(V, OF_N0))
    assert plan_healing(of_n0, [orphan, node("n0"), *EMPTY], standing()).moves != ()


def test_what_too_few_nodes_stay_for_is_counted_and_not_short() -> None:
    """Nothing more can be done for it, but who drains the others has to know."""
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(leaving=frozenset({"n1", "n2", "n3"})))
    assert (plan.moves, plan.short) == ((), ())
    assert (plan.scarce_objects, plan.scarce_bytes) == (2, 300)
    for leaving in (frozenset({"n2", "n3"}), frozenset({"n1", "n3"})):
        assert plan_healing(BOTH, [*ALL, *EMPTY], standing(leaving=leaving)).scarce_objects == 0
    alone = plan_healing({V: manifest(V, OF_N0)}, ALL[:1], Standing(("n0",)))
    assert alone.scarce_objects == 0, "a job on one node never wanted more"


def test_what_is_only_on_a_leaving_node_is_offered_by_it() -> None:
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(leaving=frozenset({"n1"})))
    assert [(move.names, move.sources, move.new_holder) for move in plan.moves] == [
        (("a",), ("n1", "n0"), "n2"),
        (("b",), ("n1", "n0"), "n2"),
    ]
    assert plan.short[0].exposed == 0
    alone = plan_healing(BOTH, [ALL[1], node("n0"), *EMPTY], standing(leaving=frozenset({"n1"})))
    assert alone.short[0].exposed == 2
    assert [(move.responsible, move.new_holder) for move in alone.moves] == [
        ("n1", "n0"),
        ("n1", "n2"),
        ("n1", "n0"),
        ("n1", "n2"),
    ]


def test_who_is_full_or_refused_is_passed_over_and_keeps_what_it_has() -> None:
    dead = frozenset({"n1"})
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(dead=dead, closed=frozenset({"n2"})))
    assert {move.new_holder for move in plan.moves} == {"n3"}
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(dead=dead, refused=frozenset({(V, "n2")})))
    assert {move.new_holder for move in plan.moves} == {"n3"}
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(dead=dead, closed=frozenset({"n2", "n3"})))
    assert plan.moves == ()
    assert plan.short[0].unplaced == 2
    # A full one's copies count.
    assert plan_healing(BOTH, [*ALL, *EMPTY], standing(closed=frozenset({"n1"}))).short == ()


def test_copies_with_other_bytes_do_not_count() -> None:
    """F01."""
    wrong = protected(node("n1", holds(V, dataclasses.replace(OF_N0, crc32c=8), OF_N1)))
    plan = plan_healing(BOTH, [ALL[0], wrong, *EMPTY], standing())
    assert [(move.names, move.sources, move.new_holder) for move in plan.moves] == [(("a",), ("n0",), "n1")]


def test_what_is_lost_is_told_and_not_moved() -> None:
    plan = plan_healing(BOTH, EMPTY, standing(dead=frozenset({"n0", "n1"})))
    assert plan.moves == ()
    assert plan.short[0].lost == 2


def test_owners_may_be_chosen() -> None:
    plan = plan_healing(BOTH, [*ALL, *EMPTY], standing(dead=frozenset({"n1"})), owners={"n1"})
    assert [move.names for move in plan.moves] == [("b",)]


def test_an_owner_that_is_no_member_any_more() -> None:
    members = dataclasses.replace(standing(), members=("n0", "n2", "n3"))
    plan = plan_healing(BOTH, [ALL[0], *EMPTY], members)
    assert {(move.owner_node_id, move.responsible) for move in plan.moves} == {("n0", "n0"), ("n1", "n0")}
    assert "n1 is no member any more" in plan.moves[1].reason


def test_substitutes_take_the_place_of_those_who_cannot() -> None:
    assert standing_buddies("n0", MEMBERS, 1, ()).node_ids == ("n1",)
    assert standing_buddies("n0", MEMBERS, 1, {"n3"}).node_ids == ("n1",)
    assert standing_buddies("n0", MEMBERS, 1, {"n1"}).node_ids == ("n2",)
    assert standing_buddies("n0", MEMBERS, 1, {"n1", "n2"}).node_ids == ("n3",)
    # Never fewer than there are by right: a copy that is missing must be missed.
    assert standing_buddies("n0", MEMBERS, 1, {"n1", "n2", "n3"}).node_ids == ("n1",)
    assert standing_buddies("n0", ("n0", "n1"), 1, {"n1"}).node_ids == ("n1",)
    assert standing_buddies("n0", MEMBERS, 2, {"n1", "n2"}).node_ids == ("n3", "n1")


@pytest.mark.parametrize("replicas", [0, 1, 2, 3, 7])
def test_candidates_begin_with_who_holds_it_by_right(replicas: int) -> None:
    for owner in MEMBERS:
        order = candidates(owner, MEMBERS, replicas)
        assert order[0] == owner
        assert sorted(order) == list(MEMBERS)
        by_right = buddies(owner, MEMBERS, replicas).node_ids
        assert order[1 : 1 + len(by_right)] == by_right


def test_an_uncommitted_container_is_nobodys_business() -> None:
    left = ContainerInventory(V, None, False, holds(V, OF_N0).objects)
    assert plan_healing({}, [NodeInventory(ALL[0].node, (left,)), *EMPTY], standing()).moves == ()
