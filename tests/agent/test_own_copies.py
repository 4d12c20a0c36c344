"""When an owner tells the coordinator of its copies, in an order of events that real agents only rarely have."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from replicator.agent.background import Background
from replicator.agent.own_copies import OwnCopies
from replicator.config import AgentConfig
from replicator.decide.types import Manifest, ManifestEntry
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity

VERSION = ContainerVersion(CheckpointContainerId("job", 1), 1 << 32)
NEWER = ContainerVersion(CheckpointContainerId("job", 2), (1 << 32) + 1)
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


@pytest.mark.parametrize("resumable", [False, True])
async def test_what_lacks_a_copy_is_offered_until_one_of_its_kind_is_protected(resumable: bool) -> None:
    """F43, F49: a newer one, of the model alone, that is protected is no reason to give up the copies of this one."""
    manifest = Manifest(VERSION, 1, "n0", 1, 1, 1, (ENTRY,))
    offered = asyncio.Event()
    replicator: Any = SimpleNamespace(
        unacknowledged=lambda *_: [VERSION.object("a")], ensure=lambda *_: offered.set(), forget=lambda _: None
    )
    store: Any = SimpleNamespace(is_protected=lambda _: False)
    manifests: Any = SimpleNamespace(get=lambda _: manifest, protected=lambda _: {NEWER: resumable})
    background = Background()
    copies = OwnCopies(
        AgentConfig(deadline_s=0.1),
        NodeAddress(NodeIdentity("n0", 1), "127.0.0.1:1"),
        store,
        SimpleNamespace(epoch=lambda _: 1),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        manifests,
        replicator,
        background,
        lambda *_: None,
        lambda _: None,
    )
    try:
        copies.check(VERSION)
        offered.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(offered.wait(), 0.5 if resumable else 10)
        assert offered.is_set() is not resumable
    finally:
        await background.close()
