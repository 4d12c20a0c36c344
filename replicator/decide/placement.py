"""Where replicas go: the buddies of each node, from the members of a job, their failure domains and a strategy.

Whoever opens a job's epoch decides once, with the placement of the epoch before in hand, and every member is given the
result (`arrange` here, `restore` there). Nothing depends on the order in which members are listed.

    group      small groups whose members keep each other's copies: few sets of nodes whose loss together loses anything
    pairwise   partners keep each other's copies, another partner for each replica
    ring       the next nodes of one circle of all nodes
    explicit   a map from nodes to their buddies
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from replicator.decide.blocks import Blocks, deal, refit, settle
from replicator.decide.domains import Domains
from replicator.decide.ring import mend
from replicator.decide.types import counted, listed
from replicator.errors import ConfigError, NotFoundError
from replicator.ids import AgreedPlacement, Labels

DEFAULT_STRATEGY = "group"
# Of the nodes that stand in for lost buddies: how many are chosen with all holders before them in view.
MAX_STAND_INS = 8

BuddyMap = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Placement:
    """The buddies of every member.

    `buddies` follows from `blocks`, except with the strategy "explicit", which has none. With the other ones, where
    there are nodes enough, every node has `replicas` buddies and is the buddy of as many.
    """

    strategy: str
    replicas: int
    blocks: Blocks
    buddies: Mapping[str, tuple[str, ...]] = field(repr=False)

    @property
    def agreed(self) -> AgreedPlacement:
        """What is carried between agents and kept over epochs, for `restore`."""
        explicit = () if self.strategy in BLOCKED else tuple(sorted(self.buddies.items()))
        return AgreedPlacement(self.strategy, self.blocks, explicit)

    def buddies_of(self, node_id: str) -> tuple[str, ...]:
        """The nodes that keep copies of what `node_id` owns.

        Raises:
            NotFoundError: it is not a member.
        """
        try:
            return self.buddies[node_id]
        except KeyError:
            raise NotFoundError(
                f"node {node_id} is not among the {len(self.buddies)} members of the job; let it join the job first"
            ) from None


class Strategy(Protocol):
    """A way to choose buddies. Pure: the same arguments give the same placement on every machine."""

    name: str

    def arrange(
        self, members: Mapping[str, Labels], replicas: int, previous: AgreedPlacement | None = None
    ) -> Placement:
        """The placement of a job's epoch.

        Args:
            members: the labels of each node, outermost level first.
            replicas: copies wanted beside the owner's.
            previous: of the epoch before, of whatever strategy; changed as little as possible.

        Raises:
            ConfigError: `replicas` is negative, labels contradict each other, or a given map cannot be used.
        """
        ...

    def restore(self, members: Mapping[str, Labels], replicas: int, agreed: AgreedPlacement) -> Placement:
        """The placement that `arrange` gave somewhere else, from what was carried of it.

        Raises:
            ConfigError: it is not one of these members.
        """
        ...


class _Blocked:
    """Blocks of nodes, and inside a block a rule that goes by places."""

    name = ""

    def arrange(
        self, members: Mapping[str, Labels], replicas: int, previous: AgreedPlacement | None = None
    ) -> Placement:
        _check_replicas(replicas)
        domains = Domains(members)
        before = previous.groups if previous is not None and previous.strategy == self.name else ()
        kept = sum(node in members for block in before for node in block)
        if 2 * kept < len(members):
            return self._placement(self._fresh(members, replicas, domains), replicas)
        return self._placement(self._refit(before, members, replicas, domains), replicas)

    def restore(self, members: Mapping[str, Labels], replicas: int, agreed: AgreedPlacement) -> Placement:
        _check_replicas(replicas)
        blocks = agreed.groups
        placed = Counter(node for block in blocks for node in block)
        if set(placed) != set(members) or (placed and max(placed.values()) > 1):
            wrong = sorted({node for node, number in placed.items() if number > 1} | set(placed) ^ set(members))
            raise ConfigError(
                f"placement {self.name!r}: expected every member of the job in one group, found otherwise for "
                f"{listed(wrong)}; let all ranks enter the job with what was opened"
            )
        return self._placement(blocks, replicas)

    def _placement(self, blocks: Blocks, replicas: int) -> Placement:
        buddies: dict[str, tuple[str, ...]] = {}
        for block in blocks:
            buddies.update(zip(block, self._holders(block, replicas), strict=True))
        return Placement(self.name, replicas, blocks, buddies)

    def _fresh(self, members: Mapping[str, Labels], replicas: int, domains: Domains) -> Blocks:
        blocks = deal(list(members), self._least(replicas), domains)
        return tuple(
            block
            if len(block) == replicas + 1
            else settle(block, lambda order: self._holders(order, replicas), domains)
            for block in blocks
        )

    def _refit(self, before: Blocks, members: Mapping[str, Labels], replicas: int, domains: Domains) -> Blocks:
        return refit(before, members, self._least(replicas), domains)

    def _least(self, replicas: int) -> int:
        return replicas + 1

    def _holders(self, order: Sequence[str], replicas: int) -> list[tuple[str, ...]]:
        """For each place of a block, the nodes that follow in a circle."""
        number = min(replicas, len(order) - 1)
        twice = (*order, *order)
        return [tuple(twice[place + 1 : place + 1 + number]) for place in range(len(order))]


class Group(_Blocked):
    """Groups of `replicas` + 1 nodes; what is left over makes some larger, to at most 2 * replicas + 1."""

    name = "group"


class Pairwise(_Blocked):
    """Blocks of the least power of two above `replicas`: the k-th buddy of place p is at place p XOR k, so that any two
    nodes keep copies for each other or neither does. A larger block, of what is left over, is a circle."""

    name = "pairwise"

    def _least(self, replicas: int) -> int:
        return 1 << replicas.bit_length()

    def _holders(self, order: Sequence[str], replicas: int) -> list[tuple[str, ...]]:
        if len(order) != self._least(replicas):
            return super()._holders(order, replicas)
        return [tuple(order[place ^ k] for k in range(1, replicas + 1)) for place in range(len(order))]


class Ring(_Blocked):
    """One circle of all nodes; neighbours are in different domains where that can be."""

    name = "ring"

    def _fresh(self, members: Mapping[str, Labels], replicas: int, domains: Domains) -> Blocks:
        # Groups one after another: places that are near each other are far apart in the order of the domains.
        return (tuple(node for block in deal(list(members), replicas + 1, domains) for node in block),)

    def _refit(self, before: Blocks, members: Mapping[str, Labels], replicas: int, domains: Domains) -> Blocks:
        return (mend(before[0], members, replicas, domains),)


class Explicit:
    """Buddies as somebody wrote them down: of each node's list, the first `replicas` that are members."""

    name = "explicit"

    def __init__(self, buddies: BuddyMap) -> None:
        self._map = {node: tuple(wanted) for node, wanted in buddies.items()}

    def arrange(
        self, members: Mapping[str, Labels], replicas: int, previous: AgreedPlacement | None = None
    ) -> Placement:
        _check_replicas(replicas)
        Domains(members)
        return Placement(self.name, replicas, (), {node: self._of(node, members, replicas) for node in sorted(members)})

    def restore(self, members: Mapping[str, Labels], replicas: int, agreed: AgreedPlacement) -> Placement:
        return Explicit(dict(agreed.buddies)).arrange(members, replicas)

    def _of(self, node: str, members: Mapping[str, Labels], replicas: int) -> tuple[str, ...]:
        wanted = self._map.get(node)
        if wanted is None:
            raise ConfigError(f"placement_map: node {node} is a member of the job and has no buddies in it; add them")
        if node in wanted or len(set(wanted)) < len(wanted):
            raise ConfigError(
                f"placement_map: expected other nodes as buddies of {node}, each once, found {listed(list(wanted))}"
            )
        here = tuple(one for one in wanted if one in members)[:replicas]
        needed = min(replicas, len(members) - 1)
        if len(here) < needed:
            raise ConfigError(
                f"placement_map: expected at least {counted(needed, 'node')} of the job among the buddies of {node}, "
                f"found {len(here)} among {listed(list(wanted)) or 'none'}; name more nodes"
            )
        return here


BLOCKED: Mapping[str, Strategy] = {one.name: one for one in (Group(), Pairwise(), Ring())}
STRATEGIES = (*BLOCKED, Explicit.name)


def strategy(name: str, buddies: BuddyMap | None = None) -> Strategy:
    """The built-in strategy of that name; `buddies` is the map of "explicit", and of no other.

    Raises:
        ConfigError: there is none of that name, or a map is missing or one too many.
    """
    if name == Explicit.name:
        if not buddies:
            raise ConfigError("placement = 'explicit' needs a placement_map: the buddies of every node")
        return Explicit(buddies)
    if buddies:
        raise ConfigError(f"placement_map is for placement = 'explicit', found {name!r}; leave one of them out")
    found = BLOCKED.get(name)
    if found is None:
        raise ConfigError(f"placement: expected one of {', '.join(STRATEGIES)}, found {name!r}")
    return found


def restore(agreed: AgreedPlacement, members: Mapping[str, Labels], replicas: int) -> Placement:
    """The agreed placement, from what was carried of it. Raises ConfigError when it is not of these members."""
    chosen = strategy(agreed.strategy, dict(agreed.buddies) if agreed.strategy == Explicit.name else None)
    return chosen.restore(members, replicas, agreed)


@dataclass(frozen=True, slots=True)
class Buddies:
    """The nodes that keep a node's objects, and sentences about what is not as it was asked for."""

    node_ids: tuple[str, ...]
    note: str = ""


class Preference:
    """In which order members hold what a node owns: its agreed buddies, then those that stand in for lost ones.

    Of those, the ones that share the fewest domains with the owner and the holders before them come first.
    """

    def __init__(self, placement: Placement, labels: Mapping[str, Labels]) -> None:
        self._placement = placement
        self._labels = labels

    def __call__(self, owner: str, members: Sequence[str], replicas: int) -> Buddies:
        """The first `replicas` of the other members (all, when there are fewer)."""
        _check_replicas(replicas)
        here = sorted(set(members) - {owner})
        chosen = [node for node in self._placement.buddies.get(owner, ()) if node in members][:replicas]
        number = min(replicas, len(here))
        if len(chosen) < number:
            domains = Domains({node: self._labels.get(node, ()) for node in (owner, *here)})
            # From the owner on, so that not everybody turns to the same nodes.
            start = bisect(here, owner)
            rest = [node for node in (*here[start:], *here[:start]) if node not in chosen]
            while len(chosen) < number and len(chosen) < len(self._placement.buddies.get(owner, ())) + MAX_STAND_INS:
                best = min(range(len(rest)), key=lambda i: (domains.clash(rest[i], (owner, *chosen)), i))
                chosen.append(rest.pop(best))
            chosen += sorted(rest, key=lambda node: domains.shared(node, owner))[: number - len(chosen)]
        short = len(chosen) < replicas
        return Buddies(tuple(chosen), _too_few(len(here) + 1, replicas) if short else "")


def buddies(node_id: str, members: Sequence[str], replicas: int) -> Buddies:
    """The buddies of a node in a fresh start of the default strategy without labels.

    Raises:
        NotFoundError: `node_id` is not a member.
        ConfigError: `replicas` is negative.
    """
    labels = dict.fromkeys(sorted(set(members)), ())
    placement = _unlabelled(tuple(labels), replicas)
    return Buddies(placement.buddies_of(node_id), note(placement, node_id, labels))


@lru_cache(maxsize=8)
def _unlabelled(members: tuple[str, ...], replicas: int) -> Placement:
    return BLOCKED[DEFAULT_STRATEGY].arrange(dict.fromkeys(members, ()), replicas)


def note(placement: Placement, node_id: str, members: Mapping[str, Labels]) -> str:
    """What the operator should know of one node's buddies, in words; empty when all is as it was asked for.

    Raises:
        NotFoundError: it is not a member.
    """
    holders = placement.buddies_of(node_id)
    sentences = []
    if len(holders) < placement.replicas:
        sentences.append(_too_few(len(members), placement.replicas))
    if holders:
        sentences.append(Domains(members).why_together(node_id, holders))
    kept = Counter(holder for chosen in placement.buddies.values() for holder in chosen)
    if kept and max(kept.values()) > placement.replicas:
        node, most = max(kept.items(), key=lambda item: (item[1], item[0]))
        sentences.append(
            f"The map is uneven: node {node} keeps the copies of {most} nodes, {placement.replicas} would do."
        )
    return " ".join(sentence for sentence in sentences if sentence)


def _check_replicas(replicas: int) -> None:
    if replicas < 0:
        raise ConfigError(f"replicas: expected 0 or more, found {replicas}")


def _too_few(nodes: int, replicas: int) -> str:
    asked = f"{replicas} replica{'s' if replicas > 1 else ''} of every object"
    if nodes == 1:
        return (
            f"The job has a single node, so none of the {asked} that were asked for can be made: "
            "if this node is lost, its checkpoints in memory are lost too."
        )
    return (
        f"The job has {nodes} nodes, too few for {asked} beside the owner's: "
        f"every object is copied to all {nodes - 1} other nodes."
    )
