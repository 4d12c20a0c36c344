"""Small clusters for the decision tests: written by hand, or drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from replicator.decide.types import (
    ContainerInventory,
    HeldObject,
    Manifest,
    ManifestEntry,
    NodeInventory,
    Unanswered,
)
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity, make_generation

JOB = "train-1"


def version(step: int, epoch: int = 1, attempt: int = 0) -> ContainerVersion:
    return ContainerVersion(CheckpointContainerId(JOB, step), make_generation(epoch, attempt))


def address(node_id: str, incarnation: int = 1) -> NodeAddress:
    return NodeAddress(NodeIdentity(node_id, incarnation), f"{node_id}:7070")


def entry(name: str, owner: str, size: int = 100, crc32c: int = 7) -> ManifestEntry:
    return ManifestEntry(name, size, crc32c, owner)


def manifest(of: ContainerVersion, *entries: ManifestEntry) -> Manifest:
    return Manifest(of, of.epoch, "n1", 1, len(entries), 0, tuple(sorted(entries, key=lambda item: item.name)))


def holds(of: ContainerVersion, *entries: ManifestEntry, committed: bool = True) -> ContainerInventory:
    objects = {item.name: HeldObject(item.name, item.size, item.crc32c) for item in entries}
    return ContainerInventory(of, 1 if committed else None, False, objects)


def node(node_id: str, *containers: ContainerInventory) -> NodeInventory:
    return NodeInventory(address(node_id), containers)


@dataclass
class Cluster:
    inventories: list[NodeInventory]
    manifests: dict[ContainerVersion, Manifest]
    unanswered: list[Unanswered]

    def matching_holders(self, of: ContainerVersion) -> dict[str, set[str]]:
        """By brute force, the nodes with a good copy of each object that the manifest lists."""
        return {
            item.name: {
                inventory.node.node_id
                for inventory in self.inventories
                for container in inventory.containers
                for held in container.objects.values()
                if container.version == of
                and (held.name, held.size, held.crc32c) == (item.name, item.size, item.crc32c)
            }
            for item in self.manifests[of].entries
        }

    def recoverable(self, of: ContainerVersion) -> bool:
        return of in self.manifests and bool(self.manifests[of].entries) and all(self.matching_holders(of).values())


NODE_IDS = [f"n{i}" for i in range(1, 6)]
NAMES = [".metadata", "__0_0.distcp", "__1_0.distcp", "state/loader.0"]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to 5 nodes and 4 versions; copies may be missing, of wrong size or checksum; manifests may be lost."""
    versions = draw(
        st.lists(
            st.builds(version, st.sampled_from([0, 1, 2**40]), st.integers(1, 2), st.integers(0, 1)),
            max_size=4,
            unique=True,
        )
    )
    node_ids = draw(st.lists(st.sampled_from(NODE_IDS), unique=True, max_size=5))
    known: dict[ContainerVersion, Manifest] = {}
    held: dict[str, list[ContainerInventory]] = {node_id: [] for node_id in node_ids}
    for of in versions:
        names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
        entries = [entry(name, draw(st.sampled_from(NODE_IDS)), size=len(name), crc32c=of.epoch) for name in names]
        if draw(st.integers(0, 4)):
            known[of] = manifest(of, *entries)
        for node_id in node_ids:
            copies = {}
            for item in entries:
                kind = draw(st.sampled_from(["good", "good", "good", "none", "short", "corrupt"]))
                if kind != "none":
                    size = item.size - (kind == "short")
                    copies[item.name] = HeldObject(item.name, size, item.crc32c + (kind == "corrupt"))
            if copies:
                crc = draw(st.sampled_from([None, 1]))
                held[node_id].append(ContainerInventory(of, crc, draw(st.booleans()), copies))
    silent = [Unanswered(f"s{i}", f"s{i}:7070", "no answer in 5 s") for i in range(draw(st.integers(0, 2)))]
    return Cluster([node(node_id, *held[node_id]) for node_id in node_ids], known, silent)
