"""Cutting the nodes of a job into small blocks that keep copies for each other, over failure domains and over time.

A fresh cut is one deal of cards: nodes in the order of their domains (of their names, where there are no labels: those
are often next to each other in a rack), dealt to the blocks in turn. So a domain of d nodes has at most
ceil(d / blocks) of them in any block, at every level at once, and no cut has fewer.

A cut that is there already is kept as far as the nodes are: a newcomer takes the place of one who left, the rest is
mended around the places that changed, and then nodes are exchanged between blocks only where that spreads them better.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from replicator.decide.domains import Clash, Domains

Blocks = tuple[tuple[str, ...], ...]
# Of one placement: exchanges that are weighed. What is left then is spread less well than could be.
MAX_WEIGHED = 200_000


def deal(nodes: Sequence[str], least: int, domains: Domains) -> Blocks:
    """Blocks of at least `least` nodes and less than twice as many; a single one when there are fewer nodes."""
    order = domains.in_order(nodes)
    number = max(1, len(order) // least)
    if not domains.levels:
        # What is left over makes one block larger: sets of nodes that must not be lost together are fewest then.
        whole = number * least
        blocks = [order[start:whole:number] for start in range(number)]
        blocks[-1] += order[whole:]
        return tuple(map(tuple, blocks))
    return tuple(tuple(order[start::number]) for start in range(number))


def refit(previous: Blocks, nodes: Iterable[str], least: int, domains: Domains) -> Blocks:
    """The blocks of `previous` for the nodes that are there now."""
    return _Refit(previous, nodes, least, domains).blocks()


@dataclass(slots=True)
class _Block:
    """`places` in their order; None where a node left."""

    places: list[str | None]
    nodes: list[str] = field(default_factory=list)

    def close(self) -> None:
        self.nodes = [node for node in self.places if node is not None]


class _Refit:
    def __init__(self, previous: Blocks, nodes: Iterable[str], least: int, domains: Domains) -> None:
        self._domains = domains
        self._least = least
        here = set(nodes)
        self._blocks = [_Block([node if node in here else None for node in block]) for block in previous]
        self._pool = _Pool(domains, here.difference(*previous) if previous else here)
        self._fill_places()
        self._form_blocks()
        self._exchange()

    def blocks(self) -> Blocks:
        return tuple(tuple(block.nodes) for block in self._blocks)

    def _fill_places(self) -> None:
        """Newcomers take the places of those who left."""
        for block in self._blocks:
            for place, node in enumerate(block.places):
                if node is None and self._pool:
                    block.places[place] = self._pool.take([one for one in block.places if one is not None])
            block.close()

    def _form_blocks(self) -> None:
        """Who has no full block, together with what larger blocks have to spare, makes new ones; a rest is added."""
        least = self._least
        small = [block for block in self._blocks if len(block.nodes) < least]
        self._blocks = [block for block in self._blocks if len(block.nodes) >= least]
        for block in small:
            self._pool.add(block.nodes)
        spare = sum(len(block.nodes) - least for block in self._blocks)
        number = (len(self._pool) + spare) // least
        if number or not self._blocks:
            while len(self._pool) < number * least:
                self._give_one()
            pooled = self._pool.take_all()
            made = deal(pooled[: number * least] if self._blocks else pooled, least, self._domains)
            left = set(pooled).difference(*made)
            self._blocks += [_Block([], list(block)) for block in made if block]
            self._pool.add(left)
        while self._pool:
            self._add_one(self._pool.first())

    def _give_one(self) -> None:
        """The largest block gives the node that it spreads worst."""
        block = max(self._blocks, key=lambda one: len(one.nodes))
        clashes = [self._domains.clash(node, block.nodes) for node in block.nodes]
        place = max(range(len(clashes)), key=lambda i: (clashes[i], i))
        self._pool.add([block.nodes.pop(place)])

    def _add_one(self, node: str) -> None:
        """To the block where it clashes least; of those the largest, for a few large ones lose less than many."""
        room = [block for block in self._blocks if len(block.nodes) < 2 * self._least - 1] or self._blocks
        block = min(room, key=lambda one: (self._domains.clash(node, one.nodes), -len(one.nodes)))
        block.nodes.append(node)

    def _exchange(self) -> None:
        """Exchange nodes between blocks while that spreads them better, from the outermost level on."""
        if len(self._blocks) < 2:
            return
        weighed = 0
        for level in range(len(self._domains.levels)):
            counts = _Counts(self._domains, level, self._blocks)
            crowded = deque(counts.crowded())
            while crowded and weighed < MAX_WEIGHED:
                mine = crowded.popleft()
                for node in list(self._blocks[mine].nodes):
                    found, tried = self._better(node, mine, counts, MAX_WEIGHED - weighed)
                    weighed += tried
                    if found is not None:
                        theirs, other = found
                        _swap(self._blocks[mine], node, self._blocks[theirs], other)
                        counts.moved(node, mine, theirs)
                        counts.moved(other, theirs, mine)
                        crowded += [mine, theirs]
                        break

    def _better(self, node: str, mine: int, counts: _Counts, limit: int) -> tuple[tuple[int, str] | None, int]:
        """An exchange of `node` of block `mine` that lessens the clash (block, node), and how many were weighed."""
        tried = 0
        block = self._blocks[mine].nodes
        for theirs in counts.roomier(node, mine):
            there = self._blocks[theirs].nodes
            for other in there:
                if tried >= limit:
                    return None, tried
                tried += 1
                if self._gain(node, block, other, there) < (0,) * len(self._domains.levels):
                    return (theirs, other), tried
        return None, tried

    def _gain(self, node: str, block: Sequence[str], other: str, there: Sequence[str]) -> Clash:
        """How the pairs that share a domain change when the two are exchanged; negative is better."""
        clash = self._domains.clash
        after = _sum(
            clash(other, [one for one in block if one != node]), clash(node, [one for one in there if one != other])
        )
        return tuple(new - old for new, old in zip(after, _sum(clash(node, block), clash(other, there)), strict=True))


class _Counts:
    """How many nodes of each domain of one level every block has."""

    def __init__(self, domains: Domains, level: int, blocks: Sequence[_Block]) -> None:
        self._paths = domains.paths
        self._depth = level + 1
        self._blocks = len(blocks)
        self._of: list[Counter[tuple[str, ...]]] = [Counter(map(self._domain, block.nodes)) for block in blocks]
        # For each domain: the blocks that have so many nodes of it. Those without are not listed.
        self._with: dict[tuple[str, ...], dict[int, set[int]]] = {}
        for place, counter in enumerate(self._of):
            for domain, number in counter.items():
                self._with.setdefault(domain, {}).setdefault(number, set()).add(place)

    def crowded(self) -> list[int]:
        """The blocks with at least two nodes more of a domain than some other block has."""
        return [
            place
            for place, counter in enumerate(self._of)
            if any(number - self._fewest(domain) >= 2 for domain, number in counter.items())
        ]

    def roomier(self, node: str, mine: int) -> Iterable[int]:
        """Blocks with at least two nodes fewer of the node's domain than block `mine`."""
        domain = self._domain(node)
        number = self._of[mine][domain]
        if number - self._fewest(domain) < 2:
            return
        for place in range(self._blocks):
            if number - self._of[place][domain] >= 2:
                yield place

    def moved(self, node: str, source: int, target: int) -> None:
        domain = self._domain(node)
        having = self._with[domain]
        for place, change in ((source, -1), (target, 1)):
            having.get(self._of[place][domain], set()).discard(place)
            self._of[place][domain] += change
            if self._of[place][domain]:
                having.setdefault(self._of[place][domain], set()).add(place)

    def _domain(self, node: str) -> tuple[str, ...]:
        return self._paths[node][: self._depth]

    def _fewest(self, domain: tuple[str, ...]) -> int:
        having = {number: places for number, places in self._with[domain].items() if places}
        return min(having) if sum(map(len, having.values())) == self._blocks else 0


class _Pool:
    """Nodes without a block, by domain, so that the best for a block is found without looking at each."""

    def __init__(self, domains: Domains, nodes: Iterable[str]) -> None:
        self._domains = domains
        self._by_path: dict[tuple[str, ...], deque[str]] = {}
        self._size = 0
        self.add(nodes)

    def __len__(self) -> int:
        return self._size

    def add(self, nodes: Iterable[str]) -> None:
        for node in self._domains.in_order(nodes):
            self._by_path.setdefault(self._domains.paths[node], deque()).append(node)
            self._size += 1

    def take(self, block: Sequence[str]) -> str:
        """The node that clashes least with a block; of those one of the fullest domain."""
        path = min(
            self._by_path, key=lambda one: (self._domains.clash(self._by_path[one][0], block), -len(self._by_path[one]))
        )
        return self._pop(path)

    def first(self) -> str:
        return self._pop(min(self._by_path))

    def take_all(self) -> list[str]:
        nodes = [node for path in sorted(self._by_path) for node in self._by_path[path]]
        self._by_path, self._size = {}, 0
        return nodes

    def _pop(self, path: tuple[str, ...]) -> str:
        node = self._by_path[path].popleft()
        if not self._by_path[path]:
            del self._by_path[path]
        self._size -= 1
        return node


def settle(
    block: Sequence[str], holders: Callable[[Sequence[str]], Sequence[Sequence[str]]], domains: Domains
) -> tuple[str, ...]:
    """The nodes of a small block in an order in which the copies of each share as few domains as exchanges can reach.

    An owner with its holders counts, and those among each other: two copies in one rack are as one, whoever has them.

    Args:
        holders: of the node at each place, for an order.
    """
    best = list(block)

    def cost(order: Sequence[str]) -> Clash:
        total: Clash = (0,) * len(domains.levels)
        for owner, chosen in zip(order, holders(order), strict=True):
            copies = (owner, *chosen)
            for place, node in enumerate(chosen, 1):
                total = _sum(total, domains.clash(node, copies[:place]))
        return total

    least = cost(best)
    improved = any(least)
    while improved:
        improved = False
        for one in range(len(best)):
            for other in range(one + 1, len(best)):
                order = list(best)
                order[one], order[other] = order[other], order[one]
                if cost(order) < least:
                    best, least, improved = order, cost(order), True
    return tuple(best)


def _swap(block: _Block, node: str, other_block: _Block, other: str) -> None:
    block.nodes[block.nodes.index(node)] = other
    other_block.nodes[other_block.nodes.index(other)] = node


def _sum(one: Clash, other: Clash) -> Clash:
    return tuple(a + b for a, b in zip(one, other, strict=True))
