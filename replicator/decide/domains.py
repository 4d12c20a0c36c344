"""Failure domains: what is lost together, as labels of nodes say it (zone, rack, slice), outermost first.

A node's labels are pairs (level, value). Values of an inner level count within the outer one only: rack 1 of zone a is
not rack 1 of zone b. A node without a label at a level is in one domain with all others that have none: nothing says
that they are apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from replicator.decide.types import counted, listed
from replicator.errors import ConfigError
from replicator.ids import Labels

Clash = tuple[int, ...]
"""Pairs of nodes that share a domain: how many at each level, outermost first. The lesser tuple is the better one."""


class Domains:
    """Where every node is.

    Args:
        labels: of each node, by its id.

    Raises:
        ConfigError: two nodes have their levels in contradicting orders.
    """

    def __init__(self, labels: Mapping[str, Labels]) -> None:
        self.levels = _levels(labels)
        values = {node: dict(pairs) for node, pairs in labels.items()}
        self.paths: dict[str, tuple[str, ...]] = {
            node: tuple(of.get(level, "") for level in self.levels) for node, of in values.items()
        }

    def in_order(self, nodes: Iterable[str]) -> list[str]:
        """The nodes so that those of a domain, of whatever level, stand together."""
        return sorted(nodes, key=lambda node: (self.paths[node], node))

    def shared(self, one: str, other: str) -> int:
        """How many levels, counted from the outermost, the two are together in."""
        if not self.levels:
            return 0
        depth = 0
        for mine, theirs in zip(self.paths[one], self.paths[other], strict=True):
            if mine != theirs:
                break
            depth += 1
        return depth

    def clash(self, node: str, others: Iterable[str]) -> Clash:
        """How often `node` shares a domain with one of `others`, by level."""
        if not self.levels:
            return ()
        found = [0] * len(self.levels)
        for other in others:
            if other != node:
                for level in range(self.shared(node, other)):
                    found[level] += 1
        return tuple(found)

    def why_together(self, owner: str, holders: Sequence[str]) -> str:
        """Why an owner and the holders of its copies are not all in domains of their own; empty when they are."""
        nodes = (owner, *holders)
        for depth, level in enumerate(self.levels):
            shared = Counter(self.paths[node][: depth + 1] for node in nodes)
            path, most = max(shared.items(), key=lambda item: (item[1], item[0]))
            if most == 1:
                continue
            together = [node for node in nodes if self.paths[node][: depth + 1] == path]
            sizes = Counter(one[: depth + 1] for one in self.paths.values())
            place = f"{level} {path[-1]!r}" if path[-1] else f"one domain, having no label {level!r}"
            if len(sizes) < len(nodes):
                why = f"the job has {counted(len(sizes), level)} for {len(nodes)} copies"
            else:
                why = f"{sizes[path]} of the job's {len(self.paths)} nodes are there"
            apart = self._apart_below(together, depth)
            return (
                f"Copies of what node {owner} writes are not all apart: {listed(together)} are in {place}, "
                f"because {why}{apart}. What takes all of it away takes these copies away together."
            )
        return ""

    def _apart_below(self, nodes: Sequence[str], depth: int) -> str:
        for inner in range(depth + 1, len(self.levels)):
            if len({self.paths[node][: inner + 1] for node in nodes}) == len(nodes):
                return f"; each has a {self.levels[inner]} of its own there"
        return ""


def _levels(labels: Mapping[str, Labels]) -> tuple[str, ...]:
    """All levels in an order that has those of every node in theirs."""
    first: dict[tuple[str, ...], str] = {}
    for node in sorted(labels):
        first.setdefault(tuple(level for level, _ in labels[node]), node)
    order: TopologicalSorter[str] = TopologicalSorter()
    for levels in sorted(first):
        for level, outer in zip(levels, (None, *levels), strict=False):
            order.add(level, *(() if outer is None else (outer,)))
    try:
        return tuple(order.static_order())
    except CycleError:
        told = listed([f"node {node} has {', '.join(levels)}" for levels, node in first.items() if levels])
        raise ConfigError(
            f"labels: the nodes contradict each other in which level is the outer one ({told}, outermost first); give "
            "all nodes the same order, with domain_levels if need be"
        ) from None
