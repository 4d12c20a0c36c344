"""Health of real agents: stopped, killed, replaced."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster import Cluster, Node

from replicator.agent.counters import Counters
from replicator.agent.health import HealthMonitor, NodeHealth, NodeState
from replicator.agent.jobs import Jobs
from replicator.agent.peers import PeerDirectory
from replicator.agent.transport import SocketTransport
from replicator.config import AgentConfig
from replicator.ids import NodeAddress, NodeIdentity
from replicator.store import Store
from replicator.store.paths import open_root

ME = NodeAddress(NodeIdentity("me", 7), "127.0.0.1:1")
DEADLINE_S = 1.5


class Watch:
    """A monitor that runs in this process, and what it told."""

    def __init__(self, root: Path, node: Node) -> None:
        self.store = Store(open_root(root, create=True))
        self.store.rebuild()
        config = AgentConfig(root=str(root), node_id="me", deadline_s=DEADLINE_S, peers=(node.address.grpc_address,))
        self.peers = PeerDirectory(config, ME, Jobs(self.store, ME, 1), Counters(), SocketTransport(config).channel)
        self.monitor = HealthMonitor(config, self.peers, Counters())
        self.told: asyncio.Queue[NodeHealth] = asyncio.Queue()
        self.monitor.on_change.append(lambda old, new: self.told.put_nowait(new))
        self.task = asyncio.create_task(self.monitor.run())

    async def next(self) -> tuple[NodeState, NodeIdentity, str]:
        async with asyncio.timeout(10):
            told = await self.told.get()
        return told.state, told.node.identity, told.reason

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.peers.close()
        self.store.close()


@pytest.fixture
def node(own_three: Cluster) -> Node:
    return own_three.nodes[0]


@pytest.fixture
async def watch(shm_root: Path, node: Node) -> AsyncIterator[Watch]:
    made = Watch(shm_root / "me", node)
    yield made
    await made.close()


async def test_a_peer_that_accepts_and_never_answers_is_suspect_then_dead_then_back(watch: Watch, node: Node) -> None:
    """F19, F15: a stopped process keeps its connections; only a deadline tells."""
    assert node.agent is not None
    assert (await watch.next())[:2] == (NodeState.ALIVE, node.address.identity)
    began = time.monotonic()
    node.agent.signal(signal.SIGSTOP)
    try:
        state, identity, reason = await watch.next()
        assert (state, identity) == (NodeState.SUSPECT, node.address.identity)
        assert "its health" in reason or "its Hello" in reason
        state, identity, reason = await watch.next()
        took = time.monotonic() - began
        assert (state, identity) == (NodeState.DEAD, node.address.identity)
        assert "n0" in reason or node.address.grpc_address in reason
        assert DEADLINE_S * 2 / 3 <= took <= 1.5 * DEADLINE_S + 1
    finally:
        node.agent.signal(signal.SIGCONT)
    assert await watch.next() == (NodeState.ALIVE, node.address.identity, "it answers")


async def test_a_killed_peer_is_suspect_and_its_replacement_on_the_same_port_makes_it_dead(
    watch: Watch, node: Node
) -> None:
    """F19, F45: the port answers again, and it is not the same node's memory any more."""
    before = node.address.identity
    assert (await watch.next())[:2] == (NodeState.ALIVE, before)
    port = node.port
    await asyncio.to_thread(node.kill)
    await asyncio.to_thread(node.start, "--port", str(port))
    told = [await watch.next()]
    while told[-1][0] is not NodeState.ALIVE:
        told.append(await watch.next())
    assert [state for state, _, _ in told][-2:] == [NodeState.DEAD, NodeState.ALIVE]
    assert [identity for _, identity, _ in told][-2:] == [before, node.address.identity]


async def test_the_health_protocol_itself_refuses_a_question_for_the_former_process(watch: Watch, node: Node) -> None:
    """F45: also on a connection that looks as it did."""
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from replicator.agent.link import MEANT_FOR_KEY

    async with grpc.aio.insecure_channel(node.address.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        request = health_pb2.HealthCheckRequest()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(request, timeout=5, metadata=((MEANT_FOR_KEY, str(NodeIdentity("n0", 1))),))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert (await stub.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
