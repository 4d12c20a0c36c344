"""Many small objects at once: each one sealed or with its reason, and accounts that are right whatever happens."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from store_support import BUDGET, MIB, Trainer, bytes_on_disk, check_accounts, reopened, version

from replicator.errors import ObjectExistsError, ReplicationError, StoreFullError
from replicator.ids import ContainerVersion
from replicator.native import crc32c
from replicator.store import Store
from replicator.store.ingest import Item
from replicator.store.paths import TEMPORARY, open_root
from replicator.store.read_many import read_many
from replicator.store.reader import open_object
from replicator.store.trailer import ObjectInfo

AGENT = "agent-00ab"


def _item(of: ContainerVersion, name: str, data: bytes) -> Item:
    crc = crc32c(data)
    return Item(ObjectInfo(of.object(name), len(data), crc, 4 * MIB, (crc,) if data else (), "node-a", AGENT), data)


def _items(of: ContainerVersion, sizes: Sequence[int]) -> list[Item]:
    return [_item(of, f"o{i}", random.randbytes(size)) for i, size in enumerate(sizes)]


@pytest.fixture
def agent(store: Store) -> Iterator[Trainer]:
    trainer = Trainer(store.paths, AGENT)
    yield trainer
    trainer.close()


def _check(store: Store, items: Sequence[Item]) -> None:
    for info, payload in items:
        assert store.get(info.object) == info
        with open_object(store.paths, info.object) as held:
            assert held.info == info
            held.verify()
            assert bytes(held.view) == payload


def test_objects_of_all_small_sizes_are_sealed_and_survive_a_restart(store: Store, agent: Trainer) -> None:
    items = _items(version(1), [0, 1, 4095, 4096, 4097, 65_536, 262_143, 262_144])
    items.append(_item(version(1), "with/parts", b"x"))
    assert store.ingest(items) == [None] * len(items)
    _check(store, items)
    check_accounts(store)
    assert not list(store.paths.segments.iterdir())
    _check(reopened(store), items)


def test_free_segments_are_written_again_and_what_does_not_fit_is_not_taken(store: Store, agent: Trainer) -> None:
    """Ten times the same sizes take no more memory than once."""
    sizes = [random.Random(4).randrange(0, 30_000) for _ in range(100)]
    inodes: set[int] = set()
    for step in range(10):
        items = _items(version(step), sizes)
        assert store.ingest(items) == [None] * len(items)
        _check(store, items)
        found = {os.stat(store.paths.object(item.info.object)).st_ino for item in items}
        inodes = inodes or found
        assert found == inodes
        store.drop(version(step))
        check_accounts(store)
    large = [_item(version(11), "large", bytes(200_000))]
    assert store.ingest(large) == [None]
    assert os.stat(store.paths.object(large[0].info.object)).st_ino not in inodes


def test_memory_that_a_reader_reads_is_not_written_again(store: Store, agent: Trainer) -> None:
    """The tenth promise."""
    before = _items(version(1), [10_000])
    store.ingest(before)
    with open_object(store.paths, before[0].info.object) as held:
        view = held.view
        store.drop(version(1))
        store.ingest(_items(version(2), [10_000]))
        assert bytes(view) == before[0].payload


def test_what_is_there_already_counts_and_other_content_is_refused_for_that_object_alone(
    store: Store, agent: Trainer
) -> None:
    items = _items(version(1), [5000] * 3)
    assert store.ingest(items) == [None] * 3
    other = _item(version(1), "o1", b"other")
    errors = store.ingest([items[0], other, _item(version(1), "new", b"new")])
    assert errors[0] is None
    assert isinstance(errors[1], ObjectExistsError)
    assert errors[2] is None
    _check(store, items)
    check_accounts(store)
    assert not list(store.paths.segments.iterdir())


def test_what_is_refused_before_the_seal_leaves_nothing(store: Store, agent: Trainer) -> None:
    store.ingest(_items(version(1), [5000] * 20))
    store.drop(version(1))
    free = store.usage().free_bytes
    calls = 0

    def refuse() -> None:
        nonlocal calls
        calls += 1
        raise ReplicationError("not wanted any more")

    errors = store.ingest(_items(version(2), [5000] * 40), refuse)
    assert {type(error) for error in errors} == {ReplicationError}
    assert calls == 2
    assert store.versions() == []
    assert store.usage().free_bytes == free
    check_accounts(store)


def test_beyond_the_budget_as_many_are_taken_as_fit(store: Store, agent: Trainer) -> None:
    """F22."""
    items = _items(version(1), [250_000] * 300)
    errors = store.ingest(items)
    sealed = [item for item, error in zip(items, errors, strict=True) if error is None]
    assert len(sealed) == BUDGET // (62 * 4096 + 4096)
    assert {type(error) for error in errors if error is not None} == {StoreFullError}
    assert "budget of 67108864 bytes" in str(errors[-1])
    _check(store, sealed)
    check_accounts(store)
    assert store.usage().used_bytes <= BUDGET


def test_what_is_superseded_is_dropped_for_room(store: Store, agent: Trainer) -> None:
    store.ingest(_items(version(1), [250_000] * 200))
    store.on_pressure = lambda wanted: store.drop(version(1))
    items = _items(version(2), [100_000] * 500)
    assert store.ingest(items) == [None] * 500
    _check(store, items)
    check_accounts(store)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_full_file_system_refuses_some_and_leaves_nothing_half_written(shm_root: Path) -> None:
    """F22: somebody else fills it; the budget does not know."""
    mount = shm_root / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount], check=True)
    try:
        opened = Store(open_root(mount / "store", create=True), 7 * MIB)
        opened.rebuild()
        (mount / "foreign").write_bytes(bytes(6 * MIB))
        items = _items(version(1), [100_000] * 40)
        errors = opened.ingest(items)
        sealed = [item for item, error in zip(items, errors, strict=True) if error is None]
        assert 10 < len(sealed) < 20
        assert {type(error) for error in errors if error is not None} == {StoreFullError}
        assert "files left" in str(errors[-1])
        _check(opened, sealed)
        assert opened.usage().used_bytes == bytes_on_disk(opened.paths)
        assert not list(opened.paths.segments.iterdir())
        (mount / "foreign").unlink()
        assert opened.ingest(items) == [None] * 40
        _check(opened, items)
        opened.close()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_kill_in_the_middle_leaves_no_object_and_no_file(store: Store, agent: Trainer) -> None:
    """What a crash between write and rename leaves: garbage that the next start removes, and whole objects."""
    items = _items(version(1), [5000] * 40)
    child = os.fork()
    if not child:
        seen = 0

        def die() -> None:
            nonlocal seen
            seen += 1
            if seen == 2:
                os._exit(7)

        store.ingest(items, die)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    left = [path.name for path in store.paths.segments.iterdir()]
    assert len(left) == 8
    assert all(name.startswith(TEMPORARY) for name in left)
    again = reopened(store)
    assert not list(again.paths.segments.iterdir())
    _check(again, items[:32])
    assert len(again.objects(version(1))) == 32
    check_accounts(again)


def test_many_are_read_at_once_and_those_that_are_gone_are_none(store: Store, agent: Trainer) -> None:
    items = _items(version(1), [0, 7, 5000])
    store.ingest(items)
    gone = _item(version(1), "gone", b"gone")
    infos = [item.info for item in [*items, gone]]
    assert read_many(store.paths, version(1), infos) == [*(item.payload for item in items), None]
    assert read_many(store.paths, version(2), infos) == [None] * 4
