"""Pulls of one agent whose parts run in the test's own process, from agents that are processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cluster import MIB, Cluster

from replicator.agent import landing, retrieve_small
from replicator.agent.batches import retrieved
from replicator.agent.core import AgentCore, build_core
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.takings import Taking
from replicator.config import AgentConfig
from replicator.decide.types import ObjectSource
from replicator.errors import CorruptObjectError, ReplicationError, StoreFullError, TransferError
from replicator.ids import NodeAddress, NodeIdentity
from replicator.store import Store
from replicator.store.paths import open_root
from replicator.store.reader import open_object
from replicator.store.trailer import ObjectInfo
from replicator.transfer.turns import Patience, PullPolicy
from replicator.wire import source_to_pb

ME = NodeAddress(NodeIdentity("me", 9), "127.0.0.1:1")


@pytest.fixture
async def core(shm_root: Path, agents: Cluster) -> AsyncIterator[AgentCore]:
    store = Store(open_root(shm_root / "me", create=True), 200 * MIB)
    store.rebuild()
    config = AgentConfig(root=str(shm_root / "me"), node_id="me", deadline_s=6.0)
    made = build_core(config, ME, store, Jobs(store, ME, 1), Counters())
    for node in agents.nodes:
        await made.peers.bulk_address(node.address)
    yield made
    await made.close()
    assert store.usage().reserved_bytes == 0
    store.close()


def _replicated(made: Cluster, content: bytes) -> ObjectInfo:
    """An object that n0 and n1 hold."""
    rank = made.ranks[0]
    one = rank.begin(1).object("a")
    info = rank.write(one, content)
    rank.replicate([one])
    assert rank.outcome(one).ok
    return info


def _source(info: ObjectInfo, *node_ids: str) -> ObjectSource:
    return ObjectSource(info.object.name, info.size, info.crc32c, info.owner_node_id, node_ids)


async def _retrieve(core: AgentCore, info: ObjectInfo, *node_ids: str):  # type: ignore[no-untyped-def]
    version = info.object.version
    event = [event async for event in core.puller.retrieve(version, [_source(info, *node_ids)], 2.0)][-1]
    if event.done_many.names:
        (event,) = retrieved(event.done_many, [source_to_pb(_source(info, *node_ids))])
    return event


async def test_a_large_object_comes_from_all_its_holders_at_once(
    core: AgentCore, three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "MIN_SPREAD_BYTES", 16 * MIB)
    content = os.urandom(MIB) * 21 + b"end"
    info = _replicated(three, content)
    sources = core.puller._opener.sources(info.object, ("n0", "n1"))
    buffer = memoryview(bytearray(info.size))
    seen: list[int] = []
    report = await core.puller._landing.fill(info, sources, buffer, Patience(PullPolicy(2.0)), on_progress=seen.append)
    assert bytes(buffer) == content
    assert {part.node_id for part in report.parts} == {"n0", "n1"}
    assert seen == sorted(seen)
    assert seen[-1] == info.size


async def test_a_bad_half_comes_from_the_other_holder(
    core: AgentCore, three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F01."""
    monkeypatch.setattr(landing, "MIN_SPREAD_BYTES", 16 * MIB)
    content = os.urandom(MIB) * 21
    info = _replicated(three, content)
    with three.nodes[1].paths.object(info.object).open("r+b") as file:
        file.seek(13 * MIB)
        file.write(b"not that")
    event = await _retrieve(core, info, "n0", "n1")
    assert event.done, event
    with open_object(core.store.paths, info.object) as reader:
        reader.verify()
        assert bytes(reader.view) == content
    assert core.counters.get("bad_blocks_received") == 1
    assert [source.node_id for source in core.puller._opener.sources(info.object, ("n1", "n0"))] == ["n0", "n1"]


async def test_when_one_of_two_sources_stops_the_other_gives_all(
    core: AgentCore, own_three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F15, F47."""
    monkeypatch.setattr(landing, "MIN_SPREAD_BYTES", 16 * MIB)
    info = _replicated(own_three, os.urandom(MIB) * 21)
    for node in own_three.nodes:
        await core.peers.bulk_address(node.address)
    assert own_three.nodes[1].agent is not None
    own_three.nodes[1].agent.signal(signal.SIGSTOP)
    event = await _retrieve(core, info, "n0", "n1")
    assert event.done, event


async def test_joining_a_pull_that_fails_is_not_the_end_for_who_has_another_source(
    core: AgentCore, three: Cluster
) -> None:
    """An owner that is gone offered the object; the trainer knows a better source."""
    info = _replicated(three, b"x" * 100_000)
    nobody = NodeAddress(NodeIdentity("n0", 1), "127.0.0.1:1")
    (taking,) = core.puller.take([info], nobody, 2.0)
    assert isinstance(taking, Taking)
    event = await _retrieve(core, info, "n1")
    assert event.done, event
    assert event.source_node_id == "n1"
    with pytest.raises(TransferError):
        await taking.task


async def test_what_does_not_fit_is_an_error_and_leaves_nothing(core: AgentCore, three: Cluster) -> None:
    """F22."""
    info = _replicated(three, b"x" * 100_000)
    core.store.reserve("ab", 199 * MIB)
    big = _replicated(three.new_job(), os.urandom(MIB) * 2)
    event = await _retrieve(core, big, "n0")
    assert event.error_kind == StoreFullError.__name__
    assert core.store.get(info.object) is None
    core.store.client_gone("ab")


@pytest.mark.parametrize("size", [100_000, MIB])
async def test_a_container_that_is_dropped_while_it_is_pulled_does_not_come_back(
    core: AgentCore, three: Cluster, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """F48: looked at again right before the object would get its name."""
    info = _replicated(three, b"x" * size)
    answers = iter(["", "", "it was dropped here: superseded"])
    monkeypatch.setattr(core.retention, "refusal", lambda version: next(answers))
    (taking,) = core.puller.take([info], three.nodes[0].address, 2.0)
    assert isinstance(taking, Taking)
    with pytest.raises(ReplicationError, match="dropped"):
        await taking.task
    assert core.store.get(info.object) is None
    assert not core.store.paths.object(info.object).exists()


@pytest.mark.parametrize("size", [100_000, 2 * MIB])
async def test_a_local_copy_of_other_content_is_set_aside(core: AgentCore, three: Cluster, size: int) -> None:
    """F08, F10: the name is right and the bytes are not."""
    info = _replicated(three, b"x" * size)
    assert (await _retrieve(core, info, "n0")).done
    right = three.ranks[2].write(info.object, b"y" * size)
    event = await _retrieve(core, right, "n2")
    assert event.done, event
    assert not event.was_local
    with open_object(core.store.paths, info.object) as reader:
        assert bytes(reader.view) == b"y" * size
    assert core.counters.get("objects_quarantined") == 1


async def test_a_check_of_a_sound_copy_and_of_a_bad_one(core: AgentCore, three: Cluster) -> None:
    info = _replicated(three, b"x" * 100_000)
    assert (await _retrieve(core, info, "n0")).done
    assert await core.puller.check_local(info.object)
    with core.store.paths.object(info.object).open("r+b") as file:
        file.write(b"y")
    assert not await core.puller.check_local(info.object)
    assert core.store.get(info.object) is None
    assert core.counters.get("objects_quarantined") == 1


async def test_a_read_goes_on_from_a_peer_where_the_local_copy_turns_bad(
    core: AgentCore, three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F01."""
    monkeypatch.setattr("replicator.agent.ranges._WINDOW_BYTES", 4 * MIB)
    content = os.urandom(MIB) * 13
    info = _replicated(three, content)
    assert (await _retrieve(core, info, "n0")).done
    with core.store.paths.object(info.object).open("r+b") as file:
        file.seek(9 * MIB)
        file.write(b"not that")
    pieces = [piece async for piece in core.puller.read_object(info.object.version, _source(info, "n0", "n1"), 2.0)]
    assert b"".join(pieces) == content
    assert core.store.get(info.object) is None


async def test_reads_at_a_time_are_bounded(core: AgentCore, three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one takes memory."""
    info = _replicated(three, b"x" * (2 * MIB))
    version, source = info.object.version, _source(info, "n0")
    slow = [core.puller.read_object(version, source, 2.0) for _ in range(8)]
    for reading in slow:
        assert await anext(reading)
    with pytest.raises(TransferError, match="8 objects"):
        await anext(core.puller.read_object(version, source, 0.2))
    for reading in slow:
        await reading.aclose()  # type: ignore[attr-defined]
    assert await anext(core.puller.read_object(version, source, 0.2))


async def test_a_source_that_lies_about_its_blocks_is_not_believed(
    core: AgentCore, three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = _replicated(three, b"x" * MIB)
    monkeypatch.setattr("replicator.native.combine_blocks", lambda *given: 0)
    event = await _retrieve(core, info, "n0", "n1")
    assert event.error_kind == CorruptObjectError.__name__


async def test_what_is_for_later_waits_until_no_trainer_does(core: AgentCore, three: Cluster) -> None:
    info = _replicated(three, os.urandom(5 * MIB))
    one = info.object
    with core.puller._quiet.disturbed():
        core.puller.retrieve_later(one.version, [_source(info, "n0", "n1")], 20.0)
        core.puller.retrieve_later(one.version, [_source(info, "n0", "n1")], 20.0)
        taking = core.puller._takings.find(one, info.size, info.crc32c)
        assert taking is not None
        done, _ = await asyncio.wait([taking.task], timeout=0.5)
        assert not done
        assert core.store.get(one) is None
    await asyncio.wait_for(taking.task, 10)
    assert core.store.get(one) is not None
    assert core.counters.get("objects_refilled") == 1
    assert core.counters.get("objects_pulled") == 1


async def test_what_is_for_later_is_brought_at_once_when_somebody_wants_it(core: AgentCore, three: Cluster) -> None:
    info = _replicated(three, os.urandom(5 * MIB))
    with core.puller._quiet.disturbed():
        core.puller.retrieve_later(info.object.version, [_source(info, "n0", "n1")], 20.0)
        assert (await _retrieve(core, info, "n0", "n1")).done
    assert core.counters.get("objects_refilled") == 0
    assert core.counters.get("objects_pulled") == 1


async def test_what_is_for_later_and_under_way_gives_way_no_more_to_who_wants_it(
    core: AgentCore, three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "PACED_BYTES", 4 * MIB)
    begun = asyncio.Event()
    land = core.puller._landing.land

    def landing_begins(*arguments: Any) -> Any:
        begun.set()
        return land(*arguments)

    monkeypatch.setattr(core.puller._landing, "land", landing_begins)
    info = _replicated(three, os.urandom(9 * MIB))
    core.puller.retrieve_later(info.object.version, [_source(info, "n0", "n1")], 20.0)
    await asyncio.wait_for(begun.wait(), 10)
    with core.puller._quiet.disturbed():
        assert (await _retrieve(core, info, "n0", "n1")).done
    assert core.counters.get("objects_refilled") == 1


async def test_what_is_for_later_and_was_superseded_meanwhile_is_not_brought(core: AgentCore, three: Cluster) -> None:
    """F48."""
    info = _replicated(three, os.urandom(5 * MIB))
    one = info.object
    with core.puller._quiet.disturbed():
        core.puller.retrieve_later(one.version, [_source(info, "n0", "n1")], 20.0)
        taking = core.puller._takings.find(one, info.size, info.crc32c)
        core.retention.drop_abandoned(one.version, "for this test")
    assert taking is not None
    with pytest.raises(ReplicationError, match="for this test"):
        await asyncio.wait_for(taking.task, 10)
    assert core.store.get(one) is None


async def test_pulls_at_a_time_are_bounded_for_each_who_asks(core: AgentCore, three: Cluster) -> None:
    """F20: what owners just wrote, what replaces lost copies, and what trainers want have slots of their own."""
    rank = three.ranks[0]
    version = rank.begin(1)
    infos = [rank.write(version.object(f"o{number:02}"), os.urandom(300_000)) for number in range(21)]
    begun: list[str] = []
    full, go = asyncio.Event(), asyncio.Event()
    land = core.puller._landing.land

    async def landing_waits(info: ObjectInfo, *arguments: Any) -> Any:
        begun.append(info.object.name)
        if len(begun) == 4 + 2 + 4:
            full.set()
        await go.wait()
        return await land(info, *arguments)

    core.puller._landing.land = landing_waits  # type: ignore[method-assign]
    source = three.nodes[0].address
    takings = core.puller.take(infos[:7], source, 5.0) + core.puller.take(infos[7:14], source, 5.0, background=True)
    wanted = [_source(info, "n0") for info in infos[14:]]

    async def retrieve() -> list[Any]:
        return [event async for event in core.puller.retrieve(version, wanted, 5.0)]

    retrieving = asyncio.create_task(retrieve())
    await asyncio.wait_for(full.wait(), 10)
    # One more slot of any kind would be taken before an answer of another process is here.
    await core.peers.greet(source.grpc_address, 5.0)
    assert sorted(begun) == [info.object.name for info in (*infos[:4], *infos[7:9], *infos[14:18])]
    go.set()
    for taking in takings:
        assert isinstance(taking, Taking)
        await taking.task
    assert sum(event.done for event in await retrieving) == 7
    assert len(begun) == len(infos)


async def test_small_objects_that_another_rank_has_brought_meanwhile_are_not_brought_again(
    core: AgentCore, three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F20: it looked for them before they were here, and asks for them afterwards."""
    rank = three.ranks[0]
    version = rank.begin(1)
    missing, held = (
        [rank.write(version.object(f"{part}{number}"), os.urandom(500)) for number in range(3)] for part in "ab"
    )

    async def retrieve_all(infos: list[ObjectInfo]) -> dict[str, bool]:
        """Whether each one was here already."""
        sources = [_source(info, "n0") for info in infos]
        was_local = {}
        async for event in core.puller.retrieve(version, sources, 2.0):
            assert not event.error_kind, event
            was_local.update(dict.fromkeys(event.done_many.names, event.done_many.was_local))
            if event.done:
                was_local[event.name] = event.was_local
        return was_local

    assert not any((await retrieve_all(held)).values())
    # So the missing ones are looked for first, and then, in a thread, those that are here.
    monkeypatch.setattr(retrieve_small, "MAX_PIECE_OBJECTS", len(missing))
    check_many = core.landing.check_many

    async def brought_by_another(verify: Any) -> Any:
        monkeypatch.setattr(core.landing, "check_many", check_many)
        assert not any((await retrieve_all(missing)).values())
        return await check_many(verify)

    monkeypatch.setattr(core.landing, "check_many", brought_by_another)
    before = core.counters.get("objects_pulled")
    assert await retrieve_all(missing + held) == {info.object.name: True for info in missing + held}
    assert core.counters.get("objects_pulled") == before + len(missing)
