"""For tests of healing and draining: containers with all their copies, nodes that are lost, who holds what."""

from __future__ import annotations

import shutil

from agent_harness import wait_until
from cluster import Cluster, Node, Rank

from replicator.decide.types import Manifest

# Of the agents: a node is dead this long after its last answer at most.
DEADLINE_S = 3.0
# Until the copies are there again: the health deadline, and some for a busy machine.
HEALED_S = 20.0


def protect(made: Cluster, step: int, data: bytes = b"shard", ranks: list[Rank] | None = None) -> Manifest:
    manifest = made.save(step, data, ranks=ranks)
    rank = (ranks or made.ranks)[0]
    rank.commit(manifest)
    rank.protected(manifest.version)
    return manifest


def lose(node: Node) -> None:
    """SIGKILL, and its memory is gone."""
    node.kill()
    shutil.rmtree(node.root)


def holders(made: Cluster, manifest: Manifest, alive: list[int]) -> dict[str, set[str]]:
    """Of each object, the nodes with a verified copy that is the manifest's."""
    found: dict[str, set[str]] = {}
    for entry in manifest.entries:
        found[entry.name] = set()
        for index in alive:
            node = made.nodes[index]
            info = node.held(manifest.version.object(entry.name))
            if info is not None and (info.size, info.crc32c) == (entry.size, entry.crc32c):
                found[entry.name].add(node.node_id)
    return found


def wait_healed(made: Cluster, manifest: Manifest, alive: list[int], copies: int = 2) -> None:
    wait_until(
        lambda: all(len(nodes) >= copies for nodes in holders(made, manifest, alive).values()),
        f"each object of {manifest.version} has {copies} copies on live nodes",
        HEALED_S,
    )


def healed(made: Cluster, alive: list[int]) -> int:
    return sum(made.nodes[index].counter("objects_healed") for index in alive)


def buddy_of(made: Cluster, index: int) -> str:
    """The node that keeps copies of what a node owns, in the newest job."""
    (job,) = (one for one in made.nodes[index].status().jobs if one.job == made.ranks[0].job)
    return str(job.buddy_node_ids[0])
