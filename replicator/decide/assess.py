"""Can one container be restored: every copy of every object, on every node, compared with the manifest (F06, F13).

The work is linear in the number of copies: nodes are looked through once, not once per object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from replicator.decide.types import (
    ContainerInventory,
    Manifest,
    ManifestEntry,
    NodeInventory,
    Unanswered,
    counted,
    listed,
)
from replicator.ids import ContainerVersion

Holding = tuple[str, ContainerInventory]


@dataclass(frozen=True, slots=True)
class Assessment:
    """What all answers together say of one container.

    `holders[i]` are the nodes whose copy of manifest entry i has the right size and checksum, durable tiers
    last. Without a manifest `holders` is empty, and `objects` and `size_bytes` count what is held anywhere.
    """

    version: ContainerVersion
    recoverable: bool
    reason: str
    objects: int
    size_bytes: int
    min_copies: int
    manifest_on: tuple[str, ...]
    is_protected: bool
    holders: tuple[tuple[str, ...], ...]


class Evidence:
    """All answers to one round of inventories, arranged by container."""

    def __init__(self, inventories: Sequence[NodeInventory], unanswered: Sequence[Unanswered] = ()) -> None:
        # Memory is to come first: it is nearer.
        ordered = sorted(inventories, key=_place_of)
        self.nodes = tuple(dict.fromkeys(item.node.node_id for item in ordered))
        self.durable = frozenset(item.node.node_id for item in ordered if item.tier != "memory")
        self.unanswered = tuple(sorted(unanswered, key=lambda who: (who.node_id, who.grpc_address, who.reason)))
        self.by_version: dict[ContainerVersion, list[Holding]] = {}
        for item in ordered:
            for container in item.containers:
                self.by_version.setdefault(container.version, []).append((item.node.node_id, container))

    def assess(self, version: ContainerVersion, manifest: Manifest | None) -> Assessment:
        """Compare what the nodes hold of `version` with its manifest (None: nobody gave one)."""
        holdings = self.by_version.get(version, [])
        manifest_on = _unique(node for node, held in holdings if held.manifest_crc32c is not None)
        is_protected = any(held.is_protected for _, held in holdings)
        if manifest is None or manifest.version != version or not manifest.entries:
            sizes: dict[str, int] = {}
            for _, held in holdings:
                for name, item in held.objects.items():
                    sizes[name] = max(item.size, sizes.get(name, 0))
            reason = self._why_no_manifest(manifest, manifest_on, len(sizes), [node for node, _ in holdings])
            return Assessment(version, False, reason, len(sizes), sum(sizes.values()), 0, manifest_on, is_protected, ())
        holders, differing = _match(manifest.entries, holdings)
        missing = [entry for entry, nodes in zip(manifest.entries, holders, strict=True) if not nodes]
        fewest = min(map(len, holders))
        if missing:
            reason = self._why_missing(manifest, missing, differing)
        else:
            reason = (
                f"It is committed, and each of its {counted(len(holders), 'object')} has a verified copy "
                f"on at least {counted(fewest, 'node')}."
            )
        return Assessment(
            version,
            not missing,
            reason,
            len(holders),
            manifest.size_bytes,
            fewest,
            manifest_on,
            is_protected,
            tuple(map(tuple, holders)),
        )

    def silent(self, *, with_reasons: bool = False) -> str:
        """A clause about nodes that did not answer, or an empty string."""
        if not self.unanswered:
            return ""
        return f"no answer came from {listed([str(who) if with_reasons else who.name for who in self.unanswered])}"

    def _why_no_manifest(
        self, manifest: Manifest | None, manifest_on: Sequence[str], objects: int, holding: Sequence[str]
    ) -> str:
        if manifest is not None and manifest.entries:
            return f"The manifest that was found for it belongs to {manifest.version}, so it cannot be trusted."
        if manifest is not None:
            return "Its manifest lists no objects, so there is nothing to load."
        if manifest_on:
            return f"Its manifest is stored on {listed(list(manifest_on))}, but no valid copy of it could be read."
        where = listed(list(_unique(holding)))
        found = f"{counted(objects, 'object')} found on {where}" if objects else "no objects found"
        hope = f"; {self.silent()}, where a manifest may be" if self.unanswered else ""
        answered = f"the {counted(len(self.nodes), 'node')} that answered"
        return f"It was never committed: its manifest is not on {answered} ({found}{hope})."

    def _why_missing(
        self, manifest: Manifest, missing: Sequence[ManifestEntry], differing: Mapping[str, list[str]]
    ) -> str:
        names = [f"{entry.name} (written by {entry.owner_node_id})" for entry in missing]
        parts = [
            f"{len(missing)} of its {counted(len(manifest.entries), 'object')} "
            f"{'has' if len(missing) == 1 else 'have'} no matching copy on any node that answered: {listed(names)}"
        ]
        wrong = [f"{entry.name} on {listed(differing[entry.name])}" for entry in missing if entry.name in differing]
        if wrong:
            parts.append(f"copies whose size or checksum is not the manifest's were ignored: {listed(wrong)}")
        if self.unanswered:
            parts.append(f"{self.silent()}, where copies may be")
        return "; ".join(parts) + "."


def _match(
    entries: Sequence[ManifestEntry], holdings: Sequence[Holding]
) -> tuple[list[list[str]], dict[str, list[str]]]:
    """Holders per entry in the order of `holdings`, and per object name the nodes whose copy differs."""
    place = {entry.name: i for i, entry in enumerate(entries)}
    holders: list[list[str]] = [[] for _ in entries]
    differing: dict[str, list[str]] = {}
    # Only a node with several answers could be counted twice.
    answers = Counter(node for node, _ in holdings)
    for node, container in holdings:
        is_repeated = answers[node] > 1
        for held in container.objects.values():
            i = place.get(held.name)
            if i is None:
                continue
            entry = entries[i]
            if held.size != entry.size or held.crc32c != entry.crc32c:
                differing.setdefault(held.name, []).append(node)
            elif not (holders[i] and holders[i][-1] == node) and not (is_repeated and node in holders[i]):
                holders[i].append(node)
    return holders, differing


def _place_of(item: NodeInventory) -> tuple[bool, str, int, str]:
    return item.tier != "memory", item.node.node_id, item.node.identity.incarnation, item.node.grpc_address


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
