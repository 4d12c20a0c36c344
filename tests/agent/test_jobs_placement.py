"""A job's placement: agreed once for an epoch, kept over restarts, the same on all nodes or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicator.agent.jobs import Jobs
from replicator.agent.placing import PlacementChoice
from replicator.errors import ConfigError
from replicator.ids import AgreedPlacement, NodeAddress, NodeIdentity
from replicator.store.paths import open_root
from replicator.store.store import Store


def node(name: str, zone: str) -> NodeAddress:
    return NodeAddress(NodeIdentity(name, 1), f"{name}:1", (("zone", zone),))


NODES = (node("n0", "a"), node("n1", "a"), node("n2", "b"), node("n3", "b"))
ME = NODES[0]


@pytest.fixture
def store(shm_root: Path) -> Store:
    return opened(shm_root)


def opened(root: Path) -> Store:
    store = Store(open_root(root, create=True))
    store.rebuild()
    return store


def test_labels_decide_where_copies_go(store: Store) -> None:
    jobs = Jobs(store, ME, 1)
    assert jobs.join("job", 1, NODES, 1).node_ids == ("n2",)
    assert jobs.placement("job").buddies == {"n0": ("n2",), "n2": ("n0",), "n1": ("n3",), "n3": ("n1",)}
    prefer = jobs.preference("job")
    assert prefer("n0", ["n1", "n2", "n3"], 1).node_ids == ("n2",)
    assert prefer("n0", ["n1", "n3"], 1).node_ids == ("n3",), "the other zone, when the buddy is lost"
    assert prefer("n0", ["n1", "n2", "n3"], 3).node_ids == ("n2", "n1", "n3")
    assert prefer("gone", ["n0", "n1"], 1).node_ids == ("n0",), "what was owned by who is no member any more"


def test_nodes_that_know_the_same_have_one_digest(store: Store) -> None:
    """In whatever order they learned it, and not when one of them knows another address."""
    first, second = Jobs(store, ME, 1), Jobs(store, NODES[1], 1)
    assert first.digest("job") == 0
    first.join("job", 1, NODES, 1)
    second.join("job", 1, (NODES[1],), 1)
    assert first.digest("job") != second.digest("job") != 0
    second.learn("job", (NODES[3], NODES[0], NODES[2]))
    assert first.digest("job") == second.digest("job")
    second.learn("job", [NodeAddress(NodeIdentity("n2", 2), "n2:2")], first_hand=True)
    assert first.digest("job") != second.digest("job")


def test_who_cannot_be_spread_is_told(store: Store) -> None:
    together = [NodeAddress(one.identity, one.grpc_address, (("zone", "a"),)) for one in NODES]
    note = Jobs(store, ME, 1).join("job", 1, together, 1).note
    assert "n0, n2 are in zone 'a', because the job has 1 zone for 2 copies" in note


def test_what_was_agreed_is_kept_over_a_restart_with_other_labels(store: Store) -> None:
    """Labels that are changed in the middle of an epoch count from the next one on."""
    agreed = AgreedPlacement("group", (("n0", "n3"), ("n1", "n2")))
    jobs = Jobs(store, ME, 1)
    assert jobs.join("job", 1, NODES, 1, agreed).node_ids == ("n3",)
    store.close()
    again = opened(Path(store.paths.root))
    reborn = NodeAddress(NodeIdentity("n0", 2), "n0:2", (("zone", "b"),))
    jobs = Jobs(again, reborn, 1)
    assert jobs.agreed("job") == agreed
    assert jobs.buddies("job") == ("n3",)
    assert jobs.members("job")[0].labels == (("zone", "b"),)
    assert jobs.join("job", 1, NODES, 1).node_ids == ("n3",)
    again.close()


def test_another_placement_in_the_same_epoch_is_refused(store: Store) -> None:
    jobs = Jobs(store, ME, 1)
    jobs.join("job", 1, NODES, 1, AgreedPlacement("group", (("n0", "n3"), ("n1", "n2"))))
    with pytest.raises(ConfigError, match="epoch 1 was joined here with another placement than now, 'ring'"):
        jobs.join("job", 1, NODES, 1, AgreedPlacement("ring", (("n0", "n1", "n2", "n3"),)))
    assert jobs.join("job", 2, NODES, 1, AgreedPlacement("ring", (("n0", "n1", "n2", "n3"),))).node_ids == ("n1",)


def test_settings_of_this_node_that_are_not_the_jobs_are_refused(store: Store) -> None:
    jobs = Jobs(store, ME, 1, PlacementChoice("ring"))
    assert jobs.placing.arrange(NODES, 1).strategy == "ring"
    with pytest.raises(ConfigError, match="opened with placement 'group', and node n0 is configured with 'ring'"):
        jobs.join("job", 1, NODES, 1, AgreedPlacement("group", (("n0", "n3"), ("n1", "n2"))))
    assert jobs.epoch("job") == 0


def test_a_map_that_is_not_the_jobs_is_refused(store: Store) -> None:
    mine = (("n0", ("n1",)), ("n1", ("n0",)), ("n2", ("n3",)), ("n3", ("n2",)))
    jobs = Jobs(store, ME, 1, PlacementChoice("explicit", mine))
    other = AgreedPlacement("explicit", (), (("n0", ("n1",)), ("n1", ("n0",)), ("n2", ("n0",)), ("n3", ("n2",))))
    with pytest.raises(ConfigError, match="not the one of node n0: the buddies of n2 are n0 there and n3 here"):
        jobs.join("job", 1, NODES, 1, other)
    assert jobs.join("job", 1, NODES, 1, jobs.placing.arrange(NODES, 1)).node_ids == ("n1",)


def test_a_placement_of_other_nodes_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="expected every member of the job in one group, found otherwise for n3, n9"):
        Jobs(store, ME, 1).join("job", 1, NODES, 1, AgreedPlacement("group", (("n0", "n9"), ("n1", "n2"))))
