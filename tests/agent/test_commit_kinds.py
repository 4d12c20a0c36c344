"""Containers that a job can go on from, and those it cannot: neither stands in for the other."""

from __future__ import annotations

import dataclasses
import signal

from agent_harness import wait_until
from cluster import Cluster

from replicator.ids import ContainerVersion


def _overtaken(made: Cluster, step: int) -> ContainerVersion:
    """n1 commits `step`, of which its buddy n2 gets nothing; then a later one of the model alone is protected."""
    _, writer, _ = made.ranks
    resumable = made.save(step, ranks=[writer])
    writer.commit(resumable)
    assert not writer.committed(resumable.version).is_protected
    model = dataclasses.replace(made.save(step + 1, ranks=[made.ranks[0]]), resumable=False)
    made.ranks[0].commit(model)
    made.ranks[0].protected(model.version)
    wait_until(lambda: model.version in made.nodes[1].protected(), "n1 knows that the later one is protected")
    return resumable.version


def test_a_model_only_one_does_not_end_the_protection_of_what_a_job_can_go_on_from(own_three: Cluster) -> None:
    """F43, F49, F40: not while its owner runs, and not after a restart; nobody is told that it never was protected."""
    _, node, buddy = own_three.nodes
    assert buddy.agent is not None
    buddy.agent.signal(signal.SIGSTOP)
    first = _overtaken(own_three, 2)
    buddy.agent.signal(signal.SIGCONT)
    own_three.ranks[1].protected(first)

    buddy.agent.signal(signal.SIGSTOP)
    second = _overtaken(own_three, 4)
    node.kill()
    node.start("--port", str(node.port))
    buddy.agent.signal(signal.SIGCONT)
    wait_until(lambda: second in node.protected(), "it is protected after a restart")
