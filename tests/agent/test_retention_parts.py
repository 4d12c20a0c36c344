"""What retention is told by other parts of an agent: a real store, lookup and retention in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster import MIB

from replicator.agent.core import AgentCore, build_core
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.config import AgentConfig
from replicator.decide.health import NodeHealth, NodeState
from replicator.decide.types import ContainerInventory, HeldObject, Manifest, ManifestEntry, NodeInventory, Unanswered
from replicator.errors import StoreFullError
from replicator.ids import ContainerVersion, NodeAddress, NodeIdentity
from replicator.native import crc32c
from replicator.store import Store
from replicator.store.client_lock import ClientLock
from replicator.store.paths import open_root
from replicator.store.segment import MappingCache
from replicator.store.trailer import capacity_for
from replicator.store.writer import ObjectWriter
from replicator.v1 import local_pb2
from replicator.wire import manifest_to_bytes

ME = NodeAddress(NodeIdentity("me", 9), "127.0.0.1:1")
TRAINER = "ab"


def _agent(root: Path) -> AgentCore:
    store = Store(open_root(root, create=True), 16 * MIB)
    store.rebuild()
    config = AgentConfig(root=str(root), node_id="me", keep_last=1, deadline_s=6.0)
    made = build_core(config, ME, store, Jobs(store, ME, 1), Counters())
    store.on_pressure = made.retention.on_pressure
    return made


@pytest.fixture
async def core(shm_root: Path) -> AsyncIterator[AgentCore]:
    """A job of this node alone, which keeps one protected container beside what it must keep."""
    made = _agent(shm_root / "me")
    store = made.store
    made.jobs.join("job", 1, [ME], 1)
    lock = ClientLock(store.paths, TRAINER)
    lock.acquire()
    yield made
    lock.close()
    await made.close()
    store.close()


def _protect(core: AgentCore, step: int, *elsewhere: ManifestEntry, marked: bool = True) -> ContainerVersion:
    """A protected container with an object of 4 MiB that is here, and with others that were on another node."""
    version = core.jobs.begin("job", step, core.jobs.epoch("job"))
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
    data = manifest_to_bytes(Manifest(version, version.epoch, "me", 1, 1, 1, (mine, *elsewhere)))
    core.manifests.put(data, crc32c(data))
    if marked:
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


@pytest.mark.parametrize("pressed", [False, True])
async def test_what_a_lookup_passed_over_takes_no_place_also_when_its_mark_comes_late(
    core: AgentCore, pressed: bool
) -> None:
    """F04: a node that was away when step 2 was protected hears of it when too much of it is lost."""
    found, hurt = _protect(core, 1), _protect(core, 2, LOST, marked=False)
    assert (await core.lookup.run("job", 1, 1.0, None)).container.step == 1
    core.store.mark_protected(hurt)
    assert (core.retention.on_pressure(4 * MIB) if pressed else await core.retention.run("job")) == 0
    assert core.store.versions("job") == [found, hurt]


@pytest.mark.parametrize("loaded", [False, True])
async def test_copies_are_taken_of_what_a_job_goes_on_from(core: AgentCore, loaded: bool) -> None:
    """F04: a newer one is protected, and lost since. What is gone on from needs its copies more than ever."""
    found, _ = _protect(core, 1), _protect(core, 2, LOST)
    assert "is older than" in core.retention.refusal(found)
    if loaded:
        core.jobs.join("job", 2, [ME], 1)
        assert [event async for event in core.puller.retrieve(found, (), 1.0)] == []
    else:
        await core.lookup.run("job", 1, 1.0, None)
    assert core.retention.refusal(found) == ""
    _protect(core, 3)
    assert "is older than" in core.retention.refusal(found)


@pytest.mark.parametrize("came_back", [True, False], ids=["came back", "found at the start"])
async def test_a_node_that_does_not_say_what_it_has_is_asked_again(
    core: AgentCore, monkeypatch: pytest.MonkeyPatch, came_back: bool
) -> None:
    """It is taken to have what it should as long as it is silent, and it may have nothing."""
    other = NodeAddress(NodeIdentity("n2", 1), "127.0.0.1:2")
    core.jobs.join("job", 2, [ME, other], 1)
    _protect(core, 1)
    if came_back:
        core.healer._on_change(None, NodeHealth(other, NodeState.ALIVE, "it answers", 0.0))
    (own,) = (await core.lookup.inventories("job", 1.0, nodes=()))[0]
    manifests = {version: core.manifests.get(version) for version in core.store.versions("job")}
    silent = [Unanswered("n2", other.grpc_address, "for this test")]
    answers = [([own], manifests, silent), ([own, NodeInventory(other, ())], manifests, [])]

    async def inventories(*_: Any, **__: Any) -> Any:
        return answers.pop(0)

    monkeypatch.setattr(core.lookup, "inventories", inventories)
    core.healer._look_at_all = not came_back
    await core.healer._look()
    assert core.healer.short() == []
    assert core.healer._pause_s > 0, "it is looked at again soon"
    await core.healer._look()
    assert [short.objects for short in core.healer.short()] == [1]


async def test_a_node_that_was_suspect_while_it_started_came_back_all_the_same(core: AgentCore) -> None:
    """Its first answer may be that it starts. One that was only slow has what it had."""

    def health(incarnation: int, state: NodeState) -> NodeHealth:
        return NodeHealth(NodeAddress(NodeIdentity("n2", incarnation), "127.0.0.1:2"), state, "for this test", 0.0)

    alive, suspect = NodeState.ALIVE, NodeState.SUSPECT
    healer = core.healer
    changes = [
        (None, health(1, suspect)),
        (health(1, suspect), health(1, alive)),
        (health(1, alive), health(1, suspect)),
    ]
    changes += [
        (health(1, suspect), health(1, alive)),
        (None, health(2, suspect)),
        (health(2, suspect), health(2, alive)),
    ]
    returned = []
    for old, new in changes:
        healer._returned.clear()
        healer._on_change(old, new)
        returned.append("n2" in healer._returned)
    assert returned == [False, True, False, False, False, True]


async def test_what_was_dropped_and_is_loaded_again_is_as_wanted_as_before(core: AgentCore) -> None:
    """F48: what comes late of a dropped one is refused, but not what a restart of the job brings back."""
    found = _protect(core, 1)
    _protect(core, 2, LOST)
    assert await core.retention.run("job") == 1
    assert core.retention.was_dropped(found)
    assert "it was dropped here" in core.retention.refusal(found)
    core.jobs.join("job", 2, [ME], 1)
    assert [event async for event in core.puller.retrieve(found, (), 1.0)] == []
    assert not core.retention.was_dropped(found)
    assert core.retention.refusal(found) == ""


async def test_a_lookup_of_an_older_incarnation_that_ends_late_changes_nothing(
    core: AgentCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11, F04: the newer one found step 2, and the older one asked for what was there before."""
    older, found = _protect(core, 1), _protect(core, 2)
    hurt = _protect(core, 3, LOST)
    inventory = core.lookup.local

    def before(job: str, step: int | None = None) -> tuple[ContainerInventory, ...]:
        return tuple(one for one in inventory(job, step) if one.version == older)

    decide = core.lookup._decide

    async def while_another_looks_up(round_: Any, step: int | None) -> Any:
        monkeypatch.undo()
        core.jobs.check("job", 2)
        assert (await core.lookup.run("job", 2, 1.0, None)).container.step == 2
        return await decide(round_, step)

    monkeypatch.setattr(core.lookup, "local", before)
    monkeypatch.setattr(core.lookup, "_decide", while_another_looks_up)
    assert (await core.lookup.run("job", 1, 1.0, None)).container.step == 1
    assert await core.retention.run("job") == 1
    assert core.store.versions("job") == [found, hurt]


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_a_restart_of_the_job_loads_is_kept_until_it_has_protected_something(
    core: AgentCore, restarted: bool, shm_root: Path
) -> None:
    """F04: also on nodes that were not asked for the plan, and by an agent that was started again meanwhile."""
    found = _protect(core, 1)
    core.jobs.join("job", 2, [ME], 1)
    hurt = _protect(core, 2, LOST)
    core.jobs.join("job", 3, [ME], 1)
    assert [event async for event in core.puller.retrieve(found, (), 1.0)] == []
    # What somebody else looks at does not change what the job goes on from.
    assert [event async for event in core.puller.retrieve(hurt, (), 1.0, observer=True)] == []
    if restarted:
        await core.close()
        core.store.close()
        core = _agent(shm_root / "me")
    try:
        assert core.retention.on_pressure(4 * MIB) == 0
        assert await core.retention.run("job") == 0
        assert core.store.versions("job") == [found, hurt]
        newer = _protect(core, 3)
        assert await core.retention.run("job") == 2
        assert core.store.versions("job") == [newer]
    finally:
        if restarted:
            await core.close()
            core.store.close()


async def test_a_plan_is_given_also_when_its_mark_cannot_be_stored(
    core: AgentCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node says that it is protected, and there is no room for that here."""
    found = _protect(core, 1, marked=False)
    (held,) = core.lookup.local("job")
    monkeypatch.setattr(core.lookup, "local", lambda *_: (replace(held, is_protected=True),))
    monkeypatch.setattr(core.store, "mark_protected", _no_room)
    assert (await core.lookup.run("job", 1, 1.0, None)).container.step == 1
    assert not core.store.is_protected(found)


async def test_what_cannot_be_marked_as_protected_is_so_once_there_is_room(
    core: AgentCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All owners have reported when it is committed, and none of them will do so again."""
    version = _protect(core, 1, marked=False)
    manifest = core.manifests.get(version)
    assert manifest is not None
    begun: list[Any] = []
    begin = core.committer._distribution.begin
    monkeypatch.setattr(core.committer._distribution, "begin", lambda *arguments: begun.append(arguments))
    mark_protected = core.store.mark_protected
    refused: list[ContainerVersion] = []

    def no_room_yet(version: ContainerVersion) -> bool:
        refused.append(version)
        return mark_protected(version) if len(refused) == 3 else _no_room(version)

    monkeypatch.setattr(core.store, "mark_protected", no_room_yet)
    events: asyncio.Queue[local_pb2.CommitEvent] = asyncio.Queue()
    await core.committer.commit(manifest, 5.0, events.put_nowait)
    held = [HeldObject(entry.name, entry.size, entry.crc32c) for entry in manifest.entries]
    core.committer.owner_reported(version, "me", held)
    assert not refused, "it is not committed yet"
    begin(*begun[0])
    async with asyncio.timeout(20):
        assert [(await events.get()).is_protected for _ in range(2)] == [False, True]
    assert len(refused) == 3


def _no_room(version: ContainerVersion) -> bool:
    raise StoreFullError(f"no room for the mark of {version}")


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
