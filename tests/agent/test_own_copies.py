"""When an owner tells the coordinator of its copies, in an order of events that real agents only rarely have."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from replicator.agent.background import Background
from replicator.agent.own_copies import OwnCopies
from replicator.config import AgentConfig
from replicator.decide.types import Manifest, ManifestEntry
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity

VERSION = ContainerVersion(CheckpointContainerId("job", 1), 1 << 32)
ENTRY = ManifestEntry("a", 1, 2, "n0")


async def test_a_coordinator_that_forgot_is_told_although_a_copy_was_lacking_when_it_asked() -> None:
    """F19: coordinator and buddy are one node, whose agent is replaced. It asks again, before its copy is confirmed."""
    lacking: list[Any] = []
    told = asyncio.Event()
    manifest = Manifest(VERSION, 1, "n0", 1, 1, 1, (ENTRY,))

    async def confirm(job: str, node_id: str) -> None:
        pass

    replicator: Any = SimpleNamespace(
        unacknowledged=lambda *_: list(lacking), ensure=lambda *_: None, may_be_whole=lambda *_: True
    )
    jobs: Any = SimpleNamespace(epoch=lambda _: 1, buddies=lambda _: ("n1",), acting=lambda _, node_id: node_id)
    store: Any = SimpleNamespace(
        is_protected=lambda _: False,
        versions=lambda _: [VERSION],
        objects=lambda _: {"a": SimpleNamespace(size=1, crc32c=2)},
    )
    background = Background()
    copies = OwnCopies(
        AgentConfig(deadline_s=6.0),
        NodeAddress(NodeIdentity("n0", 1), "127.0.0.1:1"),
        store,
        jobs,
        SimpleNamespace(confirm=confirm),  # type: ignore[arg-type]
        SimpleNamespace(get=lambda _: manifest),  # type: ignore[arg-type]
        replicator,
        background,
        lambda *_: told.set(),
        lambda _: None,
    )
    try:
        copies.check(VERSION)
        await asyncio.wait_for(told.wait(), 5)
        await asyncio.sleep(0)  # the report ends
        told.clear()
        lacking.append(VERSION.object("a"))
        copies.check(VERSION, again=True)
        lacking.clear()
        replicator.on_acknowledged(VERSION)
        await asyncio.wait_for(told.wait(), 5)
    finally:
        await background.close()
