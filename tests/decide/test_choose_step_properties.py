"""What choose_step promises for every cluster, checked against brute force."""

from __future__ import annotations

import random

from decide_samples import Cluster, clusters
from hypothesis import given
from hypothesis import strategies as st

from replicator.decide.assess import Evidence
from replicator.decide.choose_step import choose_step
from replicator.decide.types import ContainerInventory, Decision, NodeInventory, recency

STEPS = st.sampled_from([None, 0, 1, 2**40])


def decide(cluster: Cluster, step: int | None = None) -> Decision:
    return choose_step(cluster.inventories, cluster.manifests, step=step, unanswered=cluster.unanswered)


@given(clusters(), STEPS, st.randoms(use_true_random=False))
def test_order_of_the_inputs_does_not_matter(cluster: Cluster, step: int | None, chance: random.Random) -> None:
    """F09, F41: whoever asks first or answers last, the plan is the same, to the letter."""

    def shuffled(inventory: NodeInventory) -> NodeInventory:
        containers = []
        for item in inventory.containers:
            objects = list(item.objects.items())
            chance.shuffle(objects)
            containers.append(ContainerInventory(item.version, item.manifest_crc32c, item.is_protected, dict(objects)))
        chance.shuffle(containers)
        return NodeInventory(inventory.node, tuple(containers), inventory.tier)

    inventories = [shuffled(item) for item in cluster.inventories]
    manifests = list(cluster.manifests.items())
    silent = list(cluster.unanswered)
    for items in (inventories, manifests, silent):
        chance.shuffle(items)
    assert decide(cluster, step) == choose_step(inventories, dict(manifests), step=step, unanswered=silent)


@given(clusters(), STEPS)
def test_every_source_has_the_manifests_bytes_and_none_is_left_out(cluster: Cluster, step: int | None) -> None:
    """F01, F06, F13."""
    decision = decide(cluster, step)
    if decision.version is None:
        assert decision.sources == ()
        return
    entries = cluster.manifests[decision.version].entries
    holders = cluster.matching_holders(decision.version)
    assert [(s.name, s.size, s.crc32c, s.owner_node_id) for s in decision.sources] == [
        (e.name, e.size, e.crc32c, e.owner_node_id) for e in entries
    ]
    for source in decision.sources:
        assert len(set(source.node_ids)) == len(source.node_ids) > 0
        assert set(source.node_ids) == holders[source.name]
        if source.owner_node_id in holders[source.name]:
            assert source.node_ids[0] == source.owner_node_id


@given(clusters(), STEPS)
def test_newest_recoverable_is_chosen_and_all_newer_ones_are_explained(cluster: Cluster, step: int | None) -> None:
    """F12: nothing recoverable and newer is passed over; nothing is passed over in silence."""
    decision = decide(cluster, step)
    seen = {c.version for item in cluster.inventories for c in item.containers} | set(cluster.manifests)
    eligible = sorted((v for v in seen if step is None or v.container.step == step), key=recency, reverse=True)
    expected = next((v for v in eligible if cluster.recoverable(v)), None)
    assert decision.version == expected
    newer = eligible if expected is None else eligible[: eligible.index(expected)]
    assert [item.version for item in decision.rejected] == newer
    for text in [decision.reason, *(item.reason for item in decision.rejected)]:
        assert text.endswith(".")
        assert text[0].isupper() or text[0].isdigit()


@given(clusters())
def test_a_node_more_never_makes_the_choice_older(cluster: Cluster) -> None:
    fewer = Cluster(cluster.inventories[1:], cluster.manifests, cluster.unanswered)
    before, after = decide(fewer).version, decide(cluster).version
    if before is not None:
        assert after is not None
        assert recency(after) >= recency(before)


@given(clusters())
def test_assessment_of_each_container_agrees_with_the_choice(cluster: Cluster) -> None:
    """What the operator's listing calls recoverable is what recovery would take."""
    evidence = Evidence(cluster.inventories, cluster.unanswered)
    for of in set(evidence.by_version) | set(cluster.manifests):
        found = evidence.assess(of, cluster.manifests.get(of))
        assert found.recoverable == cluster.recoverable(of)
        if of in cluster.manifests:
            assert found.min_copies == min(map(len, cluster.matching_holders(of).values()))
            assert found.size_bytes == sum(item.size for item in cluster.manifests[of].entries)
