"""The odds of docs/placement.md: what is counted in blocks and along a circle is what brute force counts."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.survival import MAX_BLOCK, STRATEGIES, _along_a_circle, survival, table
from replicator.decide.placement import strategy

SOURCE = Path(__file__).parents[2]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("replicas", [0, 1, 2, 3])
def test_brute_force_counts_the_same(name: str, replicas: int) -> None:
    for nodes in range(2, 11):
        members = {f"n{i:05}": () for i in range(nodes)}
        buddies = strategy(name).arrange(members, replicas).buddies
        for lost in range(nodes + 1):
            left = sum(
                all({owner, *chosen} - set(gone) for owner, chosen in buddies.items())
                for gone in itertools.combinations(members, lost)
            )
            assert survival(name, nodes, replicas, lost) == Fraction(left, math.comb(nodes, lost))


def test_a_circle_is_counted_as_its_sets_are() -> None:
    for nodes, replicas in itertools.product(range(4, 12), (1, 2)):
        for lost in range(nodes):
            rows = [[(place + i) % nodes for i in range(replicas + 1)] for place in range(nodes)]
            left = sum(
                not any(set(row) <= set(gone) for row in rows) for gone in itertools.combinations(range(nodes), lost)
            )
            assert _along_a_circle(nodes, replicas, lost) == left
    assert MAX_BLOCK < 64


def test_the_document_shows_what_the_program_prints() -> None:
    assert table() in (SOURCE / "docs" / "placement.md").read_text()


def test_small_groups_are_never_worse() -> None:
    for nodes, replicas, lost in itertools.product((8, 64), (1, 2), (2, 3, 4)):
        group, *others = (survival(name, nodes, replicas, lost) for name in STRATEGIES)
        assert all(group >= other for other in others)
