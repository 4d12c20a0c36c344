"""One circle of all nodes, kept as it is while nodes come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replicator.decide.domains import Clash, Domains

# Gaps of the circle that are tried for a newcomer.
MAX_GAPS = 128


def mend(previous: Sequence[str], nodes: Iterable[str], window: int, domains: Domains) -> tuple[str, ...]:
    """The circle for the nodes that are there now: a newcomer takes the place of one who left, others the best gap.

    Args:
        window: copies of a node go to so many nodes after it.
    """
    here = set(nodes)
    newcomers = domains.in_order(here.difference(previous))
    circle: list[str | None] = [node if node in here else None for node in previous]
    for place, node in enumerate(circle):
        if node is None and newcomers:
            near = _near(circle, place, window)
            best = min(range(len(newcomers)), key=lambda i: (domains.clash(newcomers[i], near), i))
            circle[place] = newcomers.pop(best)
    mended = [node for node in circle if node is not None]
    for node in newcomers:
        mended.insert(_best_gap(mended, node, window, domains), node)
    return tuple(mended)


def _near(circle: Sequence[str | None], place: int, window: int) -> list[str]:
    around = range(place - window, place + window + 1)
    found = {circle[one % len(circle)] for one in around if one != place}
    return [node for node in found if node is not None]


def _best_gap(circle: Sequence[str], node: str, window: int, domains: Domains) -> int:
    """Before which place the node clashes least with those around it; of equal ones the last, behind all others."""
    if not circle:
        return 0
    step = max(1, len(circle) // MAX_GAPS)

    def clash(gap: int) -> Clash:
        around = {circle[(gap + one) % len(circle)] for one in range(-window, window)}
        return domains.clash(node, around)

    return min(range(len(circle), 0, -step), key=clash)
