"""The scrubber, over real stores and agents: it reads all, gives way, goes on where it was, and damage is undone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import wait_until
from cluster import MIB, Node, cluster

from replicator.agent import pieces, scrub
from replicator.agent.counters import Counters
from replicator.agent.landing import Landing
from replicator.agent.lookup import Lookup
from replicator.agent.pieces import Pieces, Place, verify
from replicator.agent.puller import Puller
from replicator.agent.repair import MAX_ATTEMPTS, Repairer
from replicator.agent.retention import Retention
from replicator.agent.scrub import Progress, Scrubber
from replicator.agent.sources import Opener
from replicator.config import AgentConfig
from replicator.errors import ObjectNotFoundError
from replicator.ids import CheckpointContainerId, ContainerVersion, ObjectVersion
from replicator.store import Store
from replicator.store.paths import open_root
from replicator.store.segment import MappedSegment, MappingCache
from replicator.store.trailer import ObjectInfo, capacity_for
from replicator.store.writer import ObjectWriter

BLOCK = 64 << 10


def version(step: int) -> ContainerVersion:
    return ContainerVersion(CheckpointContainerId("job", step), 1 << 20)


def _no_more(size: int) -> MappedSegment:
    raise AssertionError(f"{size} bytes: the capacity was known from the start")


def _hold(store: Store, one: ObjectVersion, data: bytes) -> None:
    cache = MappingCache(store.paths)
    made = store.reserve("agent-1", capacity_for(len(data), BLOCK))
    writer = ObjectWriter(
        cache.get(made.segment, made.inode, made.capacity), one, "me", "agent-1", _no_more, block_size=BLOCK
    )
    writer.write(data)
    store.seal("agent-1", made.segment, writer.close())
    cache.close()


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture
def store(shm_root: Path) -> Iterator[Store]:
    """Two containers, objects of many sizes: none, one block, several pieces."""
    made = Store(open_root(shm_root / "store", create=True), 64 * MIB)
    made.rebuild()
    for step in (1, 2):
        for name, size in (("empty", 0), ("a", 100), ("big", 40 * BLOCK + 1), ("c", BLOCK)):
            _hold(made, version(step).object(name), os.urandom(size))
    made.stocking._demand = -1e9
    yield made
    made.close()


def _all(found: Pieces) -> list[tuple[ObjectVersion, int, int]]:
    result = []
    while parts := found.next():
        result += [(part.info.object, part.first, part.last) for part in parts]
    return result


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 16 * BLOCK)


@pytest.mark.usefixtures("small_pieces")
def test_every_block_of_every_object_is_taken_once(store: Store) -> None:
    taken = _all(Pieces(store))
    blocks: dict[ObjectVersion, list[int]] = {}
    for one, first, last in taken:
        blocks.setdefault(one, []).extend(range(first, last))
    assert {one: len(info.block_crcs) for v in store.versions() for one, info in _named(store, v)} == {
        one: len(found) for one, found in blocks.items()
    }
    assert all(found == list(range(len(found))) for found in blocks.values())
    assert len(taken) > len(blocks), "a large object takes several pieces"


def _named(store: Store, of: ContainerVersion) -> list[tuple[ObjectVersion, ObjectInfo]]:
    return [(of.object(name), info) for name, info in store.objects(of).items()]


@pytest.mark.usefixtures("small_pieces")
def test_it_goes_on_from_every_place(store: Store) -> None:
    whole = _all(Pieces(store))
    for stop in range(1, 10):
        first = Pieces(store)
        taken = []
        for _ in range(stop):
            taken += [(part.info.object, part.first, part.last) for part in first.next()]
        rest = _all(Pieces(store, first.place))
        blocks = {(one, block) for one, start, end in taken + rest for block in range(start, end)}
        assert blocks == {(one, block) for one, start, end in whole for block in range(start, end)}, stop
        assert not {one for one, _, end in taken if end == 41} & {one for one, _, _ in rest if one.name == "big"}


def test_what_comes_and_goes_meanwhile_keeps_it_from_nothing(store: Store) -> None:
    found = Pieces(store)
    parts = found.next()
    assert len(parts) == 8
    _hold(store, version(9).object("new"), b"x")
    assert found.next() == [], "the next pass has it"
    store.drop(version(1))
    assert verify(store.paths, parts) == []
    assert Pieces(store, Place(version(1), "a", 0), lambda one: one == version(1)).next() == []


def _scrubber(store: Store, counters: Counters, busy: list[bool], **settings: float) -> tuple[Scrubber, Landing]:
    config = AgentConfig(**{"scrub_bytes_per_s": 1 << 30, **settings})  # type: ignore[arg-type]
    landing = Landing("agent-1", store, Opener.__new__(Opener), {}, counters)
    return Scrubber(config, store, landing, counters, lambda: busy[0], lambda: 0.0), landing


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is counted has no event
            await asyncio.sleep(0.005)


async def _until_pass(scrubber: Scrubber) -> None:
    """Run it until a pass has ended."""
    running = asyncio.ensure_future(scrubber.run())
    try:
        before = scrubber.progress.finished_unix_ms
        await _until(lambda: running.done() or scrubber.progress.finished_unix_ms != before)
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_pass_finds_the_one_bad_block_and_leaves_the_rest(store: Store) -> None:
    """F01: the bad copy is in quarantine, counted, and told to who repairs."""
    counters = Counters()
    scrubber, landing = _scrubber(store, counters, [False])
    told: list[ObjectInfo] = []
    landing.on_quarantined = told.append
    bad = version(2).object("big")
    expected = store.get(bad)
    _flip(store.paths.object(bad), 40 * BLOCK)
    objects = store.usage().sealed_objects
    await _until_pass(scrubber)
    assert told == [expected]
    assert store.get(bad) is None
    assert store.usage().sealed_objects == objects - 1
    counts = counters.snapshot()
    assert (counts["scrub_bad"], counts["objects_scrubbed"], counts["objects_quarantined"]) == (1, objects, 1)
    assert counts["bytes_scrubbed"] == 2 * (100 + 40 * BLOCK + 1 + BLOCK)


async def test_a_failure_to_read_is_not_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the scrubber, nor does it say anything of the object: as when there are no descriptors left."""
    counters = Counters()
    scrubber, landing = _scrubber(store, counters, [False], deadline_s=0.1)
    failures = iter([OSError(errno.EMFILE, "too many open files"), ValueError("unheard of")])
    once = landing.check_many

    async def check_many(verify: Callable[[], Any]) -> Any:
        error = next(failures, None)
        if error is not None:
            raise error
        return await once(verify)

    def no_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "open_object", no_descriptors)
        assert verify(store.paths, Pieces(store).next()) == []
    monkeypatch.setattr(landing, "check_many", check_many)
    await _until_pass(scrubber)
    assert next(failures, None) is None
    assert counters.get("objects_scrubbed") == store.usage().sealed_objects
    assert counters.get("objects_quarantined") == 0


@pytest.mark.usefixtures("small_pieces")
async def test_it_pauses_while_there_is_work_but_not_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "LOOK_S", 0.01)
    counters, busy = Counters(), [True]
    scrubber, _ = _scrubber(store, counters, busy)
    running = asyncio.ensure_future(scrubber.run())
    await asyncio.sleep(0.1)
    assert counters.get("bytes_scrubbed") == 0
    monkeypatch.setattr(scrub, "MAX_PAUSE_S", 0.02)
    running.cancel()
    await asyncio.wait([running])
    await _until_pass(scrubber)
    assert counters.get("objects_scrubbed") == 8
    for reason in ("reserved", "asked"):
        if reason == "reserved":
            store.reserve("agent-1", MIB)
            store.stocking._demand = -1e9
        else:
            store.client_gone("agent-1")
            store.stocking.demanded()
        assert scrubber._is_busy() or not busy[0], reason
        busy[0] = False
        assert scrubber._is_busy(), reason
    store.stocking._demand = -1e9
    assert not scrubber._is_busy()


@pytest.mark.usefixtures("small_pieces")
async def test_the_rate_is_kept(store: Store) -> None:
    scrubber, _ = _scrubber(store, Counters(), [False], scrub_bytes_per_s=10 * MIB)
    began = asyncio.get_running_loop().time()
    await _until_pass(scrubber)
    assert asyncio.get_running_loop().time() - began > 5 * MIB / (10 * MIB) * 0.9


@pytest.mark.usefixtures("small_pieces")
async def test_the_next_agent_goes_on_where_it_was(store: Store) -> None:
    counters = Counters()
    scrubber, _ = _scrubber(store, counters, [False], scrub_bytes_per_s=4 * MIB)
    running = asyncio.ensure_future(scrubber.run())
    await _until(lambda: counters.get("bytes_scrubbed") > 0)
    running.cancel()
    await asyncio.wait([running])
    first = counters.get("bytes_scrubbed")
    again, _ = _scrubber(store, counters, [False])
    assert again.progress == scrubber.progress
    assert again.progress.place is not None
    await _until_pass(again)
    assert first < counters.get("bytes_scrubbed") == 2 * (100 + 40 * BLOCK + 1 + BLOCK)
    # The one after that has all the time.
    later, _ = _scrubber(store, counters, [False])
    assert 500 < later._until_next_pass() <= 600


@pytest.mark.parametrize("content", ["", "null", "[]", '{"place": 1}', '{"began_unix_ms": -1}', "\udcff"])
async def test_a_damaged_place_begins_anew(store: Store, content: str) -> None:
    store.paths.scrub.write_bytes(content.encode(errors="surrogateescape"))
    assert _scrubber(store, Counters(), [False])[0].progress == Progress()


def test_a_place_is_never_a_path(store: Store) -> None:
    """F38: neither is what lies in the store's own files."""
    good = Progress(1, 2, Place(version(3), "a/b", 7))
    assert Progress.from_json(good.to_json().encode()) == good
    found = json.loads(good.to_json())
    for key, value in (("job", "../x"), ("name", "../../x"), ("step", -1), ("block", "1")):
        with pytest.raises(ValueError):
            Progress.from_json(json.dumps({**found, "place": {**found["place"], key: value}}).encode())


async def test_off_is_off(store: Store) -> None:
    scrubber, _ = _scrubber(store, Counters(), [False], scrub_bytes_per_s=0)
    await asyncio.wait_for(scrubber.run(), 1)


def _damage(node: Node, one: ObjectVersion, at: int) -> None:
    node.kill()
    _flip(node.paths.object(one), at)


def test_a_bad_copy_is_found_and_brought_again_from_the_other_holder(shm_root: Path) -> None:
    """F01: at the owner and at the buddy; a large object and a packed one. Nobody loads them."""
    with cluster(shm_root, 2) as two:
        two.join()
        large, small = (two.save(step, data) for step, data in ((1, os.urandom(MIB) * 9), (2, b"small")))
        for manifest in (large, small):
            two.ranks[0].commit(manifest)
            two.ranks[0].protected(manifest.version)
        wanted = {one: two.nodes[0].bytes_of(one) for m in (large, small) for one in [m.version.object("shard-0")]}
        _damage(two.nodes[0], large.version.object("shard-0"), 5 * MIB)
        _damage(two.nodes[1], small.version.object("shard-0"), 2)
        for node in two.nodes:
            flags = ("--port", str(node.port), "--deadline-s", "2")
            node.start(*flags, "--scrub-bytes-per-s", "1Gi", "--scrub-max-pressure", "100")
        for node in two.nodes:
            # Brought again by the node itself, or by the other one, which heals what lacks a copy.
            wait_until(lambda node=node: node.counter("scrub_bad") == 1, f"the scrubber of {node.node_id} found it")
            wait_until(lambda node=node: all(node.held(one) for one in wanted), f"{node.node_id} has it again")
            assert {one: node.bytes_of(one) for one in wanted} == wanted
            assert all(node.held(one) for one in wanted)
            wait_until(lambda node=node: node.status().scrub_finished_unix_ms > 0, "a pass ended")
            assert node.status().quarantined_objects == 1


class _Lookup(Lookup):
    """Nobody answers."""

    def __init__(self) -> None:
        self.asked = 0

    async def inventories(self, job: str, deadline_s: float, step: int | None = None):  # type: ignore[no-untyped-def]
        self.asked += 1
        return [], {}, []


class _Retention(Retention):
    def __init__(self) -> None:
        self._dropped = {}  # type: ignore[assignment]


async def test_a_repair_that_nobody_can_give_is_tried_again_and_then_given_up(store: Store) -> None:
    """F15's kind: every retry has a bound, and what was dropped meanwhile is not asked for."""
    counters, lookup, retention = Counters(), _Lookup(), _Retention()
    config = AgentConfig(deadline_s=0.1)
    repairer = Repairer(config, store, retention, lookup, Puller.__new__(Puller), counters)
    infos = store.objects(version(1))
    for name in ("a", "c"):
        store.quarantine(version(1).object(name), "a test")
        repairer.note(infos[name])
    repairer.note(infos["big"])
    repairer._deadline_s = 0.002
    running = asyncio.ensure_future(repairer.run())
    await _until(lambda: counters.get("repairs_failed") == 2)
    assert lookup.asked == MAX_ATTEMPTS, "once for both, and never for what is here"
    retention._dropped[version(1)] = "superseded"
    repairer.note(infos["a"])
    await _until(lambda: not repairer._damaged)
    assert lookup.asked == MAX_ATTEMPTS
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(ObjectNotFoundError, match="no other node that answers holds"):
        repairer._source(infos["a"], [])
