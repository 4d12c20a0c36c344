"""Two incarnations of a job at the same time, and a node that has forgotten what it knew of a job."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import Cluster, Rank, cluster


def test_incarnations_that_open_at_once_on_two_nodes_get_different_epochs(three: Cluster) -> None:
    """F11: else both would be let through everywhere."""
    first, second = three.ranks[:2]
    given: dict[Rank, int] = {}

    def open_job(rank: Rank) -> None:
        given[rank] = rank.open_job(three.nodes)

    highest = 1
    for _ in range(30):
        given.clear()
        threads = [threading.Thread(target=open_job, args=(rank,)) for rank in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(given) == {first, second}, "both must be answered, and neither be overtaken for ever"
        assert given[first] != given[second]
        assert min(given.values()) > highest
        highest = max(given.values())


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_agent_that_forgot_its_members_protects_nothing(shm_root: Path, forgotten: bool) -> None:
    """F24, F49: no buddies are known then, which is not the same as that all of them acknowledged."""
    with cluster(shm_root, 2) as made:
        made.join()
        n0, n1 = made.nodes
        n1.kill()
        alone = made.save(1, ranks=made.ranks[:1])
        made.ranks[0].commit(alone)
        n0.kill()
        state = n0.paths.job(made.ranks[0].job)
        if forgotten:
            damaged = bytearray(state.read_bytes())
            damaged[len(damaged) // 2] ^= 1
            state.write_bytes(damaged)
        n0.start()
        wait_until(lambda: n0.counter("offers_sent") > 0 or forgotten, "what is unfinished is taken up")
        threading.Event().wait(1.0)
        assert not n0.protected()
