"""Jobs of thousands of nodes as values, without agents: what a recovery lookup and a placement of them cost.

`python -m benchmarks.simulated [NODES ...]` prints, for each size, what grows with the number of nodes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from replicator.decide.choose_step import choose_step
from replicator.decide.placement import Placement, strategy
from replicator.decide.types import ContainerInventory, HeldObject, Manifest, ManifestEntry, NodeInventory
from replicator.ids import (
    CheckpointContainerId,
    ContainerVersion,
    Labels,
    NodeAddress,
    NodeIdentity,
    make_generation,
)

JOB = "simulated"
RANKS = 8
STEPS = 3
NODES_PER_RACK = 32
RACKS_PER_ZONE = 16
SIZES = (16, 64, 256, 1024, 4096, 10_000)


def labelled(nodes: int) -> dict[str, Labels]:
    """Nodes in racks in zones, at least three of each."""
    in_rack = min(NODES_PER_RACK, max(1, nodes // 9))
    in_zone = min(RACKS_PER_ZONE * in_rack, max(1, nodes // 3))
    return {
        f"node-{i:05}": (("zone", f"z{i // in_zone}"), ("rack", f"r{i % in_zone // in_rack}")) for i in range(nodes)
    }


def object_names(node: int) -> list[str]:
    """What the ranks of one node write."""
    return [f"__{node * RANKS + rank:06}_0.distcp" for rank in range(RANKS)]


def cluster(
    nodes: int, placement: Placement, steps: int = STEPS, lost: int = 1
) -> tuple[list[NodeInventory], dict[ContainerVersion, Manifest]]:
    """What a lookup hears: every node holds its own objects and those that it keeps, of each step; the first `lost`
    nodes of the job are gone."""
    ids = sorted(placement.buddies)
    number = {node: i for i, node in enumerate(ids)}
    kept: dict[str, list[str]] = {node: [node] for node in ids}
    for owner, chosen in placement.buddies.items():
        for holder in chosen:
            kept[holder].append(owner)
    versions = [ContainerVersion(CheckpointContainerId(JOB, step), make_generation(1, step)) for step in range(steps)]
    manifests = {
        version: Manifest(
            version,
            1,
            ids[0],
            placement.replicas,
            nodes * RANKS,
            0,
            tuple(ManifestEntry(name, 1 << 30, i, node) for i, node in enumerate(ids) for name in object_names(i)),
        )
        for version in versions
    }
    inventories = []
    for node in ids[lost:]:
        containers = []
        for version in versions:
            objects = {
                name: HeldObject(name, 1 << 30, number[owner])
                for owner in kept[node]
                for name in object_names(number[owner])
            }
            containers.append(ContainerInventory(version, 1, True, objects))
        inventories.append(NodeInventory(NodeAddress(NodeIdentity(node, 1), f"{node}:7070"), tuple(containers)))
    return inventories, manifests


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the seconds of CPU that it took."""
    gc.collect()
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def peak_bytes(work: Callable[[], Any]) -> int:
    """Bytes that were allocated meanwhile, at the highest."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def rows(sizes: Sequence[int]) -> list[tuple[str, ...]]:
    """One row of text per size."""
    from replicator.wire import manifest_to_bytes, node_address_to_pb, placement_to_pb, source_to_pb

    result: list[tuple[str, ...]] = []
    for nodes in sizes:
        members = labelled(nodes)
        placement, placing_s = timed(lambda members=members: strategy("group").arrange(members, 1))  # type: ignore[misc]
        first, *rest = sorted(members)
        replaced = {**{node: members[node] for node in rest}, "node-new": members[first]}
        _, again_s = timed(lambda: strategy("group").arrange(replaced, 1, placement.agreed))  # noqa: B023
        inventories, manifests = cluster(nodes, placement)
        decision, choosing_s = timed(lambda: choose_step(inventories, manifests))  # noqa: B023
        memory = peak_bytes(lambda: choose_step(inventories, manifests))  # noqa: B023
        manifest = len(manifest_to_bytes(next(iter(manifests.values()))))
        plan = sum(source_to_pb(source).ByteSize() + 3 for source in decision.sources)
        hello = sum(node_address_to_pb(one.node).ByteSize() + 3 for one in inventories)
        result.append(
            (
                str(nodes),
                f"{placing_s * 1000:.1f}",
                f"{again_s * 1000:.1f}",
                f"{choosing_s * 1000:.1f}",
                f"{memory / 2**20:.1f}",
                f"{manifest / 2**20:.2f}",
                f"{plan / 2**20:.2f}",
                f"{hello / 2**10:.1f}",
                f"{placement_to_pb(placement.agreed).ByteSize() / 2**10:.1f}",
            )
        )
    return result


HEADS = (
    "nodes",
    "placement, ms",
    "one node replaced, ms",
    "choose_step, ms",
    "its memory, MiB",
    "manifest, MiB",
    "plan, MiB",
    "member list, KiB",
    "agreed placement, KiB",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated", description=__doc__, allow_abbrev=False)
    parser.add_argument("nodes", nargs="*", type=int, default=list(SIZES), help="sizes of the job")
    options = parser.parse_args(argv)
    lines = [HEADS, tuple("---" for _ in HEADS), *rows(options.nodes)]
    sys.stdout.write("".join("| " + " | ".join(line) + " |\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
