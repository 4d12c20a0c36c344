"""How the decisions grow with the size of a job: counted in lines run and in names compared, not in time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from benchmarks.simulated import cluster, labelled
from replicator.decide.choose_step import choose_step
from replicator.decide.placement import STRATEGIES, strategy
from replicator.decide.types import NodeInventory
from replicator.ids import NodeAddress, NodeIdentity

SMALL, LARGE = 48, 192
# Four times as many nodes; sorting adds a little to it, and anything quadratic would be sixteen.
MOST = 4 * 1.5


class Name(str):
    """A node id that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)  # type: ignore[no-any-return]

    __hash__ = str.__hash__


def lines_of(work: Callable[[], Any]) -> int:
    """How many lines of the decisions are run."""
    number = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal number
        if "decide" not in frame.f_code.co_filename:
            return None
        number += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return number


def lookup_of(nodes: int) -> Callable[[], Any]:
    """The newest step cannot be restored and the one before can: everything is looked at twice."""
    placement = strategy("group").arrange(labelled(nodes), 1)
    inventories, manifests = cluster(nodes, placement, steps=2, lost=0)
    newest = max(manifests)
    (*entries, last) = manifests[newest].entries
    manifests[newest] = replace(manifests[newest], entries=(*entries, replace(last, crc32c=1)))
    # An object that everybody holds, as what is copied to all nodes is.
    everywhere = inventories[0].containers[0].objects
    inventories = [
        NodeInventory(
            NodeAddress(NodeIdentity(one.node.node_id, 1), one.node.grpc_address),
            (replace(one.containers[0], objects={**one.containers[0].objects, **everywhere}), one.containers[1]),
        )
        for one in inventories
    ]
    return lambda: choose_step(inventories, manifests)


def test_choosing_a_step_grows_with_the_number_of_copies() -> None:
    small, large = lines_of(lookup_of(SMALL)), lines_of(lookup_of(LARGE))
    assert small < large <= MOST * small


def test_holders_of_one_object_are_not_compared_with_each_other() -> None:
    counts = []
    for nodes in (SMALL, LARGE):
        placement = strategy("group").arrange(labelled(nodes), 1)
        inventories, manifests = cluster(nodes, placement, steps=1, lost=0)
        everywhere = inventories[0].containers[0].objects
        heard = [
            NodeInventory(
                one.node, tuple(replace(held, objects={**held.objects, **everywhere}) for held in one.containers)
            )
            for one in inventories
        ]
        for one in heard:
            object.__setattr__(one.node.identity, "node_id", Name(one.node.node_id))
        Name.compared = 0
        assert choose_step(heard, manifests).version is not None
        counts.append(Name.compared)
    assert 0 < counts[0] < counts[1] <= MOST * counts[0]


@pytest.mark.parametrize("name", [one for one in STRATEGIES if one != "explicit"])
def test_placement_grows_with_the_number_of_nodes(name: str) -> None:
    """A fresh start, and one node replaced by a node of another rack."""
    chosen = strategy(name)
    fresh, again = [], []
    for nodes in (SMALL, LARGE):
        members = labelled(nodes)
        fresh.append(lines_of(lambda members=members: chosen.arrange(members, 2)))  # type: ignore[misc]
        before = chosen.arrange(members, 2).agreed
        first, *_, last = sorted(members)
        now = {**{node: of for node, of in members.items() if node != first}, "new": members[last]}
        again.append(lines_of(lambda now=now, before=before: chosen.arrange(now, 2, before)))  # type: ignore[misc]
    assert fresh[0] < fresh[1] <= MOST * fresh[0]
    assert again[0] < again[1] <= MOST * again[0]
