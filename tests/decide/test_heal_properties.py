"""What plan_healing promises for every cluster, checked against brute force, and by carrying the plan out."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from decide_samples import address, entry, manifest, version
from hypothesis import given
from hypothesis import strategies as st

from replicator.decide.heal import HealingPlan, Standing, plan_healing, standing_buddies
from replicator.decide.placement import buddies
from replicator.decide.types import ContainerInventory, HeldObject, Manifest, NodeInventory, recency
from replicator.ids import ContainerVersion

NODES = [f"n{i}" for i in range(7)]


@dataclass
class World:
    manifests: dict[ContainerVersion, Manifest]
    inventories: list[NodeInventory]
    standing: Standing

    def plan(self) -> HealingPlan:
        return plan_healing(self.manifests, self.inventories, self.standing)

    def good(self, of: ContainerVersion, name: str) -> set[str]:
        """Nodes that answered, are not dead, and have the object as the manifest says."""
        (wanted,) = (one for one in self.manifests[of].entries if one.name == name)
        return {
            inventory.node.node_id
            for inventory in self.inventories
            for held in inventory.containers
            if inventory.node.node_id not in self.standing.dead
            and held.version == of
            and name in held.objects
            and (held.objects[name].size, held.objects[name].crc32c) == (wanted.size, wanted.crc32c)
        }


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to 7 nodes in any state, up to 3 containers, each object anywhere, some of it corrupt."""
    members = draw(st.lists(st.sampled_from(NODES), min_size=1, unique=True))
    state = {node: draw(st.sampled_from(["fine"] * 4 + ["dead", "silent", "leaving", "closed"])) for node in NODES}
    replicas = draw(st.integers(0, 3))
    steps = draw(st.lists(st.integers(0, 3), unique=True, max_size=3))
    manifests, held = {}, {node: list[ContainerInventory]() for node in NODES}
    for step in steps:
        of = version(step, attempt=step)
        entries = [entry(f"o{i}", draw(st.sampled_from(NODES)), size=10 + i) for i in range(draw(st.integers(1, 4)))]
        manifests[of] = dataclasses.replace(manifest(of, *entries), replicas=replicas)
        is_protected = draw(st.booleans())
        for node in NODES:
            copies = {}
            for one in entries:
                kind = draw(st.sampled_from(["none", "none", "good", "corrupt"]))
                if kind != "none":
                    copies[one.name] = HeldObject(one.name, one.size, one.crc32c + (kind == "corrupt"))
            if copies:
                held[node].append(ContainerInventory(of, 1, is_protected, copies))
    answered = [node for node in NODES if state[node] not in ("dead", "silent") or draw(st.booleans())]
    refused = (
        draw(st.sets(st.tuples(st.sampled_from(sorted(manifests)), st.sampled_from(NODES)), max_size=3))
        if (manifests)
        else set()
    )

    def those(what: str) -> frozenset[str]:
        return frozenset(node for node in NODES if state[node] == what)

    standing = Standing(
        tuple(members), those("dead"), those("silent"), those("leaving"), those("closed"), frozenset(refused)
    )
    return World(manifests, [NodeInventory(address(node), tuple(held[node])) for node in answered], standing)


@given(worlds(), st.randoms(use_true_random=False))
def test_everybody_with_the_same_answers_makes_the_same_plan(world: World, chance: random.Random) -> None:
    """So that an object is healed by one node's doing."""
    inventories, manifests = list(world.inventories), list(world.manifests.items())
    chance.shuffle(inventories)
    chance.shuffle(manifests)
    assert plan_healing(dict(manifests), inventories, world.standing) == world.plan()


@given(worlds())
def test_a_move_goes_from_who_has_it_to_who_may_get_it(world: World) -> None:
    """F01: only verified copies are sources; F20: who is suspect, full, leaving or refused gets nothing."""
    standing = world.standing
    unready = standing.dead | standing.silent | standing.leaving | standing.closed
    seen = set()
    for move in world.plan().moves:
        assert move.new_holder in standing.members
        assert move.new_holder not in unready
        assert (move.version, move.new_holder) not in standing.refused
        for name in move.names:
            good = world.good(move.version, name)
            assert set(move.sources) == good - standing.silent
            assert move.new_holder not in good
            assert (move.version, name, move.new_holder) not in seen, "nobody gets an object twice"
            seen.add((move.version, name, move.new_holder))
        leaving = [node in standing.leaving for node in move.sources]
        assert leaving == sorted(leaving, reverse=True), "who leaves acts first"


@given(worlds())
def test_never_more_copies_than_wanted_and_the_newest_first(world: World) -> None:
    plan = world.plan()
    coming: dict[tuple[ContainerVersion, str], int] = {}
    for move in plan.moves:
        for name in move.names:
            coming[move.version, name] = coming.get((move.version, name), 0) + 1
    for (of, name), number in coming.items():
        counting = world.good(of, name) - world.standing.leaving
        assert len(counting) + number <= world.manifests[of].replicas + 1
    order = [recency(move.version) for move in plan.moves]
    assert order == sorted(order, reverse=True)


@given(worlds())
def test_a_suspect_is_never_the_reason(world: World) -> None:
    """With all who are silent there and holding what is theirs by right, the plan has no more moves."""
    for move in world.plan().moves:
        (of,) = {one.owner_node_id for one in world.manifests[move.version].entries if one.name in move.names}
        assert of == move.owner_node_id
        replicas = world.manifests[move.version].replicas
        nodes = sorted({*world.standing.members, of})
        by_right = {of, *buddies(of, nodes, replicas).node_ids}
        answered = {inventory.node.node_id for inventory in world.inventories}
        believed = (by_right & world.standing.silent) - answered
        for name in move.names:
            counting = (world.good(move.version, name) - world.standing.leaving) | believed
            assert len(counting) < replicas + 1


@given(worlds())
def test_carried_out_it_leaves_nothing_to_do_that_could_be_done(world: World) -> None:
    """After all moves there are none left, and short is only what too few nodes could take."""
    plan = world.plan()
    by_node = {
        inventory.node.node_id: {one.version: one for one in inventory.containers} for inventory in world.inventories
    }
    for move in plan.moves:
        entries = {one.name: one for one in world.manifests[move.version].entries}
        there = by_node[move.new_holder].get(move.version, ContainerInventory(move.version, 1))
        copies = dict(there.objects)
        for name in move.names:
            copies[name] = HeldObject(name, entries[name].size, entries[name].crc32c)
        by_node[move.new_holder][move.version] = dataclasses.replace(there, objects=copies)
    after = World(
        world.manifests,
        [NodeInventory(address(node), tuple(held.values())) for node, held in by_node.items()],
        world.standing,
    ).plan()
    assert after.moves == ()
    for short in after.short:
        assert short.unplaced or short.lost or world.standing.silent
        assert short.lost + short.exposed <= short.objects
        assert short.unplaced <= short.objects


@given(worlds())
def test_short_is_what_has_too_few_copies_by_brute_force(world: World) -> None:
    plan = world.plan()
    found = {short.version: short for short in plan.short}
    for of, wanted in world.manifests.items():
        lost = 0
        for one in wanted.entries:
            nodes = sorted({*world.standing.members, one.owner_node_id})
            by_right = {one.owner_node_id, *buddies(one.owner_node_id, nodes, wanted.replicas).node_ids}
            answered = {inventory.node.node_id for inventory in world.inventories}
            lost += not world.good(of, one.name) and not ((by_right & world.standing.silent) - answered)
        assert (found[of].lost if of in found else 0) == lost


@given(st.lists(st.sampled_from(NODES), min_size=1, unique=True), st.integers(0, 4), st.sets(st.sampled_from(NODES)))
def test_substitutes_move_as_little_as_can_be(members: list[str], replicas: int, avoided: set[str]) -> None:
    for owner in members:
        by_right = buddies(owner, members, replicas).node_ids
        chosen = standing_buddies(owner, members, replicas, avoided).node_ids
        assert len(chosen) == len(set(chosen)) == len(by_right)
        assert owner not in chosen
        assert set(by_right) - avoided <= set(chosen)
        spare = set(members) - avoided - {owner}
        assert len(set(chosen) & avoided) == max(0, len(by_right) - len(spare))
