"""Lost copies are made again by real agents: which, where, by whom, and when not."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import Cluster, cluster, sources_of
from healing import DEADLINE_S, HEALED_S, buddy_of, healed, holders, lose, protect, wait_healed

from replicator.wire import version_from_pb


@pytest.fixture(scope="module")
def shared_four() -> Iterator[Cluster]:
    """Four nodes that several tests share: they come back with their memory, before they are dead."""
    path = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    try:
        with cluster(path, 4, "--deadline-s", "15") as made:
            yield made
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def four(shm_root: Path) -> Iterator[Cluster]:
    """Four nodes in a job with one replica: n0 and n1 have each other's objects, n2 and n3 too."""
    with cluster(shm_root, 4, "--deadline-s", str(DEADLINE_S)) as made:
        made.join()
        yield made


def test_two_nodes_lost_one_after_the_other_cost_nothing(four: Cluster) -> None:
    """F13, F21: each time all objects get their two copies back, of all steps; the second loss hits a new holder."""
    manifests = [protect(four, step, b"x" * 300_000 * step) for step in (1, 2)]
    data = {
        entry.name: four.nodes[int(entry.owner_node_id[1:])].bytes_of(manifests[1].version.object(entry.name))
        for entry in manifests[1].entries
    }
    lose(four.nodes[1])
    for manifest in manifests:
        wait_healed(four, manifest, [0, 2, 3])
    wait_until(lambda: all(not four.nodes[i].status().healing.short for i in (0, 2, 3)), "nothing is short")
    for manifest in manifests:
        assert all(len(nodes) == 2 for nodes in holders(four, manifest, [0, 2, 3]).values())
    assert healed(four, [0, 2, 3]) == 4, "n0's and n1's object of each step, each once"
    lose(four.nodes[0])
    for manifest in manifests:
        wait_healed(four, manifest, [2, 3])
    plan = four.ranks[2].lookup()
    assert plan.container.step == 2, plan.reason
    events = four.ranks[2].retrieve(manifests[1].version, sources_of(plan))
    assert all(event.done for event in events.values()), events
    for name, expected in data.items():
        assert four.nodes[2].bytes_of(manifests[1].version.object(name)) == expected


def test_nothing_is_moved_for_a_node_that_is_only_silent_for_a_while(shared_four: Cluster) -> None:
    """A partition that heals in time: suspect is not dead."""
    four = shared_four.new_job()
    manifest = protect(four, 1)
    silent = four.nodes[1].agent
    assert silent is not None
    silent.signal(signal.SIGSTOP)
    assert four.nodes[0].agent is not None
    record = four.nodes[0].agent.wait_log("a peer is suspect")
    assert "n1" in record["peer"]
    silent.signal(signal.SIGCONT)
    four.nodes[0].agent.wait_log("a peer is alive")
    later = protect(four, 2)
    for one in (manifest, later):
        assert all(len(nodes) == 2 for nodes in holders(four, one, [0, 1, 2, 3]).values())
    assert healed(four, [0, 1, 2, 3]) == 0


def test_a_node_that_comes_back_with_its_memory_is_left_alone(shared_four: Cluster) -> None:
    """Another incarnation of it, that has everything: nothing is moved for the old one's death."""
    four = shared_four.new_job()
    manifest = protect(four, 1)
    wait_until(lambda: manifest.version in four.nodes[1].protected(), "n1 knows that it is protected")
    four.nodes[1].kill()
    four.nodes[1].start("--port", str(four.nodes[1].port))
    assert four.nodes[0].agent is not None
    four.nodes[0].agent.wait_log("a peer is alive")
    protect(four, 2, ranks=[four.ranks[0], four.ranks[2]])
    assert healed(four, [0, 1, 2, 3]) == 0
    assert {len(nodes) for nodes in holders(four, manifest, [0, 1, 2, 3]).values()} == {2}


def test_a_node_that_comes_back_empty_is_filled(shared_four: Cluster) -> None:
    """F20, F19: same name and port, no memory. It gets its own objects, those it keeps for others, and the manifest."""
    four = shared_four.new_job()
    manifest = protect(four, 1, b"x" * 300_000)
    before = holders(four, manifest, [0, 1, 2, 3])
    node = four.nodes[1]
    lose(node)
    node.start("--port", str(node.port))
    wait_healed(four, manifest, [0, 1, 2, 3])
    wait_until(lambda: manifest.version in node.protected(), "it knows that the container is protected")
    assert holders(four, manifest, [0, 1, 2, 3]) == before


def test_a_save_while_a_buddy_is_dead_goes_to_another_one_and_is_protected(four: Cluster) -> None:
    """F49: its buddies are those that are there, so the wait is for them."""
    first = protect(four, 1)
    buddy = int(buddy_of(four, 0)[1:])
    lose(four.nodes[buddy])
    assert four.nodes[0].agent is not None
    four.nodes[0].agent.wait_log("a peer is dead")
    alive = [index for index in range(4) if index != buddy]
    wait_healed(four, first, alive)
    later = protect(four, 2, ranks=[four.ranks[index] for index in alive])
    assert len(holders(four, later, alive)["shard-0"]) == 2


def test_what_a_dead_owner_and_coordinator_left_committed_becomes_protected(four: Cluster) -> None:
    """F21, F49: the coordinator dies before n0's copy was acknowledged; its own objects are on its buddy, who acts."""
    silent = int(buddy_of(four, 0)[1:])
    lost, kept = (index for index in range(1, 4) if index != silent)
    coordinator = four.ranks[lost]
    mute = four.nodes[silent].agent
    assert mute is not None
    mute.signal(signal.SIGSTOP)
    manifest = four.save(1, ranks=[coordinator, four.ranks[0]])
    assert coordinator.outcome(manifest.version.object("shard-0")).ok
    coordinator.commit(manifest)
    assert not coordinator.committed(manifest.version).is_protected
    wait_until(lambda: all(manifest.version in four.nodes[i].committed() for i in (0, kept)), "two others have it")
    lose(four.nodes[lost])
    mute.signal(signal.SIGCONT)
    for index in (0, silent, kept):
        wait_until(
            lambda node=four.nodes[index]: manifest.version in node.protected(),
            f"n{index} calls it protected",
            HEALED_S,
        )
    assert all(len(nodes) == 2 for nodes in holders(four, manifest, [0, silent, kept]).values())


def test_what_no_node_can_take_is_told_and_older_steps_stay(shm_root: Path) -> None:
    """F04: n1 dies, and n2, the only other one, is full: n0's object has one copy. Status and log say so."""
    with cluster(shm_root, 2, "--deadline-s", str(DEADLINE_S), "--keep-last", "1") as made:
        made.flags = (*made.flags, "--budget-bytes", "2Mi")
        made.add("n2")
        made.join()
        manifest = protect(made, 1, b"x" * 900_000)
        lose(made.nodes[1])
        wait_until(lambda: any(one.unplaced for one in made.nodes[0].status().healing.short), "n0 says so", HEALED_S)
        (short,) = made.nodes[0].status().healing.short
        assert (short.container.step, short.objects, short.lost) == (1, 1, 0)
        assert holders(made, manifest, [0, 2])["shard-1"] == {"n0", "n2"}
        assert made.nodes[0].agent is not None
        made.nodes[0].agent.wait_log("a container is short of copies")
        lose(made.nodes[2])
        wait_until(lambda: made.nodes[0].status().healing.scarce_objects == 3, "too few nodes are left", HEALED_S)
        assert not made.nodes[0].status().healing.short
        made.nodes[0].agent.wait_log("a container has a copy on every node that is there, fewer than wanted")


def test_a_node_that_the_job_went_on_without_says_that_nobody_takes_its_copies(four: Cluster) -> None:
    """F11: they are refused by those that are in a newer epoch, which are not asked again and again for it."""
    manifest = protect(four, 1)
    buddy = int(buddy_of(four, 0)[1:])
    others = [rank for index, rank in enumerate(four.ranks) if index not in (0, buddy)]
    agent = four.nodes[0].agent
    assert agent is not None
    agent.signal(signal.SIGSTOP)
    lose(four.nodes[buddy])
    four.join(others[0].open_job([rank.node for rank in others]), ranks=others)
    agent.signal(signal.SIGCONT)

    def is_told() -> bool:
        return any(
            version_from_pb(short.container) == manifest.version and short.unplaced == short.objects == 2
            for short in four.nodes[0].status().healing.short
        )

    wait_until(is_told, "n0 says so", HEALED_S)
    assert holders(four, manifest, [0])["shard-0"] == {"n0"}
