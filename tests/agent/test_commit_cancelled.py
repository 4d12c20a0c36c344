"""A commit whose caller gave up while the manifest was being stored."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from replicator.agent.abandon import Abandonment
from replicator.agent.commit import Committer
from replicator.agent.counters import Counters
from replicator.decide.types import Manifest, ManifestEntry
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity, make_generation

NODE = NodeAddress(NodeIdentity("n0", 1), "127.0.0.1:1")
VERSION = ContainerVersion(CheckpointContainerId("job", 1), make_generation(1, 1))


def test_what_is_still_being_stored_is_not_abandoned() -> None:
    """The thread that stores it goes on, and there would be a manifest of objects that were dropped."""
    storing, go_on = threading.Event(), threading.Event()
    stored: dict[ContainerVersion, bytes] = {}
    dropped: list[ContainerVersion] = []

    def put(data: bytes, crc: int) -> None:
        storing.set()
        go_on.wait(10)
        stored[VERSION] = data

    def drop(version: ContainerVersion, reason: str) -> None:
        dropped.append(version)

    parts: Any = SimpleNamespace(
        config=SimpleNamespace(deadline_s=1.0),
        store=SimpleNamespace(manifest=stored.get, objects=lambda version: {}),
        jobs=SimpleNamespace(check=lambda job, epoch: None, has_joined=lambda job, epoch: True),
        peers=SimpleNamespace(on_replaced=[]),
        manifests=SimpleNamespace(put=put),
        replicator=SimpleNamespace(forget=lambda version: None),
        retention=SimpleNamespace(drop_abandoned=drop),
    )
    manifest = Manifest(
        version=VERSION,
        epoch=1,
        coordinator_node_id="n0",
        replicas=1,
        world_size=1,
        created_unix_ms=1,
        entries=(ManifestEntry("shard", 1, 1, "n1"),),
    )

    async def main() -> None:
        counters = Counters()
        abandonment = Abandonment(
            parts.config, NODE, parts.store, parts.jobs, parts.peers, parts.replicator, parts.retention, counters
        )
        committer = Committer(
            *(parts.config, NODE, parts.store, parts.jobs, parts.peers, parts.manifests),
            *(parts.replicator, parts.retention, abandonment, counters),
        )
        committing = asyncio.create_task(committer.commit(manifest, 1.0, lambda event: None))
        assert await asyncio.to_thread(storing.wait, 10)
        committing.cancel()
        await asyncio.sleep(0.05)
        given_up = await abandonment.drop("job", 1, [VERSION], "a newer incarnation says so")
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await committing
        await asyncio.sleep(0.05)
        assert (given_up, dropped) == ([], [])
        assert list(stored) == [VERSION]

    asyncio.run(main())
