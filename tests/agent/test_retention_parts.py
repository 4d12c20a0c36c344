"""What retention is told by other parts of an agent: a real store, lookup and retention in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster import MIB

from replicator.agent.core import AgentCore, build_core
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.config import AgentConfig
from replicator.decide.types import Manifest, ManifestEntry
from replicator.ids import ContainerVersion, NodeAddress, NodeIdentity
from replicator.native import crc32c
from replicator.store import Store
from replicator.store.client_lock import ClientLock
from replicator.store.paths import open_root
from replicator.store.segment import MappingCache
from replicator.store.trailer import capacity_for
from replicator.store.writer import ObjectWriter
from replicator.wire import manifest_to_bytes

ME = NodeAddress(NodeIdentity("me", 9), "127.0.0.1:1")
TRAINER = "ab"


@pytest.fixture
async def core(shm_root: Path) -> AsyncIterator[AgentCore]:
    """A job of this node alone, which keeps one protected container beside what it must keep."""
    store = Store(open_root(shm_root / "me", create=True), 16 * MIB)
    store.rebuild()
    config = AgentConfig(root=str(shm_root / "me"), node_id="me", keep_last=1, deadline_s=6.0)
    made = build_core(config, ME, store, Jobs(store, ME, 1), Counters())
    store.on_pressure = made.retention.on_pressure
    made.jobs.join("job", 1, [ME], 1)
    lock = ClientLock(store.paths, TRAINER)
    lock.acquire()
    yield made
    lock.close()
    await made.close()
    store.close()


def _protect(core: AgentCore, step: int, *elsewhere: ManifestEntry) -> ContainerVersion:
    """A protected container with an object of 4 MiB that is here, and with others that were on another node."""
    version = core.jobs.begin("job", step, 1)
    one = version.object("a")
    reserved = core.store.reserve(TRAINER, capacity_for(4 * MIB))
    mappings = MappingCache(core.store.paths)
    mapped = mappings.get(reserved.segment, reserved.inode, reserved.capacity)
    writer = ObjectWriter(mapped, one, "me", TRAINER, lambda capacity: mapped)
    writer.write(bytes(4 * MIB))
    info = writer.close()
    core.store.seal(TRAINER, mapped.name, info)
    mappings.close()
    mine = ManifestEntry("a", info.size, info.crc32c, "me")
    data = manifest_to_bytes(Manifest(version, 1, "me", 1, 1, 1, (mine, *elsewhere)))
    core.manifests.put(data, crc32c(data))
    core.store.mark_protected(version)
    return version


LOST = ManifestEntry("b", 1, 1, "gone")


@pytest.mark.parametrize("pressed", [False, True])
async def test_what_a_lookup_of_the_job_found_is_kept_until_a_newer_one_is_protected(
    core: AgentCore, pressed: bool
) -> None:
    """F04: all is here that this node is to have of step 2, and what another node had of it is nowhere."""
    found, hurt = _protect(core, 1), _protect(core, 2, LOST)
    plan = await core.lookup.run("job", 1, 1.0, None)
    assert plan.container.step == 1
    if pressed:
        # Room for it would be there without step 1, and not with it.
        assert core.retention.on_pressure(4 * MIB) == 0
    else:
        assert await core.retention.run("job") == 0
    assert core.store.versions("job") == [found, hurt]
    newer = _protect(core, 3)
    assert await core.retention.run("job") == 2
    assert core.store.versions("job") == [newer]


async def test_what_a_lookup_for_an_observer_or_for_one_step_found_pins_nothing(core: AgentCore) -> None:
    _protect(core, 1)
    hurt = _protect(core, 2, LOST)
    for epoch, step in ((0, None), (1, 1)):
        assert (await core.lookup.run("job", epoch, 1.0, step)).container.step == 1
    assert await core.retention.run("job") == 1
    assert core.store.versions("job") == [hurt]


@pytest.mark.parametrize("pressed", [False, True])
async def test_a_container_with_a_hole_here_supersedes_nothing(core: AgentCore, pressed: bool) -> None:
    """F04, F49: protected, and since then this node's own copy went to quarantine."""
    whole, holed = _protect(core, 1), _protect(core, 2)
    core.store.quarantine(holed.object("a"), "for this test")
    if pressed:
        assert core.retention.on_pressure(4 * MIB) == 0
    else:
        assert await core.retention.run("job") == 0
    assert core.store.versions("job") == [whole, holed]
