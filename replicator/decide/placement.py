"""Where replicas go: the buddies of each node, from the member list alone.

Every member computes the same answer from the same members, in whatever order they are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicator.errors import ConfigError, NotFoundError


@dataclass(frozen=True, slots=True)
class Buddies:
    """The nodes that keep a node's objects, and (when fewer than asked for) a sentence that says why."""

    node_ids: tuple[str, ...]
    note: str = ""


def buddies(node_id: str, members: Sequence[str], replicas: int) -> Buddies:
    """The `replicas` nodes that keep copies of what `node_id` owns.

    Members are sorted and cut into groups of `replicas` + 1; what is left over makes the last groups larger,
    so that a group has at most 2 * replicas + 1 members. Inside its group a node's copies go to the next
    nodes in a circle, so every node is the buddy of exactly `replicas` others. Small groups keep the loss of
    any two nodes unlikely to hit an owner and its buddy both: fewer pairs of nodes depend on each other.

    Raises:
        NotFoundError: `node_id` is not a member.
        ConfigError: `replicas` is negative.
    """
    if replicas < 0:
        raise ConfigError(f"replicas: expected 0 or more, found {replicas}")
    nodes = sorted(set(members))
    if node_id not in nodes:
        raise NotFoundError(
            f"node {node_id} is not among the {len(nodes)} members of the job; let it join the job first"
        )
    group = _group_of(nodes.index(node_id), nodes, replicas + 1)
    place = group.index(node_id)
    circle = group[place + 1 :] + group[:place]
    chosen = tuple(circle[:replicas])
    return Buddies(chosen, _note(len(nodes), replicas) if len(chosen) < replicas else "")


def _group_of(position: int, nodes: list[str], size: int) -> list[str]:
    """The group that has nodes[position]: groups of equal length, the last ones longer by one."""
    groups = max(1, len(nodes) // size)
    length, longer = divmod(len(nodes), groups)
    boundary = (groups - longer) * length
    if position < boundary:
        start = position - position % length
        return nodes[start : start + length]
    start = position - (position - boundary) % (length + 1)
    return nodes[start : start + length + 1]


def _note(nodes: int, replicas: int) -> str:
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
