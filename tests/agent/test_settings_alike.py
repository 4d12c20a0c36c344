"""Settings that must be alike on all nodes of a job: two real agents that differ say so, and an operator sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agent_harness import environment, wait_until
from cluster import Cluster, Node, Rank

from replicator.agent.alike import Alike
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.config import AgentConfig
from replicator.ids import NodeAddress, NodeIdentity
from replicator.store import Store
from replicator.store.paths import open_root
from replicator.v1.peer_pb2 import AlikeSetting


def test_nodes_of_one_job_that_keep_other_steps_say_so_once(shm_root: Path) -> None:
    """F04: what one node keeps as a multiple of keep_every another one drops."""
    made = Cluster(shm_root, 0)
    try:
        for name, kept in (("n0", "10"), ("n1", "5")):
            made.nodes.append(Node(name, shm_root / name, (*made.flags, "--keep-every", kept)).launch())
        made.ranks += [Rank(node.ready()) for node in made.nodes]
        for epoch in (1, 2):
            # Both know of each other before and after they know that they have a job in common.
            made.join(made.ranks[0].open_job(made.nodes))
            wait_until(lambda: all(node.status().differing for node in made.nodes), "both status say so")
            assert made.ranks[0].epoch == epoch
        for node, here, there, other in ((made.nodes[0], "10", "5", "n1"), (made.nodes[1], "5", "10", "n0")):
            (found,) = node.status().differing
            assert (found.setting, found.here, found.there) == ("keep_every", here, there)
            assert list(found.node_ids) == [other]
            assert node.status().counters["settings_that_differ"] == 1
            assert node.agent is not None
            said = [
                line for line in node.agent.output if f"keep_every is {here} on node {node.node_id} and {there}" in line
            ]
            assert len(said) == 1
            assert f"on node {other}" in said[0]
        shown = subprocess.run(
            [sys.executable, "-m", "replicator.admin", "status", "--root", str(made.nodes[0].root)],
            capture_output=True,
            text=True,
            env=environment(),
            check=True,
        ).stdout
        assert "keep_every is 10 here and 5 on n1" in shown
        # It comes back with the same setting, and nothing differs any more.
        made.nodes[1].kill()
        made.nodes[1].flags = made.nodes[0].flags
        made.nodes[1].start()
        wait_until(lambda: not any(node.status().differing for node in made.nodes), "nothing differs")
    finally:
        made.close()


def test_what_other_versions_and_other_jobs_say_is_no_difference(shm_root: Path) -> None:
    store = Store(open_root(shm_root / "me", create=True))
    store.rebuild()
    me, other = (NodeAddress(NodeIdentity(name, 1), f"127.0.0.1:{port}") for port, name in enumerate(("me", "n1"), 1))
    jobs = Jobs(store, me, 1)
    alike = Alike(AgentConfig(root=str(shm_root)), me, jobs, Counters())
    alike.heard("n1", [AlikeSetting(name="keep_last", value="2"), AlikeSetting(name="of another version", value="7")])
    assert not alike.differences()
    alike.heard("n1", [AlikeSetting(name="keep_last", value="9" * 1000)])
    assert not alike.differences(), "no job in common"
    jobs.join("job", 1, [me, other], 1)
    (found,) = alike.differences()
    assert (found.setting, found.here, found.there, found.node_ids) == ("keep_last", "2", "9" * 80, ("n1",))
    store.close()
