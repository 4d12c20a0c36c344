"""A member that is away while a container is committed, for longer than all attempts to tell it last."""

from __future__ import annotations

import signal
from pathlib import Path

from cluster import cluster

DEADLINE_S = 2.0


def test_what_was_committed_without_a_member_is_protected_when_it_is_back(shm_root: Path) -> None:
    """F19: an owner that never got the manifest would never report its copies, and only the next save be protected."""
    with cluster(shm_root, 3, "--deadline-s", str(DEADLINE_S)) as made:
        made.join()
        coordinator, owner, _ = made.ranks
        manifest = made.save(1)
        for rank, entry in zip(made.ranks, manifest.entries, strict=True):
            assert rank.outcome(manifest.version.object(entry.name)).ok
        stopped = owner.node.agent
        assert stopped is not None
        stopped.signal(signal.SIGSTOP)
        coordinator.commit(manifest, DEADLINE_S)
        assert coordinator.committed(manifest.version).ok
        assert coordinator.node.agent is not None
        coordinator.node.agent.wait_log("a node did not store the manifest")
        stopped.signal(signal.SIGCONT)
        assert coordinator.protected(manifest.version).is_protected
