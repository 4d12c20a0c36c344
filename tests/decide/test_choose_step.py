"""choose_step on clusters written by hand: what is chosen, from where, and what the operator is told."""

from __future__ import annotations

import pytest
from decide_samples import address, entry, holds, manifest, node, version

from replicator.decide.choose_step import choose_step
from replicator.decide.types import HeldObject, NodeInventory, Unanswered
from replicator.errors import InvalidIdError
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation

A, B, C = entry("a", "n1"), entry("b", "n2"), entry("c", "n3")


def test_newest_complete_step_is_chosen_and_the_incomplete_one_is_explained() -> None:
    """F05, F06: one object of step 20 is nowhere, so nobody may load any part of step 20."""
    old, new = version(10), version(20)
    inventories = [node("n1", holds(old, A, B), holds(new, A)), node("n2", holds(old, A, B))]
    decision = choose_step(inventories, {old: manifest(old, A, B), new: manifest(new, A, B)})
    assert decision.version == old
    assert [item.version for item in decision.rejected] == [new]
    assert decision.rejected[0].reason == (
        "1 of its 2 objects has no matching copy on any node that answered: b (written by n2)."
    )
    assert decision.reason == (
        "Step 10 (epoch 1, attempt 0) is the newest recoverable checkpoint. It is committed, and each of its "
        "2 objects has a verified copy on at least 2 nodes. "
        "1 newer attempt cannot be restored: step 20 (epoch 1, attempt 0)."
    )


def test_step_zero_is_a_step() -> None:
    """F14."""
    zero = version(0)
    inventories = [node("n1", holds(zero, A))]
    assert choose_step(inventories, {zero: manifest(zero, A)}).version == zero
    assert choose_step(inventories, {zero: manifest(zero, A)}, step=0).version == zero


def test_asking_for_step_zero_never_gives_another_step() -> None:
    """F14: `step=0` is not "no step"."""
    one = version(1)
    decision = choose_step([node("n1", holds(one, A))], {one: manifest(one, A)}, step=0)
    assert decision.version is None
    assert decision.reason == (
        "Step 0 of job train-1 cannot be restored: nothing of it is held by the 1 node that answered."
    )


def test_all_objects_without_a_manifest_are_not_a_checkpoint() -> None:
    """F04, F06: the coordinator died between seal and commit."""
    new = version(20)
    decision = choose_step([node("n1", holds(new, A, B, committed=False))], {})
    assert decision.version is None
    assert decision.reason == (
        "No checkpoint of job train-1 can be restored; the only attempt is step 20 (epoch 1, attempt 0). It was "
        "never committed: its manifest is not on the 1 node that answered (2 objects found on n1)."
    )


def test_manifest_that_nobody_could_read_is_told_apart_from_none() -> None:
    new = version(20)
    decision = choose_step([node("n1", holds(new, A))], {})
    assert decision.rejected[0].reason == "Its manifest is stored on n1, but no valid copy of it could be read."


def test_any_survivors_manifest_is_enough() -> None:
    """The only manifest is on a node that holds no object of it."""
    new = version(20)
    inventories = [node("n1", holds(new, A, committed=False)), node("n2", holds(new, committed=True))]
    assert choose_step(inventories, {new: manifest(new, A)}).version == new


def test_sources_are_found_on_every_node_whatever_the_owner() -> None:
    """F10, F13: the owner came back empty; the copies are on nodes outside of its group."""
    new = version(20)
    inventories = [
        node("n1"),
        node("n2", holds(new, B, committed=False)),
        node("n9", holds(new, A)),
        node("n4", holds(new, C)),
    ]
    decision = choose_step(inventories, {new: manifest(new, A, B, C)})
    assert [(s.name, s.owner_node_id, s.node_ids) for s in decision.sources] == [
        ("a", "n1", ("n9",)),
        ("b", "n2", ("n2",)),
        ("c", "n3", ("n4",)),
    ]


def test_copy_of_other_size_or_checksum_is_not_a_source() -> None:
    """F01, F10: a neighbour's shard under the same name, or a damaged copy, is never offered."""
    new = version(20)
    inventories = [
        node("n1", holds(new, entry("a", "n1", crc32c=8))),
        node("n2", holds(new, entry("a", "n1", size=99))),
        node("n3", holds(new, A)),
    ]
    manifests = {new: manifest(new, A)}
    assert choose_step(inventories, manifests).sources[0].node_ids == ("n3",)
    decision = choose_step(inventories[:2], manifests)
    assert decision.version is None
    assert "copies whose size or checksum is not the manifest's were ignored: a on n1, n2" in decision.reason


def test_objects_of_two_generations_never_mix() -> None:
    first, second = version(20, attempt=0), version(20, attempt=1)
    inventories = [node("n1", holds(first, A)), node("n2", holds(second, B))]
    decision = choose_step(inventories, {first: manifest(first, A, B), second: manifest(second, A, B)})
    assert decision.version is None
    assert [item.version for item in decision.rejected] == [second, first]


def test_later_epoch_wins_over_a_greater_step_of_an_abandoned_one() -> None:
    """F11: the job went back to step 10 and on to 15; step 30 of the earlier incarnation is history."""
    abandoned, current = version(30, epoch=1), version(15, epoch=2)
    inventories = [node("n1", holds(abandoned, A), holds(current, A))]
    decision = choose_step(inventories, {v: manifest(v, A) for v in (abandoned, current)})
    assert decision.version == current
    assert decision.rejected == ()


def test_step_is_given_in_its_newest_recoverable_generation() -> None:
    first, second, third = (version(20, attempt=i) for i in range(3))
    inventories = [node("n1", holds(first, A), holds(second, A), holds(third, B))]
    manifests = {v: manifest(v, A) for v in (first, second, third)}
    decision = choose_step(inventories, manifests, step=20)
    assert decision.version == second
    assert [item.version for item in decision.rejected] == [third]
    assert decision.reason.startswith("Step 20 (epoch 1, attempt 1) is recoverable, as was asked for.")


def test_silent_nodes_are_named_where_they_may_hold_what_is_missing() -> None:
    """F15: the reason says who did not answer."""
    new = version(20)
    silent = [Unanswered("n2", "10.0.0.2:7070", "no answer in 5.0 s"), Unanswered("", "10.0.0.3:7070", "")]
    decision = choose_step([node("n1", holds(new, A))], {new: manifest(new, A, B)}, unanswered=silent)
    assert decision.version is None
    assert decision.reason == (
        "No checkpoint of job train-1 can be restored; the only attempt is step 20 (epoch 1, attempt 0). "
        "1 of its 2 objects has no matching copy on any node that answered: b (written by n2); "
        "no answer came from 10.0.0.3:7070, n2, where copies may be. "
        "No answer came from 10.0.0.3:7070, n2 (no answer in 5.0 s), where checkpoints may be."
    )


def test_nobody_answered() -> None:
    decision = choose_step([], {}, unanswered=[Unanswered("n2", "n2:1", "connection refused")])
    assert (decision.version, decision.rejected) == (None, ())
    assert decision.reason == (
        "No checkpoint can be restored: no node answered. No answer came from n2 (connection refused), "
        "where checkpoints may be."
    )


def test_durable_copy_that_is_newer_wins_and_the_reason_says_so() -> None:
    """F12: neither tier is preferred as such; the newest recoverable step wins over both together."""
    old, new = version(10), version(20)
    memory = node("n1", holds(old, A, B), holds(new, A))
    durable = NodeInventory(address("s3"), (holds(new, A, B),), tier="durable")
    decision = choose_step([durable, memory], {old: manifest(old, A, B), new: manifest(new, A, B)})
    assert decision.version == new
    assert [source.node_ids for source in decision.sources] == [("n1", "s3"), ("s3",)]
    assert "Only a durable tier has 1 object of it, to be read from there." in decision.reason


def test_newer_memory_step_wins_over_an_older_durable_one() -> None:
    """F12."""
    old, new = version(10), version(20)
    durable = NodeInventory(address("s3"), (holds(old, A),), tier="durable")
    decision = choose_step([node("n1", holds(new, A)), durable], {v: manifest(v, A) for v in (old, new)})
    assert decision.version == new


def test_objects_of_a_lost_owner_are_spread_over_its_buddies() -> None:
    """F20: not every object of the lost node is asked of the same survivor first."""
    new = version(20)
    entries = [entry(f"o{i}", "lost") for i in range(8)]
    inventories = [node(f"n{i}", holds(new, *entries)) for i in range(1, 5)]
    first = [source.node_ids[0] for source in choose_step(inventories, {new: manifest(new, *entries)}).sources]
    assert sorted(first) == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]


def test_manifest_of_another_container_is_not_trusted() -> None:
    new, other = version(20), version(10)
    decision = choose_step([node("n1", holds(new, A))], {new: manifest(other, A)})
    assert decision.version is None
    assert "belongs to train-1/step-10_ckpt@1.0" in decision.rejected[0].reason


def test_empty_manifest_is_nothing_to_load() -> None:
    new = version(20)
    assert choose_step([node("n1", holds(new))], {new: manifest(new)}).version is None


def test_two_jobs_at_once_are_refused() -> None:
    mine, other = version(10), ContainerVersion(CheckpointContainerId("other", 10), make_generation(1, 0))
    with pytest.raises(InvalidIdError, match="one job, found other, train-1"):
        choose_step([node("n1", holds(mine, A), holds(other, A))], {})


def test_reasons_stay_short_on_a_large_cluster() -> None:
    """4096 nodes of 8 ranks: the reason names a few objects and nodes, not all; the work stays linear."""
    new = version(20)
    entries = [entry(f"__{i}_0.distcp", f"n{i // 8:04}") for i in range(4096 * 8)]
    inventories = [node(f"n{i:04}", holds(new, *entries[i * 8 : i * 8 + 8])) for i in range(4000)]
    silent = [Unanswered(f"n{i:04}", f"n{i:04}:7070", "no answer in 5.0 s") for i in range(4000, 4096)]
    decision = choose_step(inventories, {new: manifest(new, *entries)}, unanswered=silent)
    assert decision.version is None
    assert "768 of its 32768 objects have no matching copy" in decision.reason
    assert "and 92 more" in decision.reason
    assert len(decision.reason) < 1000
    found = choose_step(inventories, {new: manifest(new, *entries[: 4000 * 8])})
    assert len(found.sources) == 32000


@pytest.mark.parametrize("names", [["b", "a"], ["a", "a"]])
def test_manifest_entries_are_sorted_and_unique(names: list[str]) -> None:
    good = manifest(version(1))
    with pytest.raises(InvalidIdError, match="expected unique names in order"):
        type(good)(good.version, 1, "n1", 1, 1, 0, tuple(entry(name, "n1") for name in names))


def test_held_object_is_told_by_its_own_name() -> None:
    """A mapping key that is not the object's name does not make it another object."""
    new = version(20)
    inventory = holds(new)
    lying = type(inventory)(new, 1, False, {"a": HeldObject("b", A.size, A.crc32c)})
    assert choose_step([node("n1", lying)], {new: manifest(new, A)}).version is None


def test_node_that_answers_twice_is_one_holder() -> None:
    """A node found under two addresses, or by two incarnations, does not make two copies of one."""
    new = version(20)
    inventories = [NodeInventory(address("n1", incarnation), (holds(new, A),)) for incarnation in (1, 2)]
    decision = choose_step(inventories, {new: manifest(new, A)})
    assert decision.sources[0].node_ids == ("n1",)
    assert "at least 1 node." in decision.reason


def test_what_was_begun_last_is_newest_also_within_an_epoch() -> None:
    """The job went back from step 20 to an older one and went on from there, without a restart: F12's kind."""
    further, later = version(20, attempt=0), version(10, attempt=1)
    inventories = [node("n1", holds(later, A), holds(further, A))]
    assert choose_step(inventories, {v: manifest(v, A) for v in (later, further)}).version == later
