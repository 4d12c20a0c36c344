"""Whether nodes that could not be reached should be asked again before a checkpoint is chosen."""

from __future__ import annotations

from collections.abc import Mapping

from replicator.decide.types import Decision, Manifest, counted, describe
from replicator.ids import ContainerVersion


def worth_asking_again(decision: Decision, manifests: Mapping[ContainerVersion, Manifest], silent: int) -> str:
    """Why the answer of a silent node may give a newer checkpoint than `decision`, in words; empty when it cannot.

    What was committed is on R + 1 nodes, or on all members when there are fewer. So as long as fewer are silent,
    whatever was committed is known from the others, and only copies may be missing. A node that wrote an object is
    a member; with fewer writers than members this asks rather once too often.

    Args:
        manifests: all that could be read, of the same job.
        silent: how many nodes did not answer.
    """
    if not silent:
        return ""
    if decision.version is None:
        return "nothing that the others have can be restored"
    chosen = manifests[decision.version]
    for one in decision.rejected:
        newer = manifests.get(one.version)
        if newer is not None and newer.resumable >= chosen.resumable:
            return f"{describe(one.version)} is committed and newer, and copies are missing"
    writers = len({entry.owner_node_id for entry in chosen.entries})
    sure_on = min(chosen.replicas + 1, writers)
    if silent >= sure_on:
        return f"what is on {counted(sure_on, 'node')} only may be committed and newer"
    return ""
