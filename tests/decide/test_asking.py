"""Whether nodes that refused are asked again: only while what they have may be newer than what was found."""

from __future__ import annotations

import dataclasses

from decide_samples import Cluster, clusters, entry, holds, manifest, node, version
from hypothesis import given

from replicator.decide.asking import worth_asking_again
from replicator.decide.choose_step import choose_step
from replicator.decide.types import Decision, Manifest, NodeInventory
from replicator.ids import ContainerVersion

A, B, C = entry("a", "n1"), entry("b", "n2"), entry("c", "n3")
OLD, NEW = version(10), version(20)


def _decided(
    inventories: list[NodeInventory], *manifests: Manifest, step: int | None = None
) -> tuple[Decision, dict[ContainerVersion, Manifest]]:
    known = {one.version: one for one in manifests}
    return choose_step(inventories, known, step=step), known


def test_nobody_is_silent() -> None:
    assert worth_asking_again(*_decided([]), 0) == ""


def test_nothing_was_found() -> None:
    assert "nothing" in worth_asking_again(*_decided([node("n1")]), 1)


def test_a_lost_node_is_not_waited_for_while_the_rest_has_everything() -> None:
    """The common recovery: one node of three is gone, each object has a copy elsewhere."""
    found = _decided([node("n2", holds(NEW, A, B)), node("n3", holds(NEW, B, C))], manifest(NEW, A, B, C))
    assert worth_asking_again(*found, 1) == ""


def test_a_newer_one_that_only_lacks_copies_is_waited_for() -> None:
    found = _decided([node("n1", holds(OLD, A, B), holds(NEW, A))], manifest(OLD, A, B), manifest(NEW, A, B))
    assert found[0].version == OLD
    assert "step 20" in worth_asking_again(*found, 1)


def test_a_newer_one_that_was_never_committed_is_not() -> None:
    inventories = [node("n1", holds(OLD, A, B), holds(NEW, A, committed=False))]
    assert worth_asking_again(*_decided(inventories, manifest(OLD, A, B)), 1) == ""


def test_a_newer_one_that_no_job_goes_on_from_is_not() -> None:
    model_only = dataclasses.replace(manifest(NEW, A, B), resumable=False)
    inventories = [node("n1", holds(OLD, A, B), holds(NEW, A))]
    assert worth_asking_again(*_decided(inventories, manifest(OLD, A, B), model_only), 1) == ""


def test_as_many_as_a_commit_needs_may_hide_a_newer_one() -> None:
    """R = 1: what two nodes had is lost with them, and nobody else need know of it."""
    found = _decided([node("n1", holds(NEW, A, B, C))], manifest(NEW, A, B, C))
    assert worth_asking_again(*found, 1) == ""
    assert "2 nodes" in worth_asking_again(*found, 2)


@given(clusters())
def test_what_was_found_without_a_silent_node_is_never_waited_for(cluster: Cluster) -> None:
    decision = choose_step(cluster.inventories, cluster.manifests)
    assert worth_asking_again(decision, cluster.manifests, 0) == ""
    if decision.version is None:
        assert worth_asking_again(decision, cluster.manifests, 1)
