"""Peers as one agent sees them: Hello, identity, deadlines, reconnection. The other side is a real agent."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster import Cluster, Node, dead_peer, mute_peer

from replicator.agent.counters import Counters
from replicator.agent.health import HealthMonitor, NodeHealth, NodeState
from replicator.agent.jobs import Jobs
from replicator.agent.peers import PeerDirectory
from replicator.agent.transport import SocketTransport
from replicator.config import AgentConfig
from replicator.errors import DeadlineExceededError, ObjectNotFoundError, PeerUnavailableError, ReplicatorError
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity, make_generation
from replicator.store import Store
from replicator.store.paths import open_root
from replicator.v1 import admin_pb2, peer_pb2
from replicator.wire import Sender, object_to_pb, sender_to_pb

ME = NodeAddress(NodeIdentity("me", 7), "127.0.0.1:1")
NOWHERE = ContainerVersion(CheckpointContainerId("j", 1), make_generation(1, 1)).object("a")


@pytest.fixture
async def peers(shm_root: Path) -> AsyncIterator[PeerDirectory]:
    store = Store(open_root(shm_root / "me", create=True))
    store.rebuild()
    config = AgentConfig(root=str(shm_root / "me"), node_id="me", deadline_s=3.0)
    directory = PeerDirectory(config, ME, Jobs(store, ME, 1), Counters(), SocketTransport(config).channel)
    yield directory
    await directory.close()
    store.close()


@pytest.fixture
def node(agents: Cluster) -> Node:
    return agents.nodes[0]


async def _status(peers: PeerDirectory, where: NodeAddress | str, deadline_s: float | None = None) -> str:
    reply = await peers.unary(
        where,
        "AdminService/Status",
        admin_pb2.StatusRequest(),
        admin_pb2.StatusReply,
        awaited="its status",
        deadline_s=deadline_s,
    )
    return str(reply.node.identity.node_id)


async def test_a_node_is_met_by_name_or_by_address(peers: PeerDirectory, node: Node) -> None:
    assert await _status(peers, node.address) == "n0"
    assert await _status(peers, node.address.grpc_address) == "n0"
    assert peers.identity("n0") == node.address.identity
    assert peers.resolve("any-job", "n0") == node.address
    assert await peers.bulk_address(node.address) == node.status().bulk_address


async def test_an_error_of_the_peer_keeps_its_kind(peers: PeerDirectory, node: Node) -> None:
    request = peer_pb2.OpenObjectRequest(sender=sender_to_pb(Sender(ME.identity)), object=object_to_pb(NOWHERE))
    with pytest.raises(ObjectNotFoundError, match="n0"):
        await peers.unary(
            node.address, "PeerService/OpenObject", request, peer_pb2.OpenObjectReply, awaited="a description"
        )


async def test_who_answers_as_somebody_else_is_not_asked(peers: PeerDirectory, node: Node) -> None:
    wanted = NodeAddress(NodeIdentity("n7", 1), node.address.grpc_address)
    for _ in range(2):
        with pytest.raises(PeerUnavailableError, match=r"expected node n7 .*found node n0"):
            await _status(peers, wanted)


async def test_a_node_that_nobody_told_of_cannot_be_resolved(peers: PeerDirectory) -> None:
    with pytest.raises(PeerUnavailableError, match="n5"):
        peers.resolve("job", "n5")


async def test_nobody_there_fails_at_once_and_says_who(peers: PeerDirectory) -> None:
    with dead_peer() as address:
        began = time.monotonic()
        with pytest.raises(PeerUnavailableError, match=address):
            await _status(peers, NodeAddress(NodeIdentity("gone", 1), address))
        assert time.monotonic() - began < 2


async def test_a_mute_peer_costs_its_deadline_and_no_more(peers: PeerDirectory) -> None:
    """F15: what, whom, how long; also for many callers at once."""
    with mute_peer() as address:
        began = time.monotonic()
        outcomes = await asyncio.gather(*(_status(peers, address, 0.5) for _ in range(20)), return_exceptions=True)
        assert time.monotonic() - began < 2
    assert all(isinstance(outcome, DeadlineExceededError) for outcome in outcomes)
    assert all(part in str(outcomes[0]) for part in ("0.5 s", "Hello", address))


async def test_a_name_that_is_not_known_yet_is_tried_until_the_deadline(peers: PeerDirectory) -> None:
    """F34: DNS is not ready at pod start."""
    began = time.monotonic()
    with pytest.raises(ReplicatorError, match=r"nowhere\.invalid"):
        await _status(peers, "nowhere.invalid:7070", 1.0)
    assert time.monotonic() - began > 0.6


async def test_a_peer_that_was_killed_and_came_back_on_the_same_port_is_reached_by_the_next_call(
    peers: PeerDirectory, own_three: Cluster
) -> None:
    """F45, F19: the new incarnation is told apart, and those who must know are told."""
    node = own_three.nodes[0]
    before = node.address
    told: list[tuple[NodeAddress, NodeAddress]] = []
    peers.on_replaced.append(lambda was, now: told.append((was, now)))
    assert await _status(peers, before) == "n0"
    port = node.port
    await asyncio.to_thread(node.kill)
    with pytest.raises(PeerUnavailableError):
        await _status(peers, before)
    await asyncio.to_thread(node.start, "--port", str(port))
    assert node.address.identity != before.identity
    assert await _status(peers, before) == "n0"
    assert told == [(before, node.address)]
    assert peers.identity("n0") == node.address.identity


async def test_a_restart_that_went_unnoticed_is_noticed_by_the_next_call(
    peers: PeerDirectory, own_three: Cluster
) -> None:
    """F45: no call failed in between, and the answer still comes from whoever is there now."""
    node = own_three.nodes[0]
    before = node.address
    await _status(peers, before)
    port = node.port
    await asyncio.to_thread(node.kill)
    await asyncio.to_thread(node.start, "--port", str(port))
    request = peer_pb2.InventoryRequest(sender=sender_to_pb(Sender(ME.identity)))
    assert [
        reply
        async for reply in peers.stream(
            before,
            "PeerService/Inventory",
            request,
            peer_pb2.InventoryReply,
            awaited="its inventory",
            idle_s=2.0,
        )
    ] == []
    assert peers.identity("n0") == node.address.identity


async def test_a_call_meant_for_the_former_process_is_refused_by_the_new_one(node: Node) -> None:
    """F45: even when the connection itself cannot tell."""
    import grpc.aio

    from replicator.agent.link import MEANT_FOR_KEY

    async with grpc.aio.insecure_channel(node.address.grpc_address) as channel:
        call = channel.unary_unary(
            "/replicator.v1.PeerService/OpenObject",
            request_serializer=peer_pb2.OpenObjectRequest.SerializeToString,
            response_deserializer=peer_pb2.OpenObjectReply.FromString,
        )
        former = dataclasses.replace(node.address.identity, incarnation=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(peer_pb2.OpenObjectRequest(), timeout=5, metadata=((MEANT_FOR_KEY, str(former)),))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert str(node.address.identity) in (caught.value.details() or "")


async def test_an_agent_that_moved_is_found_after_it_said_so(own_three: Cluster) -> None:
    """F34: members keep its address up to date, although nobody joined again."""
    from agent_harness import wait_until

    moved = own_three.nodes[2]
    before = moved.address.grpc_address
    await asyncio.to_thread(moved.kill)
    await asyncio.to_thread(moved.start_elsewhere)
    assert moved.address.grpc_address != before

    def is_known() -> bool:
        (job,) = own_three.nodes[0].status().jobs
        return moved.address.grpc_address in {member.grpc_address for member in job.members}

    await asyncio.to_thread(wait_until, is_known, "n0 knows where n2 is now")


async def test_who_knows_the_same_members_is_not_told_them_again(three: Cluster) -> None:
    """A lookup asks every node, and every node knows all: the lists would be as many bytes as nodes squared."""
    sender = sender_to_pb(Sender(three.nodes[1].address.identity, three.ranks[0].job, 1))
    full = three.nodes[0].ask("Hello", peer_pb2.HelloRequest(sender=sender), peer_pb2.HelloReply)
    told = sorted(
        f"{one.identity.node_id}#{one.identity.incarnation:016x}@{one.grpc_address}" for one in full.known_members
    )
    digest = int.from_bytes(hashlib.blake2b("\n".join(told).encode(), digest_size=8).digest(), "big")
    for known, members in ((digest, 0), (digest ^ 1, 3)):
        request = peer_pb2.HelloRequest(sender=sender, known_digest=known)
        assert len(three.nodes[0].ask("Hello", request, peer_pb2.HelloReply).known_members) == members


async def test_a_claim_to_be_somebody_elsewhere_is_not_believed(three: Cluster) -> None:
    """F37: an address is believed when the node itself answers there."""
    job = three.ranks[0].job
    with dead_peer() as address:
        request = peer_pb2.HelloRequest(
            sender=sender_to_pb(Sender(three.nodes[1].address.identity, job, 1)), grpc_address=address
        )
        three.nodes[0].ask("Hello", request, peer_pb2.HelloReply)
        reply = three.nodes[0].ask("Hello", request, peer_pb2.HelloReply)
    assert address not in {member.grpc_address for member in reply.known_members}
    assert reply.highest_epoch == 1
    assert {member.identity.node_id for member in reply.known_members} == {"n0", "n1", "n2"}


async def test_links_that_are_not_used_are_bounded(
    peers: PeerDirectory, agents: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every table has a bound."""
    monkeypatch.setattr("replicator.agent.peers.MAX_IDLE_LINKS", 1)
    for _ in range(2):
        for node in agents.nodes:
            assert await _status(peers, node.address) == node.node_id
    assert len(peers._links) <= 2


async def test_a_node_is_found_again_after_another_one_of_its_name_came_and_went(
    shm_root: Path, own_three: Cluster
) -> None:
    """F19, F34: it answered at its address all the time, on a connection on which nobody had to ask who is there."""
    node = own_three.nodes[0]
    there = node.address.grpc_address
    config = AgentConfig(root=str(shm_root / "me"), node_id="me", deadline_s=1.5, peers=(there,))
    store = Store(open_root(shm_root / "me", create=True))
    directory = PeerDirectory(config, ME, Jobs(store, ME, 1), Counters(), SocketTransport(config).channel)
    monitor = HealthMonitor(config, directory, Counters())
    double = Node(node.node_id, shm_root / "double", own_three.flags)
    alive = asyncio.Event()

    def changed(before: NodeHealth | None, now: NodeHealth) -> None:
        if now.state is NodeState.ALIVE and now.node == node.address:
            alive.set()

    await _status(directory, there)
    try:
        await asyncio.to_thread(double.start)
        await _status(directory, double.address.grpc_address)
        assert directory.identity("n0") == double.address.identity
    finally:
        await asyncio.to_thread(double.kill)
    monitor.on_change.append(changed)
    watch = asyncio.create_task(monitor.run())
    try:
        await asyncio.wait_for(alive.wait(), 10)
        assert directory.resolve("any-job", "n0") == node.address
        assert directory.known() == (node.address,)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await directory.close()
        store.close()
