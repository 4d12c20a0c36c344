"""What rank 0 concludes from what the ranks say of themselves."""

from __future__ import annotations

import dataclasses

import pytest

from replicator.client.roll_call import Presence, here, members
from replicator.errors import ConfigError


def presence(rank: int, node: str, address: str, network: str = "one") -> Presence:
    return Presence(rank, "job", 1, f"/dev/shm/{node}", node, 7, address, f"host-{network}", network)


def test_nodes_are_sorted_and_unique() -> None:
    ranks = [
        presence(0, "n2", "10.0.0.2:70", "two"),
        presence(1, "n2", "10.0.0.2:70", "two"),
        presence(2, "n1", "10.0.0.1:70", "one"),
    ]
    assert [(node.node_id, node.grpc_address) for node in members(ranks)] == [
        ("n1", "10.0.0.1:70"),
        ("n2", "10.0.0.2:70"),
    ]


def test_loopback_within_one_machine() -> None:
    ranks = [presence(0, "n1", "127.0.0.1:70"), presence(1, "n2", "127.0.0.2:70")]
    assert len(members(ranks)) == 2


@pytest.mark.parametrize("address", ["127.0.0.1:70", "localhost:70", "[::1]:70"])
@pytest.mark.parametrize("turned", [False, True])
def test_loopback_over_machines(address: str, turned: bool) -> None:
    """F33: said at the start, with what to set, and not as a timeout later."""
    ranks = [presence(0, "n1", "10.0.0.1:70", "one"), presence(1, "n2", address, "two")]
    with pytest.raises(ConfigError, match=r"n2.*loopback.*REPLICATOR_BIND"):
        members(ranks[::-1] if turned else ranks)


def test_two_agents_of_one_name() -> None:
    ranks = [presence(0, "n1", "127.0.0.1:70"), presence(1, "n1", "127.0.0.1:71")]
    with pytest.raises(ConfigError, match=r"two agents call themselves 'n1'.*REPLICATOR_NODE_ID"):
        members(ranks)


def test_another_job() -> None:
    ranks = [presence(0, "n1", "127.0.0.1:70"), dataclasses.replace(presence(1, "n2", "127.0.0.1:71"), job="other")]
    with pytest.raises(ConfigError, match="rank 1 to 'other'"):
        members(ranks)


def test_other_replicas() -> None:
    ranks = [presence(0, "n1", "127.0.0.1:70"), dataclasses.replace(presence(1, "n2", "127.0.0.1:71"), replicas=2)]
    with pytest.raises(ConfigError, match="rank 1 wants 2"):
        members(ranks)


def test_travels() -> None:
    one = presence(3, "n1", "127.0.0.1:70")
    assert Presence.from_json(one.to_json()) == one


def test_here_is_the_same_for_a_thread_of_this_machine() -> None:
    assert here() == here()
    assert all(here())
