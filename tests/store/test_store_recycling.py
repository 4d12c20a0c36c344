"""Which memory is written again, and by whom; what is never handed on."""

from __future__ import annotations

import contextlib
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_support import MIB, Trainer, check_accounts, reopened, version

from replicator.errors import ObjectNotFoundError, SegmentError, StoreError
from replicator.store import Store
from replicator.store.publish import publish
from replicator.store.reader import open_object
from replicator.store.segment import MAX_KEPT, MappingCache, create_segment
from replicator.store.trailer import PAGE


def test_a_dropped_segment_comes_back_to_its_writer_still_mapped(store: Store, trainer: Trainer) -> None:
    inode = trainer.save(store, version(1).object("a"), b"1" * MIB)
    store.drop(version(1))
    assert store.usage().sealed_bytes == 0
    assert trainer.save(store, version(2).object("a"), b"2" * MIB) == inode
    with open_object(store.paths, version(2).object("a")) as held:
        assert bytes(held.view) == b"2" * MIB
    with pytest.raises(ObjectNotFoundError):
        open_object(store.paths, version(1).object("a"))


def test_memory_that_a_reader_reads_is_not_recycled(store: Store, trainer: Trainer) -> None:
    """F03, and the tenth promise: a reader's bytes stay, whatever is written next."""
    inode = trainer.save(store, version(1).object("a"), b"1" * MIB)
    with open_object(store.paths, version(1).object("a")) as held:
        view = held.view
        store.drop(version(1))
        assert trainer.save(store, version(2).object("a"), b"2" * MIB) != inode
        assert bytes(view) == b"1" * MIB


def test_a_view_that_outlives_its_reader_still_holds_the_memory(store: Store, trainer: Trainer) -> None:
    inode = trainer.save(store, version(1).object("a"), b"1" * MIB)
    with open_object(store.paths, version(1).object("a")) as held:
        part = held.view[:10]
    store.drop(version(1))
    assert trainer.save(store, version(2).object("a"), b"2" * MIB) != inode
    assert bytes(part) == b"1" * 10


def test_a_file_with_another_link_is_not_recycled(store: Store, trainer: Trainer, shm_root: Path) -> None:
    one = version(1).object("a")
    inode = trainer.save(store, one, b"1" * MIB)
    (shm_root / "kept").hardlink_to(store.paths.object(one))
    store.drop(version(1))
    assert trainer.save(store, version(2).object("a"), b"2" * MIB) != inode
    assert (shm_root / "kept").read_bytes()[:MIB] == b"1" * MIB


def test_a_segment_of_a_living_writer_goes_to_nobody_else(store: Store, trainer: Trainer) -> None:
    inode = trainer.save(store, version(1).object("a"), b"1" * MIB)
    store.drop(version(1))
    other = Trainer(store.paths)
    assert other.save(store, version(2).object("a"), b"2" * MIB) != inode
    trainer.close()
    store.client_gone(trainer.client_id)
    assert other.save(store, version(3).object("a"), b"3" * MIB) == inode
    other.close()


def test_a_silent_writers_segment_is_removed(store: Store, trainer: Trainer) -> None:
    """A hung old incarnation can still write into what it has mapped."""
    trainer.save(store, version(1).object("a"), b"1" * MIB)
    store.is_attached = lambda client_id: False
    store.drop(version(1))
    assert store.usage().free_bytes == 0
    assert list(store.paths.segments.iterdir()) == []


def test_reservations_of_a_dead_client_are_freed(store: Store) -> None:
    trainer = Trainer(store.paths)
    store.reserve(trainer.client_id, MIB)
    alone, _ = create_segment(store.paths, trainer.client_id, MIB)
    trainer.close()
    store.client_gone(trainer.client_id)
    usage = store.usage()
    assert (usage.reserved_bytes, usage.free_bytes) == (0, 2 * MIB)
    assert not (store.paths.segments / alone).exists()


def test_reservations_of_a_living_client_survive_the_agent(store: Store, trainer: Trainer) -> None:
    writer = trainer.writer(store, version().object("a"), MIB)
    writer.write(b"abc")
    again = reopened(store)
    assert again.usage().reserved_bytes == writer.mapped.capacity
    again.seal(trainer.client_id, writer.mapped.name, writer.close())
    assert again.get(version().object("a")) is not None
    again.close()


def test_free_memory_of_a_living_writer_survives_the_agent(store: Store, trainer: Trainer) -> None:
    inode = trainer.save(store, version(1).object("a"), b"1" * MIB)
    store.drop(version(1))
    again = reopened(store)
    other = Trainer(store.paths)
    assert other.save(again, version(2).object("a"), b"2" * MIB) != inode
    assert trainer.save(again, version(2).object("b"), b"3" * MIB) == inode
    other.close()
    again.close()


def test_a_living_client_is_not_given_up(store: Store, trainer: Trainer) -> None:
    """Its lock file stays, so that nothing that it can still write into goes to others."""
    writer = trainer.writer(store, version().object("a"), MIB)
    store.is_attached = lambda client_id: False
    store.client_gone(trainer.client_id)
    other = Trainer(store.paths)
    inodes = {other.save(store, version(step).object("a"), b"2" * MIB) for step in range(2, 6)}
    assert writer.mapped.inode not in inodes
    other.close()
    check_accounts(store)


def test_room_allocated_for_a_client_that_died_meanwhile_is_given_back(store: Store) -> None:
    trainer = Trainer(store.paths)
    trainer.close()
    store.client_gone(trainer.client_id)
    with pytest.raises(SegmentError, match="has died"):
        store.reserve(trainer.client_id, MIB)
    usage = store.usage()
    assert (usage.reserved_bytes, usage.free_bytes) == (0, MIB)


def test_what_a_trainer_publishes_by_itself_is_no_reservation_any_more(store: Store, trainer: Trainer) -> None:
    writer = trainer.writer(store, version().object("a"), MIB)
    writer.write(b"abc")
    info = writer.close()
    publish(store.paths, writer.mapped.name, info)
    store.adopt(info.object)
    check_accounts(store)
    assert store.usage().reserved_bytes == 0


def test_a_free_segment_cannot_be_sealed(store: Store, trainer: Trainer) -> None:
    trainer.save(store, version().object("a"), b"abc")
    info = store.get(version().object("a"))
    assert info is not None
    store.drop(version())
    (free,) = store.paths.segments.iterdir()
    with pytest.raises(SegmentError, match="free"):
        store.seal(trainer.client_id, free.name, info)


def test_a_small_object_does_not_take_a_large_free_segment(store: Store, trainer: Trainer) -> None:
    trainer.save(store, version(1).object("a"), b"1" * MIB)
    store.drop(version(1))
    trainer.save(store, version(2).object("a"), b"2")
    assert store.usage().sealed_bytes == 2 * PAGE


def test_mappings_are_bounded_and_the_small_ones_go(store: Store, trainer: Trainer) -> None:
    large = trainer.reserve(store, MIB)
    for _ in range(MAX_KEPT + 10):
        trainer.reserve(store, PAGE)
    assert trainer.mappings.mapped_bytes() == MIB + (MAX_KEPT - 1) * PAGE
    assert trainer.mappings.get(large.name, large.inode, large.capacity) is large


def test_a_mapping_lasts_as_long_as_a_part_of_it_is_held(store: Store, trainer: Trainer) -> None:
    """F03: also when its file was removed and the process keeps it no more."""
    part = trainer.reserve(store, MIB).view[100:200]
    part[:] = b"x" * 100
    trainer.close()
    store.client_gone(trainer.client_id)
    assert bytes(part) == b"x" * 100
    assert _is_mapped(store)
    del part
    assert not _is_mapped(store)


def _is_mapped(store: Store) -> bool:
    return str(store.paths.segments) in Path("/proc/self/maps").read_text()


def test_a_mapping_is_of_the_segment_that_was_reserved(store: Store, trainer: Trainer) -> None:
    got = store.reserve(trainer.client_id, MIB)
    mappings = MappingCache(store.paths)
    for name, inode, capacity in (
        (got.segment, got.inode + 1, got.capacity),
        (got.segment, got.inode, got.capacity + 1),
        (got.segment[:-1] + "_", got.inode, got.capacity),
        (got.segment[:-4] + "0000", got.inode, got.capacity),
    ):
        with pytest.raises(StoreError, match="segment"):
            mappings.get(name, inode, capacity)


def test_a_process_lets_go_of_what_was_removed(store: Store, trainer: Trainer) -> None:
    """F24: or a mapping would keep memory that no budget knows of."""
    trainer.save(store, version(1).object("a"), b"1" * (40 * MIB))
    store.drop(version(1))
    trainer.save(store, version(2).object("a"), b"2" * (60 * MIB))
    assert 60 * MIB < trainer.mappings.mapped_bytes() < 61 * MIB


def test_small_mappings_of_removed_files_go_after_a_bounded_number_of_calls(store: Store, trainer: Trainer) -> None:
    """F24, without a look at each of hundreds of mappings for every small object."""
    got = [store.reserve(trainer.client_id, PAGE) for _ in range(2)]
    mappings = MappingCache(store.paths)
    mappings.get(got[0].segment, got[0].inode, PAGE)
    store.paths.segment(got[0].segment).unlink()
    for _ in range(32):
        mappings.get(got[1].segment, got[1].inode, PAGE)
    assert mappings.mapped_bytes() == got[1].capacity


def test_a_reader_that_waits_for_the_recycler_finds_nothing(store: Store, trainer: Trainer) -> None:
    """Between its open and its lock the file became a free segment."""
    one = version().object("a")
    trainer.save(store, one, b"abc")
    path = store.paths.object(one)
    recycler = os.open(path, os.O_RDWR)
    fcntl.flock(recycler, fcntl.LOCK_EX)
    before = _descriptors_of(path)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(open_object, store.paths, one)
        while _descriptors_of(path) == before:
            assert not reading.done()
        path.rename(store.paths.segments / f"f.{trainer.client_id}.{'0' * 16}")
        os.close(recycler)
        with pytest.raises(ObjectNotFoundError, match="any more"):
            reading.result(10)


def _descriptors_of(path: Path) -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += os.path.samestat(link.stat(), path.stat())
    return count


def test_a_second_copy_that_a_trainer_publishes_by_itself_is_no_reservation_any_more(
    store: Store, trainer: Trainer
) -> None:
    """The object is there already, so the trainer removes the file, and the agent hears of it with the adoption."""
    one = version().object("a")
    trainer.save(store, one, b"abc")
    writer = trainer.writer(store, one, MIB)
    writer.write(b"abc")
    publish(store.paths, writer.mapped.name, writer.close())
    store.adopt(one)
    assert store.usage().reserved_bytes == 0
    check_accounts(store)
