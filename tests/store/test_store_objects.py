"""Sealing, reading and writing objects."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import MIB, Trainer, reopened, version

from replicator.errors import CorruptObjectError, ObjectExistsError, SegmentError, StoreFullError, StoreRootError
from replicator.native import crc32c
from replicator.store import Store
from replicator.store.publish import publish
from replicator.store.reader import open_object
from replicator.store.trailer import PAGE, ObjectInfo, capacity_for, encode_trailer, payload_limit, read_trailer


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 5])
def test_what_is_sealed_is_read_back_also_after_a_restart(store: Store, trainer: Trainer, size: int) -> None:
    """F27: the index comes back from the files."""
    data = os.urandom(size)
    one = version().object("dir/a.distcp")
    trainer.save(store, one, data)
    for opened in (store, reopened(store)):
        info = opened.get(one)
        assert info is not None
        assert (info.size, info.crc32c, info.owner_node_id) == (size, crc32c(data), "node-a")
        with open_object(opened.paths, one) as held:
            assert bytes(held.view) == data
            held.verify()
            assert os.pread(held.fd, size + 1, 0)[:size] == data
    opened.close()


@given(st.integers(0, 1 << 45), st.sampled_from([256, 4096, 1 << 20, 4 << 20]))
def test_a_segment_of_its_capacity_holds_an_object_and_no_smaller_one_does(size: int, block_size: int) -> None:
    """F29, also for sizes no machine has."""
    capacity = capacity_for(size, block_size)
    assert payload_limit(capacity, block_size) >= size > payload_limit(capacity - PAGE, block_size) - (size == 0)


def test_a_small_object_takes_two_pages(store: Store, trainer: Trainer) -> None:
    trainer.save(store, version().object("a"), b"x" * PAGE)
    assert store.usage().sealed_bytes == 2 * PAGE


def test_slices_are_summed_after_they_were_filled(store: Store, trainer: Trainer) -> None:
    one = version().object("a")
    writer = trainer.writer(store, one, 12 * MIB)
    data = os.urandom(9 * MIB)
    writer.write(data[:100])
    area = writer.next_buffer_slice(len(data) - 200)
    area[:] = data[100:-100]
    assert writer.tell() == len(data) - 100
    writer.write(data[-100:])
    info = writer.close()
    store.seal(trainer.client_id, writer.mapped.name, info)
    assert info.crc32c == crc32c(data)
    with pytest.raises(SegmentError, match="closed"):
        writer.write(b"more")
    with open_object(store.paths, one) as held:
        assert bytes(held.view) == data


def test_a_writer_grows(store: Store, trainer: Trainer) -> None:
    one = version().object("a")
    writer = trainer.writer(store, one, PAGE * 2)
    data = os.urandom(3 * MIB)
    for start in range(0, len(data), 70_000):
        writer.write(data[start : start + 70_000])
    info = writer.close()
    store.seal(trainer.client_id, writer.mapped.name, info)
    assert info.crc32c == crc32c(data)
    assert store.usage().reserved_bytes == 0


def test_seal_is_idempotent_and_never_replaces(store: Store, trainer: Trainer) -> None:
    one = version().object("a")
    writer = trainer.writer(store, one, MIB)
    writer.write(b"abc")
    info = writer.close()
    for _ in range(2):
        store.seal(trainer.client_id, writer.mapped.name, info)
    trainer.save(store, one, b"abc")
    with pytest.raises(ObjectExistsError, match="new generation"):
        trainer.save(store, one, b"other")
    with open_object(store.paths, one) as held:
        assert bytes(held.view) == b"abc"


def test_seal_refuses_another_trailer_and_another_client(store: Store, trainer: Trainer) -> None:
    writer = trainer.writer(store, version().object("a"), MIB)
    writer.write(b"abc")
    info = writer.close()
    with pytest.raises(CorruptObjectError, match="expected"):
        store.seal(trainer.client_id, writer.mapped.name, dataclasses.replace(info, crc32c=1))
    with pytest.raises(SegmentError, match="belongs to"):
        store.seal("ab" * 16, writer.mapped.name, info)
    with pytest.raises(StoreRootError):
        store.release(trainer.client_id, "../../etc/passwd")


def test_publishing_without_an_agent_and_adopting(store: Store, trainer: Trainer) -> None:
    writer = trainer.writer(store, version().object("a"), MIB)
    writer.write(b"abc")
    info = writer.close()
    publish(store.paths, writer.mapped.name, info)
    assert store.get(info.object) is None
    assert store.adopt(info.object) == info
    store.seal(trainer.client_id, writer.mapped.name, info)
    assert store.usage().reserved_bytes == 0


def test_an_object_above_four_gib(store: Store) -> None:
    """F29: sizes and offsets of 64 bits, shown with a sparse file."""
    size = (5 << 30) + 3
    blocks = -(-size // (4 * MIB))
    info = ObjectInfo(version().object("big"), size, 1, 4 * MIB, tuple(range(blocks)), "n", "ab" * 16)
    capacity = capacity_for(size)
    path = store.paths.segments / f"w.{'ab' * 16}.{'0' * 16}"
    with path.open("wb") as stream:
        stream.truncate(capacity)
        for offset, piece in encode_trailer(info, capacity):
            stream.seek(offset)
            stream.write(piece)
    publish(store.paths, path.name, info)
    assert store.adopt(info.object) == info
    with open_object(store.paths, info.object) as held:
        assert read_trailer(held.fd) == info
        assert len(held.view) == size


def test_blocks_are_summed_one_by_one_and_a_bad_one_is_named(store: Store, trainer: Trainer) -> None:
    one = version().object("a")
    data = os.urandom(5 * PAGE + 7)
    writer = trainer.writer(store, one, capacity_for(len(data), PAGE), block_size=PAGE)
    for start in range(0, len(data), 1000):
        assert writer.write(data[start : start + 1000]) == len(data[start : start + 1000])
    info = writer.close()
    store.seal(trainer.client_id, writer.mapped.name, info)
    assert info.block_crcs == tuple(crc32c(data[start : start + PAGE]) for start in range(0, len(data), PAGE))
    with store.paths.object(one).open("r+b") as stream:
        stream.seek(3 * PAGE + 1)
        stream.write(bytes([data[3 * PAGE + 1] ^ 1]))
    with open_object(store.paths, one) as held:
        held.verify([0, 1, 2, 4, 5])
        with pytest.raises(CorruptObjectError, match=r"blocks \[3\] of 6"):
            held.verify()


def test_a_table_of_many_blocks_lies_before_the_trailer(store: Store, trainer: Trainer) -> None:
    one = version().object("a")
    data = os.urandom(MIB)
    writer = trainer.writer(store, one, capacity_for(len(data), 256), block_size=256)
    writer.write(data)
    store.seal(trainer.client_id, writer.mapped.name, writer.close())
    again = reopened(store)
    info = again.get(one)
    assert info is not None
    assert len(info.block_crcs) == 4096
    with open_object(again.paths, one) as held:
        held.verify()
    again.close()


@pytest.mark.parametrize("data", [b"", bytearray(b"abc"), memoryview(b"12345678").cast("d"), memoryview(b"").cast("d")])
def test_anything_with_bytes_can_be_written(store: Store, trainer: Trainer, data: bytes) -> None:
    writer = trainer.writer(store, version().object("a"), MIB)
    assert writer.write(data) == memoryview(data).nbytes
    assert writer.close().crc32c == crc32c(bytes(data))


def test_a_writer_that_was_aborted_takes_nothing_more(store: Store, trainer: Trainer) -> None:
    with pytest.raises(ZeroDivisionError), trainer.writer(store, version().object("a"), MIB) as writer:
        raise ZeroDivisionError
    assert writer.closed
    for use in (lambda: writer.write(b""), lambda: writer.next_buffer_slice(1), writer.close):
        with pytest.raises(SegmentError, match="aborted"):
            use()


def test_a_slice_must_have_a_size(store: Store, trainer: Trainer) -> None:
    writer = trainer.writer(store, version().object("a"), MIB)
    with pytest.raises(ValueError, match="-1"):
        writer.next_buffer_slice(-1)


def test_a_writer_grows_by_what_there_is(store: Store, trainer: Trainer) -> None:
    """Half as much again is asked for; what is needed is taken when there is no more."""
    writer = trainer.writer(store, version().object("a"), 30 * MIB)
    writer.write(bytes(29 * MIB))
    writer.write(bytes(3 * MIB))
    assert 32 * MIB < writer.mapped.capacity < 33 * MIB
    with pytest.raises(StoreFullError):
        writer.write(bytes(20 * MIB))
    assert writer.tell() == 32 * MIB
    store.seal(trainer.client_id, writer.mapped.name, writer.close())


def test_what_was_left_of_an_older_object_is_not_taken_for_a_newer_one(store: Store, trainer: Trainer) -> None:
    """A recycled segment still has a valid trailer, of what it held before."""
    writer = trainer.writer(store, version(1).object("a"), MIB)
    writer.write(b"old")
    old = writer.close()
    store.seal(trainer.client_id, writer.mapped.name, old)
    store.drop(version(1))
    writer = trainer.writer(store, version(2).object("a"), MIB)
    writer.write(b"new")
    new = dataclasses.replace(old, object=version(2).object("a"))
    with pytest.raises(CorruptObjectError, match="job/step-1_ckpt"):
        store.seal(trainer.client_id, writer.mapped.name, new)
    again = reopened(store)
    assert again.versions() == []
    again.close()


def test_a_closed_reader_gives_no_view(store: Store, trainer: Trainer) -> None:
    trainer.save(store, version().object("a"), b"abc")
    with open_object(store.paths, version().object("a")) as held:
        pass
    held.close()
    with pytest.raises(SegmentError, match="closed"):
        _ = held.view
