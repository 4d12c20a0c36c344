"""Whose acknowledgement a copy is, in an order of events that real agents only rarely have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from replicator.agent.counters import Counters
from replicator.agent.replicate import Replicator
from replicator.config import AgentConfig
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2, peer_pb2
from replicator.wire import Sender

VERSION = ContainerVersion(CheckpointContainerId("job", 1), 1 << 32)
OWNER = NodeAddress(NodeIdentity("n0", 1), "127.0.0.1:1")
BUDDY = NodeAddress(NodeIdentity("n1", 1), "127.0.0.1:2")
REPLACED = NodeAddress(NodeIdentity("n1", 2), "127.0.0.1:2")


@pytest.mark.parametrize("replaced", [False, True])
async def test_what_a_buddy_said_before_it_was_replaced_is_no_word_of_the_next_one(replaced: bool) -> None:
    """F19: it has sealed and died, and its answer is read when the next one is there, which has nothing."""
    info = ObjectInfo(VERSION.object("a"), 5, 7, 1 << 22, (7,), "n0", "ab")
    there = [BUDDY]

    async def stream(
        *_: object, on_greeted: Callable[[NodeIdentity], None], **__: object
    ) -> AsyncIterator[peer_pb2.OfferEvent]:
        on_greeted(there[0].identity)
        if replaced:
            there[0] = REPLACED
            for callback in peers.on_replaced:
                callback(BUDDY, REPLACED)
        yield peer_pb2.OfferEvent(
            sealed_many=peer_pb2.SealedObjects(index=[0], size_bytes=[5], crc32c=[7]), lane="grpc"
        )

    peers: Any = SimpleNamespace(
        on_replaced=[],
        identity=lambda _: there[0].identity,
        resolve=lambda *_: there[0],
        sender_of=lambda job: Sender(OWNER.identity, job, 1),
        stream=stream,
    )
    jobs: Any = SimpleNamespace(check=lambda *_: None, buddies=lambda _: ("n1",), is_member=lambda _: True)
    store: Any = SimpleNamespace(get=lambda _: info)
    replicator = Replicator(AgentConfig(deadline_s=6.0), OWNER, store, jobs, peers, Counters())
    events: asyncio.Queue[local_pb2.ReplicationEvent | local_pb2.ReplicatedObjects] = asyncio.Queue()
    try:
        replicator.replicate([info.object], 1, 5.0, events.put_nowait)
        assert isinstance(await asyncio.wait_for(events.get(), 5), local_pb2.ReplicatedObjects)
        assert replicator.acknowledged(info.object) is not replaced
    finally:
        await replicator.close()
