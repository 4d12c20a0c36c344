"""The store: reservations, seals, recycling, restart, budget."""

from __future__ import annotations

import dataclasses
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicator.errors import (
    CorruptObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    SegmentError,
    StoreError,
    StoreFullError,
    StoreRootError,
)
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity, ObjectVersion
from replicator.native import crc32c
from replicator.store import JobState, Store
from replicator.store.client_lock import ClientLock
from replicator.store.paths import StorePaths, open_root
from replicator.store.publish import publish
from replicator.store.reader import open_object
from replicator.store.segment import MappingCache, create_segment
from replicator.store.trailer import PAGE, capacity_for
from replicator.store.writer import ObjectWriter

MIB = 1 << 20


def version(step: int = 1, generation: int = 1 << 20, job: str = "job") -> ContainerVersion:
    return ContainerVersion(CheckpointContainerId(job, step), generation)


class Trainer:
    """A client in this process, with its own lock and mappings."""

    def __init__(self, paths: StorePaths, client_id: str | None = None) -> None:
        self.paths = paths
        self.client_id = client_id or secrets.token_hex(16)
        self.lock = ClientLock(paths, self.client_id)
        self.lock.acquire()
        self.mappings = MappingCache(paths)

    def writer(self, store: Store, one: ObjectVersion, capacity: int) -> ObjectWriter:
        def reserve(size: int):
            got = store.reserve(self.client_id, size)
            return self.mappings.get(got.segment, got.inode, got.capacity)

        return ObjectWriter(
            reserve(capacity),
            one,
            "node-a",
            self.client_id,
            reserve,
            lambda old: store.release(self.client_id, old.name),
        )

    def save(self, store: Store, one: ObjectVersion, data: bytes) -> int:
        """Seal an object; the inode of its segment."""
        writer = self.writer(store, one, capacity_for(len(data)))
        writer.write(data)
        info = writer.close()
        store.seal(self.client_id, writer.mapped.name, info)
        return writer.mapped.inode

    def close(self) -> None:
        self.mappings.close()
        self.lock.close()


@pytest.fixture
def store(shm_root: Path) -> Iterator[Store]:
    opened = Store(open_root(shm_root / "store", create=True), 64 * MIB)
    opened.rebuild()
    yield opened
    opened.close()


@pytest.fixture
def trainer(store: Store) -> Iterator[Trainer]:
    made = Trainer(store.paths)
    yield made
    made.close()


def reopened(store: Store) -> Store:
    store.close()
    again = Store(store.paths, 64 * MIB)
    again.rebuild()
    return again


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


def test_budget(store: Store, trainer: Trainer) -> None:
    trainer.save(store, version(1).object("a"), b"1" * (40 * MIB))
    with pytest.raises(StoreFullError, match=r"budget of 67108864 bytes, \d+ hold sealed"):
        store.reserve(trainer.client_id, 30 * MIB)

    def drop(wanted: int) -> int:
        assert wanted > 5 * MIB
        return store.drop(version(1))

    store.on_pressure = drop
    assert store.reserve(trainer.client_id, 60 * MIB).capacity == 60 * MIB
    assert store.usage().used_bytes <= 64 * MIB


def test_budget_default_is_below_what_is_free(shm_root: Path) -> None:
    opened = Store(open_root(shm_root / "s", create=True))
    opened.rebuild()
    free = os.statvfs(shm_root)
    assert 0 < opened.usage().budget_bytes <= 0.91 * free.f_bavail * free.f_frsize
    opened.close()


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_full_file_system_is_an_error_at_reservation(shm_root: Path) -> None:
    """F22: never a SIGBUS in the middle of a copy; also when somebody else filled it."""
    mount = shm_root / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mount], check=True)
    try:
        opened = Store(open_root(mount / "store", create=True), 64 * MIB)
        opened.rebuild()
        trainer = Trainer(opened.paths)
        trainer.save(opened, version(1).object("a"), b"1" * (4 * MIB))
        (mount / "foreign").write_bytes(bytes(8 * MIB))
        with pytest.raises(StoreFullError, match=r"no room for a segment of 6291456 bytes.*has \d+ bytes and"):
            opened.reserve(trainer.client_id, 6 * MIB)
        assert opened.usage().reserved_bytes == 0
        opened.on_pressure = lambda wanted: opened.drop(version(1))
        assert opened.reserve(trainer.client_id, 6 * MIB).capacity == 6 * MIB
        trainer.close()
        opened.close()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_damaged_files_are_put_away_and_the_rest_is_found(store: Store, trainer: Trainer) -> None:
    for name in "abcd":
        trainer.save(store, version().object(name), name.encode() * 5000)
    directory = store.paths.objects_of(version())
    with (directory / "a").open("r+b") as stream:
        stream.seek(-100, os.SEEK_END)
        stream.write(b"damage")
    (directory / "b").rename(directory / "z")
    (directory / "c").write_bytes(b"short")
    (store.paths.objects / "job" / "step-x").mkdir()
    (store.paths.objects / "job" / "step-x" / "y").write_text("garbage")
    (store.paths.segments / "garbage").write_text("x")
    again = reopened(store)
    assert sorted(again.objects(version())) == ["d"]
    assert again.usage().quarantined_objects >= 4
    again.close()


def test_manifests_marks_and_jobs_survive(store: Store) -> None:
    members = (NodeAddress(NodeIdentity("n1", 2**64 - 1), "127.0.0.1:1"),)
    store.put_manifest(version(), b"manifest", crc32c(b"manifest"))
    store.put_job_state(JobState("job", 7, members, 1))
    with pytest.raises(StoreError, match="never changed"):
        store.put_manifest(version(), b"other", crc32c(b"other"))
    with pytest.raises(CorruptObjectError, match="checksum"):
        store.put_manifest(version(2), b"other", 1)
    with pytest.raises(StoreError, match="not committed"):
        store.mark_protected(version(9))
    store.mark_protected(version())
    again = reopened(store)
    assert again.manifest(version()) == b"manifest"
    assert again.is_protected(version())
    assert again.job_state("job") == JobState("job", 7, members, 1)
    assert again.versions("job") == [version()]
    again.drop(version())
    assert again.versions() == []
    assert reopened(again).manifest(version()) is None


def test_quarantine(store: Store, trainer: Trainer) -> None:
    one = version().object("a")
    trainer.save(store, one, b"abc")
    store.quarantine(one, "checksum")
    assert store.get(one) is None
    assert store.usage().quarantined_objects == 1
    with pytest.raises(ObjectNotFoundError):
        open_object(store.paths, one)
    trainer.save(store, one, b"repaired")
    assert reopened(store).get(one) is not None


def test_one_agent_per_root(store: Store) -> None:
    with pytest.raises(StoreRootError, match="another agent"):
        Store(store.paths)


@pytest.mark.parametrize("spoil", ["missing", "file", "format", "garbage"])
def test_bad_roots(shm_root: Path, spoil: str) -> None:
    root = shm_root / "r"
    if spoil == "file":
        root.write_text("x")
    elif spoil != "missing":
        open_root(root, create=True)
        (root / "store.json").write_text('{"format": 99, "store_id": "x"}' if spoil == "format" else "{")
    with pytest.raises(StoreRootError, match=str(root)):
        open_root(root, create=spoil in ("file", "format", "garbage"))


def test_a_root_on_a_disk_is_allowed_with_a_warning(tmp_path: Path) -> None:
    paths = open_root(tmp_path / "r", create=True)
    assert (paths.filesystem == "tmpfs") == (paths.warning == "")


def test_an_object_above_four_gib(store: Store) -> None:
    """F29: sizes and offsets of 64 bits, shown with a sparse file."""
    from replicator.store.trailer import ObjectInfo, encode_trailer, read_trailer

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


KILLED = """
    import os, sys
    sys.path.insert(0, sys.argv[2])
    from test_store import Trainer, version
    from replicator.native import crc32c
    from replicator.store import Store
    from replicator.store.paths import open_root
    store = Store(open_root(sys.argv[1], create=True), 64 << 20)
    store.rebuild()
    trainer = Trainer(store.paths)
    print("go", flush=True)
    step = 0
    while True:
        step += 1
        for name in "abc":
            trainer.save(store, version(step).object(name), bytes([step % 251]) * (50_000 + step))
        manifest = b"%d" % step
        store.put_manifest(version(step), manifest, crc32c(manifest))
        if step > 3:
            store.drop(version(step - 3))
"""


@pytest.mark.parametrize("delay_ms", [0, 3, 10, 25, 60, 120])
def test_a_kill_at_any_point_leaves_only_whole_objects(shm_root: Path, delay_ms: int) -> None:
    """F05, F24: SIGKILL of agent and trainer in one, then a restart."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(shm_root / "s"), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"
    try:
        process.wait(delay_ms / 1000)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait()
    opened = Store(open_root(shm_root / "s", create=True), 64 * MIB)
    opened.rebuild()
    for held_version in opened.versions():
        objects = opened.objects(held_version)
        for name in objects:
            with open_object(opened.paths, held_version.object(name)) as held:
                held.verify()
                assert set(bytes(held.view)) == {held_version.container.step % 251}
        if opened.manifest(held_version) is not None and len(objects) < 3:
            pytest.fail(f"{held_version} has a manifest, but only {sorted(objects)}")
    usage = opened.usage()
    assert usage.reserved_bytes == 0
    assert usage.quarantined_objects == 0
    opened.close()
