"""Which lost copies are made again, by whom and where: what a node is to do after others died, left or came back empty.

Every node that holds a copy can compute the plan. Who acts on a part of it follows from the same answers, so an object
is copied by one node; a plan from other answers, made at the same time, does no more harm than a question too many.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from replicator.decide.placement import Buddies, buddies
from replicator.decide.types import Manifest, ManifestEntry, NodeInventory, counted, describe, listed, recency
from replicator.ids import ContainerVersion

Place = Callable[[str, Sequence[str], int], Buddies]
"""`placement.buddies`, or something that decides in its place: owner, members (the owner among them), replicas."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How the other nodes are, by node id. A node that is in none of these answered and takes copies.

    Attributes:
        members: of the job; only they get copies.
        dead: what they held is lost. Nothing else counts as lost.
        silent: suspect, or they did not answer now. What they are believed to hold counts, and they get nothing.
        leaving: they are being drained: their copies do not count and can be read, and they get nothing.
        closed: they take nothing for now, for instance because they are full. Their copies count.
        refused: copies of these containers were refused by these nodes.
    """

    members: tuple[str, ...]
    dead: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    refused: frozenset[tuple[ContainerVersion, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Move:
    """Objects of one container and one owner that are to be copied to a new holder.

    `sources` are the nodes that have them, verified; the first one is responsible: it offers them, nobody else does.
    """

    version: ContainerVersion
    owner_node_id: str
    names: tuple[str, ...]
    size_bytes: int
    sources: tuple[str, ...]
    new_holder: str
    reason: str

    @property
    def responsible(self) -> str:
        return self.sources[0]


@dataclass(frozen=True, slots=True)
class Short:
    """A committed container of which objects have fewer copies than wanted.

    Attributes:
        objects, size_bytes: those that have fewer, whether or not something is done about it.
        unplaced: of them, for how many there are not enough nodes that could take a copy.
        lost: of them, of how many no copy is left on any node that is not dead.
        exposed: of them, of how many the last copies are on nodes that are leaving.
        owners: of whom these objects are.
    """

    version: ContainerVersion
    objects: int
    size_bytes: int
    unplaced: int
    lost: int
    exposed: int
    owners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """An owner's objects of a container that is not protected, all of which have all copies that were ever wanted.

    `responsible` has them, and says so when the owner cannot.
    """

    version: ContainerVersion
    owner_node_id: str
    responsible: str


@dataclass(frozen=True, slots=True)
class HealingPlan:
    """What is to be done, what is short of copies, and what can be called protected; newest container first.

    `scarce_objects`, `scarce_bytes`: of all containers, what has a copy on every node that stays and still fewer than
    `replicas` + 1, because so few stay. Nothing can be done for it, and it is not short. `scarce`: the containers.
    `believed`: silent nodes that were taken to have what they should, though they have never said so.
    """

    moves: tuple[Move, ...] = ()
    short: tuple[Short, ...] = ()
    whole: tuple[Whole, ...] = ()
    scarce_objects: int = 0
    scarce_bytes: int = 0
    scarce: frozenset[ContainerVersion] = frozenset()
    believed: frozenset[str] = frozenset()


def standing_buddies(
    owner: str, members: Sequence[str], replicas: int, avoided: Collection[str], place: Place = buddies
) -> Buddies:
    """Like `placement.buddies`, with those that are dead or leaving replaced, as far as there are others.

    Those that can stay do: only what an avoided node would have kept goes elsewhere. Where too few others are left, the
    avoided ones are named all the same, for a copy that nobody has must not count as made.

    Raises:
        NotFoundError, ConfigError: like `placement.buddies`.
    """
    chosen = place(owner, members, replicas)
    if not set(chosen.node_ids) & set(avoided):
        return chosen
    kept = [node for node in chosen.node_ids if node not in avoided]
    others = [
        node for node in candidates(owner, members, replicas, place)[1:] if node not in avoided and node not in kept
    ]
    instead = others[: len(chosen.node_ids) - len(kept)]
    missing = len(chosen.node_ids) - len(kept) - len(instead)
    awaited = [node for node in chosen.node_ids if node in avoided][:missing]
    return Buddies((*kept, *instead, *awaited), chosen.note)


def candidates(owner: str, members: Sequence[str], replicas: int, place: Place = buddies) -> tuple[str, ...]:
    """All members in the order in which they hold what `owner` wrote: itself, its buddies, then the others.

    An owner that is no member (any more) comes first all the same.
    """
    nodes = sorted({*members, owner})
    first = place(owner, nodes, replicas).node_ids
    rest = place(owner, nodes, max(replicas, len(nodes) - 1)).node_ids
    return tuple(dict.fromkeys((owner, *first, *rest, *nodes)))


def by_right(owner: str, members: Sequence[str], replicas: int, place: Place = buddies) -> tuple[str, ...]:
    """The first `replicas` + 1 of `candidates`."""
    nodes = sorted({*members, owner})
    first = place(owner, nodes, replicas).node_ids
    if len(first) < min(replicas, len(nodes) - 1):
        return candidates(owner, members, replicas, place)[: replicas + 1]
    return (owner, *first)


def plan_healing(
    manifests: Mapping[ContainerVersion, Manifest],
    inventories: Sequence[NodeInventory],
    standing: Standing,
    *,
    owners: Collection[str] | None = None,
    place: Place = buddies,
) -> HealingPlan:
    """What is to be copied now so that each object of each committed container has `replicas` + 1 copies that count.

    With fewer nodes than that which are neither dead nor leaving, as many copies as there are nodes are enough.
    Left alone are containers without a manifest, and objects of containers that are not protected yet whose owner and
    buddies are all there: the owner is still copying those.

    Args:
        manifests: of the committed containers, of one job.
        inventories: what each node answered, this one too; of silent nodes what they answered last, if anything.
        standing: how the nodes are.
        owners: look at objects of these owners only; None: of all.
        place: who holds what by right.
    """
    plan = _Plan(manifests, inventories, standing, owners, place)
    for version in sorted(manifests, key=lambda version: (recency(version), version.container.job), reverse=True):
        plan.add(version)
    return HealingPlan(
        tuple(plan.moves),
        tuple(plan.short),
        tuple(plan.whole),
        plan.scarce_objects,
        plan.scarce_bytes,
        frozenset(plan.scarce),
        frozenset(plan.believed),
    )


@dataclass(slots=True)
class _Tally:
    """Of one container."""

    objects: int = 0
    size_bytes: int = 0
    unplaced: int = 0
    lost: int = 0
    exposed: int = 0
    owners: dict[str, None] = field(default_factory=dict)


class _Plan:
    def __init__(
        self,
        manifests: Mapping[ContainerVersion, Manifest],
        inventories: Sequence[NodeInventory],
        standing: Standing,
        owners: Collection[str] | None,
        place: Place,
    ) -> None:
        self.moves: list[Move] = []
        self.short: list[Short] = []
        self.whole: list[Whole] = []
        self.scarce_objects = self.scarce_bytes = 0
        self.scarce: set[ContainerVersion] = set()
        self.believed: set[str] = set()
        self._manifests = manifests
        self._standing = standing
        self._owners = owners
        self._place = place
        self._staying = set(standing.members) - standing.dead - standing.leaving
        self._orders: dict[tuple[str, int], tuple[tuple[str, ...], dict[str, int]]] = {}
        self._answers = {
            inventory.node.node_id: {held.version: held for held in inventory.containers}
            for inventory in sorted(inventories, key=lambda inventory: inventory.node)
            if inventory.node.node_id not in standing.dead
        }
        unready = standing.dead | standing.silent | standing.leaving | standing.closed
        # Who did not answer, and is not known to be silent either, was not asked.
        self._takers = [node for node in standing.members if node in self._answers and node not in unready]

    def add(self, version: ContainerVersion) -> None:
        manifest = self._manifests[version]
        tally = _Tally()
        by_owner: dict[str, list[ManifestEntry]] = {}
        for entry in manifest.entries:
            if self._owners is None or entry.owner_node_id in self._owners:
                by_owner.setdefault(entry.owner_node_id, []).append(entry)
        for owner in sorted(by_owner):
            self._add_owner(version, manifest.replicas, owner, by_owner[owner], tally)
        if tally.objects:
            self.short.append(
                Short(
                    version,
                    tally.objects,
                    tally.size_bytes,
                    tally.unplaced,
                    tally.lost,
                    tally.exposed,
                    tuple(tally.owners),
                )
            )

    def _add_owner(
        self, version: ContainerVersion, replicas: int, owner: str, entries: Sequence[ManifestEntry], tally: _Tally
    ) -> None:
        standing = self._standing
        order, place = self._order(owner, replicas)
        by_right = order[: replicas + 1]
        is_protected = any(held[version].is_protected for held in self._answers.values() if version in held)
        takers = [
            node for node in sorted(self._takers, key=place.__getitem__) if (version, node) not in standing.refused
        ]
        everywhere: set[str] | None = None
        enough = min(replicas + 1, len({*standing.members, owner}))
        # Objects of one owner are mostly in the same places: they go in one move.
        moves: dict[tuple[tuple[str, ...], str, int], list[ManifestEntry]] = {}
        for entry in entries:
            holders = self._holders(version, entry, place)
            counting = [node for node in holders if node not in standing.leaving]
            believed = [
                node
                for node in by_right
                if node in standing.silent and node not in self._answers and node not in standing.leaving
            ]
            self.believed.update(believed)
            have = {*counting, *believed}
            wanted = max(1, min(replicas + 1, len(have | self._staying)))
            missing = wanted - len(have)
            readable = [node for node in holders if node not in standing.silent]
            sure = {node for node in counting if node in readable}
            everywhere = (sure if everywhere is None else everywhere & sure) if len(sure) >= enough else set()
            if missing <= 0:
                if len(have) < enough:
                    self.scarce_objects += 1
                    self.scarce_bytes += entry.size
                    self.scarce.add(version)
                continue
            if not is_protected and owner in readable and self._is_with_its_owner(by_right):
                continue
            tally.objects += 1
            tally.size_bytes += entry.size
            tally.owners[owner] = None
            if not counting and not believed:
                tally.exposed += bool(holders)
                tally.lost += not holders
            if not readable:
                continue
            targets = [node for node in takers if node not in holders][:missing]
            tally.unplaced += len(targets) < missing
            # Who leaves does its own part, so that it knows when all of it is done.
            sources = (
                *(node for node in readable if node in standing.leaving),
                *(node for node in readable if node not in standing.leaving),
            )
            for target in targets:
                moves.setdefault((sources, target, len(have)), []).append(entry)
        if everywhere and not is_protected:
            self.whole.append(
                Whole(version, owner, min(everywhere, key=lambda node: (place.get(node, len(place)), node)))
            )
        for (sources, target, copies), moved in sorted(moves.items()):
            self.moves.append(
                Move(
                    version,
                    owner,
                    tuple(entry.name for entry in moved),
                    sum(entry.size for entry in moved),
                    sources,
                    target,
                    self._why(version, replicas, by_right, moved, copies, sources, target),
                )
            )

    def _order(self, owner: str, replicas: int) -> tuple[tuple[str, ...], dict[str, int]]:
        """`candidates`, and the place of each."""
        known = self._orders.get((owner, replicas))
        if known is None:
            order = candidates(owner, self._standing.members, replicas, self._place)
            known = self._orders[owner, replicas] = order, {node: i for i, node in enumerate(order)}
        return known

    def _holders(self, version: ContainerVersion, entry: ManifestEntry, place: Mapping[str, int]) -> list[str]:
        """Nodes that are not dead and have, or are believed to have, the object as the manifest says; in order."""
        found = []
        for node, answer in self._answers.items():
            held = answer.get(version)
            item = None if held is None else held.objects.get(entry.name)
            if item is not None and (item.size, item.crc32c) == (entry.size, entry.crc32c):
                found.append(node)
        return sorted(found, key=lambda node: (place.get(node, len(place)), node))

    def _is_with_its_owner(self, by_right: Sequence[str]) -> bool:
        """Whether nobody who is to have the object is dead or leaving: then its owner sees to the copies itself."""
        return not any(node in self._standing.dead or node in self._standing.leaving for node in by_right)

    def _why(
        self,
        version: ContainerVersion,
        replicas: int,
        by_right: Sequence[str],
        moved: Sequence[ManifestEntry],
        copies: int,
        sources: Sequence[str],
        target: str,
    ) -> str:
        standing = self._standing
        parts = [
            f"{node} {what}"
            for node in by_right
            for what in (
                ["is dead"]
                if node in standing.dead
                else ["is leaving"]
                if node in standing.leaving
                else ["is no member any more"]
                if node not in standing.members
                else ["lacks it"]
                if node not in sources and node in self._answers
                else []
            )
        ]
        why = f" ({listed(parts)})" if parts else ""
        has, them = ("has", "it") if len(moved) == 1 else ("have", "them")
        return (
            f"{counted(len(moved), 'object')} of {describe(version)} {has} {copies} of {replicas + 1} copies{why}; "
            f"{sources[0]} offers {them} to {target}"
        )
