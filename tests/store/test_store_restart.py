"""From the files to the index: restarts, damaged files, roots."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from store_support import Trainer, check_accounts, reopened, version

from replicator.errors import CorruptObjectError, ObjectNotFoundError, StoreError, StoreRootError
from replicator.ids import AgreedPlacement, NodeAddress, NodeIdentity, make_generation
from replicator.native import crc32c
from replicator.store import JobState, Store
from replicator.store.paths import SegmentName, open_root, write_atomic
from replicator.store.publish import publish
from replicator.store.reader import open_object
from replicator.store.trailer import capacity_for


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
    members = (NodeAddress(NodeIdentity("n1", 2**64 - 1), "127.0.0.1:1", (("zone", "a"), ("rack", "r7"))),)
    placement = AgreedPlacement("group", (("n1",),))
    state = JobState("job", 7, members, 1, placement=placement, retrieved=version(3), retrieved_epoch=6)
    store.put_manifest(version(), b"manifest", crc32c(b"manifest"))
    store.put_job_state(state)
    with pytest.raises(StoreError, match="never changed"):
        store.put_manifest(version(), b"other", crc32c(b"other"))
    with pytest.raises(CorruptObjectError, match="checksum"):
        store.put_manifest(version(2), b"other", 1)
    assert not store.mark_protected(version(9))
    assert not store.is_protected(version(9))
    assert store.mark_protected(version())
    again = reopened(store)
    assert again.manifest(version()) == b"manifest"
    assert again.is_protected(version())
    found = again.job_state("job")
    assert found == state
    assert found.members[0].labels == members[0].labels
    assert again.versions("job") == [version()]
    again.drop(version())
    assert again.versions() == []
    assert reopened(again).manifest(version()) is None


def test_a_record_of_a_version_without_labels_and_placement_is_read(store: Store) -> None:
    content: dict[str, object] = {
        "epoch": 7,
        "replicas": 1,
        "members": [["n1", "00000000000000ff", "127.0.0.1:1"]],
        "members_epoch": 6,
        "remembered": [["n2", "0000000000000001", "127.0.0.1:2"]],
        "attempt": 16,
    }
    crc = crc32c(json.dumps(content, sort_keys=True).encode())
    store.paths.job("job").write_text(json.dumps({"crc32c": crc, "state": content}))
    first, second = NodeIdentity("n1", 255), NodeIdentity("n2", 1)
    assert reopened(store).job_state("job") == JobState(
        "job", 7, (NodeAddress(first, "127.0.0.1:1"),), 1, 6, (NodeAddress(second, "127.0.0.1:2"),), 16
    )


def test_a_segment_that_a_trainer_makes_while_an_agent_starts_is_left_to_it(store: Store, trainer: Trainer) -> None:
    """It has a name before it has a size; that of one who died at that is removed."""
    dead = Trainer(store.paths)
    names = [SegmentName.new(one.client_id).text for one in (trainer, dead)]
    for name in names:
        store.paths.segment(name).touch()
    dead.close()
    again = reopened(store)
    assert [store.paths.segment(name).exists() for name in names] == [True, False]
    check_accounts(again)


def test_a_small_file_whose_temporary_is_swept_away_is_written_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's, by an agent that starts just then."""
    rename = Path.rename

    def swept(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        nonlocal again
        again = reopened(store)
        return rename(self, target)

    again = store
    monkeypatch.setattr(Path, "rename", swept)
    write_atomic(store.paths.unfinished / "mark", b"content")
    assert (store.paths.unfinished / "mark").read_bytes() == b"content"
    assert [path.name for path in store.paths.unfinished.iterdir()] == ["mark"]
    again.close()


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


def test_a_root_that_cannot_be_made_is_not_called_a_store_without_a_marker() -> None:
    """Where no directory can be made, the error of the system is "No such file or directory"."""
    with pytest.raises(StoreRootError, match="No such file or directory; give a directory that this user may write"):
        open_root("/proc/replicator", create=True)
    with pytest.raises(StoreRootError, match="it does not exist; start the agent with --root"):
        open_root("/proc/replicator", create=False)


def test_a_root_on_a_disk_is_allowed_with_a_warning(tmp_path: Path) -> None:
    paths = open_root(tmp_path / "r", create=True)
    assert (paths.filesystem == "tmpfs") == (paths.warning == "")


def _make(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
        (path / "inside").write_bytes(bytes(5000))
    elif kind == "link":
        path.symlink_to("/nowhere")
    else:
        path.write_bytes(bytes(5000))


@pytest.mark.parametrize("kind", ["file", "fifo", "directory", "link"])
@pytest.mark.parametrize(
    "place",
    [
        "objects/x",
        "objects/bad name",
        "objects/job/x",
        "objects/job/step-1_ckpt/x",
        "objects/job/step-01_ckpt/0000000000100000",
        "objects/job/step-1/0000000000100000",
        "objects/job/step-1_ckpt/0000000000100000/x",
        "objects/job/step-1_ckpt/0000000000100000/bad name",
        "manifests/x",
        "manifests/job/step-1_ckpt/0000000000100000/manifest",
        "manifests/job/step-1_ckpt/0000000000100000/x",
        "segments/x",
        "segments/w.ab.0000000000000001",
        "jobs/x.json",
        "jobs/x",
    ],
)
def test_no_garbage_anywhere_keeps_a_store_from_opening(store: Store, trainer: Trainer, place: str, kind: str) -> None:
    trainer.save(store, version(2).object("a"), b"good")
    path = store.paths.root / place
    is_segment = place.startswith("segments/w.") and kind == "file"
    _make(path, kind)
    again = reopened(store)
    assert again.versions() == [version(2)]
    assert not os.path.lexists(path)
    if not is_segment:
        assert again.usage().quarantined_objects == 1
        check_accounts(again)
    once_more = reopened(again)
    assert once_more.rebuild().quarantined == 0
    once_more.close()


def test_a_mark_without_its_manifest_marks_nothing_later(store: Store) -> None:
    """A crash between the removal of a manifest and of its mark; then another manifest of the same version."""
    store.put_manifest(version(), b"one", crc32c(b"one"))
    store.mark_protected(version())
    (store.paths.manifest_of(version()) / "manifest").unlink()
    again = reopened(store)
    assert again.versions() == []
    again.put_manifest(version(), b"two", crc32c(b"two"))
    once_more = reopened(again)
    assert once_more.manifest(version()) == b"two"
    assert not once_more.is_protected(version())
    once_more.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_job_whose_file_is_damaged_keeps_the_epoch_of_its_objects(
    store: Store, trainer: Trainer, damage: str
) -> None:
    """F11: an older incarnation than the one that wrote them is still refused, and no attempt is given out twice."""
    store.put_job_state(JobState("job", 7, (), 1, attempt=16))
    trainer.save(store, version(generation=make_generation(7, 3)).object("a"), b"x")
    path = store.paths.job("job")
    data = bytearray(path.read_bytes())
    data[data.index(b"7")] ^= 1
    path.write_bytes({"flip": data, "cut": data[:-5], "empty": b""}[damage])
    again = reopened(store)
    state = again.job_state("job")
    assert state is not None
    assert state.epoch == 7
    assert state.attempt > 16
    once_more = reopened(again)
    assert once_more.job_state("job") == state
    once_more.close()


def test_a_damaged_manifest_is_no_commit(store: Store, trainer: Trainer) -> None:
    trainer.save(store, version().object("a"), b"x")
    store.put_manifest(version(), b"manifest", crc32c(b"manifest"))
    path = store.paths.manifest_of(version()) / "manifest"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    again = reopened(store)
    assert again.manifest(version()) is None
    assert sorted(again.objects(version())) == ["a"]
    again.put_manifest(version(), b"manifest", crc32c(b"manifest"))
    again.close()


def test_a_damaged_table_is_no_object(store: Store, trainer: Trainer) -> None:
    one = version().object("a")
    writer = trainer.writer(store, one, capacity_for(1 << 18, 64), block_size=64)
    writer.write(bytes(1 << 18))
    store.seal(trainer.client_id, writer.mapped.name, writer.close())
    with store.paths.object(one).open("r+b") as stream:
        stream.seek((1 << 18) + 100)
        stream.write(b"!")
    again = reopened(store)
    assert again.get(one) is None
    assert again.usage().quarantined_objects == 1
    again.close()


def test_a_segment_that_is_an_object_already_is_only_that(store: Store, trainer: Trainer) -> None:
    """A crash in the middle of a rename on a file system that needs two calls for it."""
    one = version().object("a")
    trainer.save(store, one, b"abc")
    other_name = store.paths.segments / f"w.{trainer.client_id}.{'0' * 16}"
    other_name.hardlink_to(store.paths.object(one))
    again = reopened(store)
    assert not other_name.exists()
    with open_object(again.paths, one) as held:
        assert bytes(held.view) == b"abc"
    check_accounts(again)
    again.close()


def test_directories_that_a_crash_left_empty_are_removed(store: Store) -> None:
    store.paths.objects_of(version()).mkdir(parents=True)
    reopened(store).close()
    assert list(store.paths.objects.iterdir()) == []


def test_only_the_newest_of_the_damaged_are_kept(store: Store, trainer: Trainer) -> None:
    for step in range(20):
        one = version(step).object("a")
        trainer.save(store, one, b"x")
        store.quarantine(one, "a test")
    assert store.usage().quarantined_objects == 20
    assert len(list(store.paths.quarantine.iterdir())) == 16
    check_accounts(store)


def test_an_object_that_was_sealed_and_not_indexed_is_found(store: Store, trainer: Trainer) -> None:
    """The agent dies between the rename and everything after it."""
    writer = trainer.writer(store, version().object("a"), 1 << 20)
    writer.write(b"abc")
    info = writer.close()
    publish(store.paths, writer.mapped.name, info)
    again = reopened(store)
    assert again.get(info.object) == info
    check_accounts(again)
    again.close()
