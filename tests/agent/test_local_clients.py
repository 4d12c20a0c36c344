"""The registry of trainer processes: who counts as alive, and what a slow reader of events gets."""

from __future__ import annotations

import uuid

import pytest

from replicator.agent.clients import MAX_CLIENTS, ClientRegistry
from replicator.errors import AgentUnavailableError, InvalidIdError, StoreError
from replicator.v1 import local_pb2

EVENT = local_pb2.AttachEvent(commit=local_pb2.CommitEvent(ok=True))


class Node:
    """Lock files that are held, clients that were given up, and a clock; and a registry over them."""

    def __init__(self, queued_events: int = 3) -> None:
        self.held: set[str] = set()
        self.gone: list[str] = []
        self.now = 0.0
        self.registry = ClientRegistry(
            self.held.__contains__, self.gone.append, queued_events=queued_events, clock=lambda: self.now
        )

    def start(self) -> str:
        client_id = uuid.uuid4().hex
        self.held.add(client_id)
        return client_id


async def test_events_arrive_in_order() -> None:
    node = Node()
    client = node.start()
    stream = node.registry.attach(client, 1)
    for number in range(3):
        assert node.registry.send(client, local_pb2.AttachEvent(commit=local_pb2.CommitEvent(error_kind=str(number))))
    assert [(await stream.next()).commit.error_kind for _ in range(3)] == ["0", "1", "2"]


async def test_a_full_queue_ends_the_stream_instead_of_losing_one_event() -> None:
    """A client that missed one outcome would wait for it for ever; one that lost its stream asks again."""
    node = Node(queued_events=3)
    client = node.start()
    stream = node.registry.attach(client, 1)
    assert all(node.registry.send(client, EVENT) for _ in range(3))
    assert not node.registry.send(client, EVENT)
    with pytest.raises(AgentUnavailableError, match="attach again"):
        await stream.next()
    assert not node.registry.send(client, EVENT)
    node.registry.detach(stream)
    fresh = node.registry.attach(client, 1)
    assert node.registry.send(client, EVENT)
    assert (await fresh.next()).commit.ok
    assert node.gone == []


async def test_attaching_again_replaces_the_older_stream() -> None:
    node = Node()
    client = node.start()
    older = node.registry.attach(client, 1)
    newer = node.registry.attach(client, 1)
    with pytest.raises(AgentUnavailableError, match="attached again"):
        await older.next()
    node.registry.detach(older)
    assert node.registry.attached == 1
    assert node.registry.send(client, EVENT)
    assert (await newer.next()).commit.ok


async def test_only_a_free_lock_gives_a_client_up() -> None:
    """F17: a connection says nothing about the life of a process, in either direction."""
    node = Node()
    client = node.start()
    stream = node.registry.attach(client, 1)
    node.registry.detach(stream)
    node.registry.poll()
    assert node.gone == []
    stream = node.registry.attach(client, 1)
    node.held.remove(client)
    node.registry.poll()
    assert node.gone == [client]
    assert not node.registry.is_known(client)
    with pytest.raises(StoreError, match="is dead"):
        await stream.next()
    node.registry.poll()
    node.registry.detach(stream)
    assert node.gone == [client]


async def test_without_its_lock_nobody_is_served() -> None:
    node = Node()
    with pytest.raises(StoreError, match="lock file"):
        node.registry.attach(uuid.uuid4().hex, 1)
    for bad in ("", "../../etc", "agent-0123456789abcdef", uuid.uuid4().hex.upper()):
        with pytest.raises(InvalidIdError, match="32 lower-case hex"):
            node.registry.require(bad)


async def test_a_living_client_of_an_earlier_agent_is_watched_and_a_dead_one_given_up() -> None:
    node = Node()
    living, dead = node.start(), uuid.uuid4().hex
    node.registry.track([living, dead])
    assert node.gone == [dead]
    node.held.remove(living)
    node.registry.poll()
    assert node.gone == [dead, living]


async def test_trouble_with_one_client_does_not_keep_the_others() -> None:
    node = Node()
    first, second = node.start(), node.start()
    broken = {first}
    given_up: list[str] = []

    def give_up(client_id: str) -> None:
        if client_id in broken:
            raise OSError(28, "No space left on device")
        given_up.append(client_id)

    registry = ClientRegistry(node.held.__contains__, give_up)
    registry.track([first, second])
    node.held.clear()
    registry.poll()
    assert given_up == [second]
    broken.clear()
    registry.poll()
    assert sorted(given_up) == sorted([first, second])


async def test_idle_counts_from_the_last_living_client() -> None:
    node = Node()
    node.now = 5
    assert node.registry.idle_s() == 5
    client = node.start()
    stream = node.registry.attach(client, 1)
    node.now = 10
    node.registry.detach(stream)
    node.now = 20
    assert node.registry.idle_s() == 0  # detached, but alive
    node.held.clear()
    node.registry.poll()
    node.now = 23
    assert node.registry.idle_s() == 3


async def test_clients_are_bounded() -> None:
    node = Node()
    for _ in range(MAX_CLIENTS):
        node.registry.require(node.start())
    with pytest.raises(StoreError, match="at most"):
        node.registry.require(node.start())


async def test_closing_ends_streams_and_gives_nothing_up() -> None:
    node = Node()
    stream = node.registry.attach(node.start(), 1)
    node.registry.close()
    with pytest.raises(AgentUnavailableError, match="stopping"):
        await stream.next()
    assert node.gone == []
