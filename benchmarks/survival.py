"""`python -m benchmarks.survival`: how likely it is that every object survives the loss of k nodes out of N at once.

Counted exactly, not drawn: of all sets of k nodes, those that leave a copy of everything. Blocks of a placement are
independent of each other, so their counts are multiplied; a ring is counted along its circle.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from replicator.decide.placement import Placement, strategy

SIZES = (8, 64, 512)
REPLICAS = (1, 2)
LOST = (2, 3, 4, 8, 16)
STRATEGIES = ("group", "pairwise", "ring")
# Blocks of more nodes are not counted by looking at each of their subsets.
MAX_BLOCK = 16


def survival(name: str, nodes: int, replicas: int, lost: int) -> Fraction:
    """The share of all sets of `lost` nodes of which the loss leaves the owner or a buddy of every object."""
    placement = strategy(name).arrange({f"n{i:05}": () for i in range(nodes)}, replicas)
    return Fraction(surviving(placement, nodes, lost), math.comb(nodes, lost))


def surviving(placement: Placement, nodes: int, lost: int) -> int:
    """How many sets of `lost` nodes leave a copy of everything."""
    if placement.strategy == "ring" and nodes > MAX_BLOCK:
        return _along_a_circle(nodes, placement.replicas, lost)
    counts = [1]
    known: dict[int, list[int]] = {}
    for block in placement.blocks:
        # Blocks of one size are alike.
        if len(block) not in known:
            known[len(block)] = _of_a_block(block, placement.buddies)
        counts = _multiplied(counts, known[len(block)], lost)
    return counts[lost] if lost < len(counts) else 0


def _of_a_block(block: Sequence[str], buddies: Mapping[str, Collection[str]]) -> list[int]:
    """By the number of lost nodes, how many sets of them leave a copy of everything in the block."""
    fatal = [frozenset((owner, *buddies[owner])) for owner in block]
    return [
        sum(not any(copies <= set(chosen) for copies in fatal) for chosen in itertools.combinations(block, number))
        for number in range(len(block) + 1)
    ]


def _multiplied(one: Sequence[int], other: Sequence[int], most: int) -> list[int]:
    result = [0] * min(len(one) + len(other) - 1, most + 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            if i + j < len(result):
                result[i + j] += a * b
    return result


def _along_a_circle(nodes: int, replicas: int, lost: int) -> int:
    """Sets of `lost` places of a circle with no `replicas` + 1 of them in a row.

    Cut the circle before its first place that is not lost: the lost ones before it come back at the end.
    """
    total = 0
    for before in range(min(replicas, lost) + 1):
        # After `before` lost places one is there; runs[r][k]: ways in which the last r are lost, and k altogether.
        runs = [[0] * (lost + 1) for _ in range(replicas + 1)]
        runs[0][before] = 1
        for _ in range(nodes - before - 1):
            stays = [sum(runs[run][number] for run in range(replicas + 1)) for number in range(lost + 1)]
            runs = [stays, *([0, *runs[run][:-1]] for run in range(replicas))]
        total += sum(runs[run][lost] for run in range(replicas + 1) if run + before <= replicas)
    return total


def percent(share: Fraction) -> str:
    """With as many digits as tell it from certainty."""
    if share in (0, 1):
        return f"{int(share) * 100}%"
    digits = max(1, -math.floor(math.log10(100 * (1 - share))) + 1) if share > Fraction(9, 10) else 1
    return f"{float(100 * share):.{digits}f}%"


def table() -> str:
    """The rows of docs/placement.md."""
    lines = ["| nodes | replicas | lost at once | " + " | ".join(f"`{name}`" for name in STRATEGIES) + " |"]
    lines.append("|---" * (3 + len(STRATEGIES)) + "|")
    for replicas, nodes, lost in itertools.product(REPLICAS, SIZES, LOST):
        if replicas < lost < nodes:
            shares = [percent(survival(name, nodes, replicas, lost)) for name in STRATEGIES]
            lines.append(f"| {nodes} | {replicas} | {lost} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
