"""Budget, a full file system, and what is given up for room."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_support import MIB, Trainer, check_accounts, version

from replicator.errors import ConfigError, StoreError, StoreFullError
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation
from replicator.native import crc32c
from replicator.store import JobState, Store
from replicator.store.ballast import BALLAST_BYTES
from replicator.store.mounts import OWN_BYTES, Space, cgroup_limit, free_bytes, settle_budget
from replicator.store.paths import StorePaths, open_root


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


def test_a_full_store_names_the_jobs_that_fill_it(store: Store, trainer: Trainer) -> None:
    """F24: each job keeps its last checkpoints, also one that is over."""
    trainer.save(store, version(1).object("a"), b"1" * (10 * MIB))
    for job, size in (("over", 20 * MIB), *((f"old{i}", MIB) for i in range(4))):
        other = ContainerVersion(CheckpointContainerId(job, 1), make_generation(1, 1))
        trainer.save(store, other.object("a"), b"2" * size)
    with pytest.raises(StoreFullError) as raised:
        store.reserve(trainer.client_id, 40 * MIB)
    mine = version(1).container.job
    assert re.search(
        rf"\(\d+ of job over, \d+ of job {mine}, \d+ of job old0, \d+ of job old1, and 2 other jobs; each job keeps",
        str(raised.value),
    )


def test_budget_default_is_below_what_is_free(shm_root: Path) -> None:
    opened = Store(open_root(shm_root / "s", create=True))
    opened.rebuild()
    free = os.statvfs(shm_root)
    assert 0 < opened.usage().budget_bytes <= 0.91 * free.f_bavail * free.f_frsize
    opened.close()


@pytest.fixture
def small(shm_root: Path) -> Iterator[StorePaths]:
    """A store on a file system of its own, of 16 MiB and 64 files."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    mount = shm_root / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=64", "tmpfs", mount], check=True)
    try:
        yield open_root(mount / "store", create=True)
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_full_file_system_is_an_error_at_reservation(small: StorePaths) -> None:
    """F22: never a SIGBUS in the middle of a copy; also when somebody else filled it."""
    opened = Store(small, 14 * MIB)
    opened.rebuild()
    trainer = Trainer(small)
    trainer.save(opened, version(1).object("a"), b"1" * (4 * MIB))
    (small.root.parent / "foreign").write_bytes(bytes(8 * MIB))
    with pytest.raises(StoreFullError, match=r"no room for a segment of 6291456 bytes.*has \d+ bytes and"):
        opened.reserve(trainer.client_id, 6 * MIB)
    check_accounts(opened)
    opened.on_pressure = lambda wanted: opened.drop(version(1))
    assert opened.reserve(trainer.client_id, 6 * MIB).capacity == 6 * MIB
    check_accounts(opened)
    trainer.close()
    opened.close()


def test_a_commit_gets_the_room_that_the_store_can_give_up(small: StorePaths) -> None:
    """F22: others filled the file system to the last byte, and the store has free segments, or what is superseded."""
    opened = Store(small, 14 * MIB)
    opened.rebuild()
    trainer = Trainer(small)
    for step in (1, 2, 3):
        trainer.save(opened, version(step).object("a"), b"1" * (2 * MIB))
    opened.drop(version(1))
    foreign = small.root.parent / "foreign"

    def fill() -> None:
        with contextlib.suppress(OSError), open(foreign, "ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert free_bytes(small.root) == 0

    fill()
    opened.put_manifest(version(2), b"m" * 10000, crc32c(b"m" * 10000))
    fill()
    opened.on_pressure = lambda wanted: opened.drop(version(2))
    opened.put_job_state(JobState("job", 1, (), 1))
    fill()
    opened.on_pressure = lambda wanted: 0
    # At last what is kept back for records, so that a job can still be opened, and what is here be recovered.
    for epoch in range(2, 20):
        opened.put_job_state(JobState("job", epoch, (), 1))
        fill()
    with pytest.raises(StoreFullError, match="manifest of"):
        opened.put_manifest(version(3), bytes(MIB), crc32c(bytes(MIB)))
    foreign.unlink()
    opened.drop(version(9))
    assert small.ballast.stat().st_size == BALLAST_BYTES
    assert opened.versions() == [version(3)]
    check_accounts(opened)
    trainer.close()
    opened.close()


def test_a_store_starts_where_not_one_file_more_can_be_made(small: StorePaths) -> None:
    """F22: what it keeps back for its records is made as soon as there is a name for it."""
    opened = Store(small, 14 * MIB)
    foreign = small.root.parent / "foreign"
    foreign.mkdir()
    with contextlib.suppress(OSError):
        for number in range(100):
            (foreign / str(number)).touch()
    assert len(list(foreign.iterdir())) < 64
    opened.rebuild()
    opened.drop(version(9))
    assert not small.ballast.exists()
    shutil.rmtree(foreign)
    opened.drop(version(9))
    assert small.ballast.stat().st_size == BALLAST_BYTES
    opened.close()


def test_file_names_are_had_from_what_is_superseded(small: StorePaths) -> None:
    """Bytes there are enough of; and neither a segment nor a name for what is in it is refused."""
    opened = Store(small, 14 * MIB)
    opened.rebuild()
    trainer = Trainer(small)
    held = [version(step) for step in range(200)]

    def drop(wanted: int) -> int:
        return sum(opened.drop(held.pop(0)) for _ in range(2))

    opened.on_pressure = drop
    for step in range(64):
        trainer.save(opened, version(step).object("a"), b"1")
    opened.put_job_state(JobState("job", 1, (), 1))
    assert opened.versions()[-1] == version(63)
    check_accounts(opened)
    trainer.close()
    opened.close()


def test_what_vanished_is_not_called_full(store: Store) -> None:
    shutil.rmtree(store.paths.jobs)
    with pytest.raises(StoreError, match=r"job job in .*: No such file or directory") as raised:
        store.put_job_state(JobState("job", 1, (), 1))
    assert not isinstance(raised.value, StoreFullError)


def test_a_file_system_without_room_for_another_name_is_full(small: StorePaths) -> None:
    """Every object, directory and manifest takes an inode; what is there stays as it was."""
    opened = Store(small, 14 * MIB)
    opened.rebuild()
    trainer = Trainer(small)

    def fill() -> None:
        for step in range(64):
            trainer.save(opened, version(step).object("a"), b"1")

    with pytest.raises(StoreFullError, match="0 files left"):
        fill()
    with pytest.raises(StoreFullError, match="manifest of"):
        opened.put_manifest(version(99), b"m", crc32c(b"m"))
    with pytest.raises(StoreFullError, match="job other"):
        opened.put_job_state(JobState("other", 1, (), 1))
    assert opened.manifest(version(99)) is None
    assert opened.job_state("other") is None
    check_accounts(opened)
    trainer.close()
    opened.client_gone(trainer.client_id)
    opened.close()
    again = Store(small, 14 * MIB)
    again.rebuild()
    assert again.versions() == opened.versions()
    again.close()


def test_what_was_dropped_for_room_is_written_again_by_its_writer(store: Store, trainer: Trainer) -> None:
    inode = trainer.save(store, version(1).object("a"), b"1" * (40 * MIB))
    store.on_pressure = lambda wanted: store.drop(version(1))
    assert trainer.save(store, version(2).object("a"), b"2" * (40 * MIB)) == inode


def test_free_segments_of_the_dead_are_given_up_first(store: Store, trainer: Trainer) -> None:
    dead = Trainer(store.paths)
    dead.save(store, version(1).object("a"), b"1" * (20 * MIB))
    inode = trainer.save(store, version(1).object("b"), b"1" * (10 * MIB))
    store.drop(version(1))
    dead.close()
    store.client_gone(dead.client_id)
    store.reserve(trainer.client_id, 50 * MIB)
    assert store.reserve(trainer.client_id, 10 * MIB).inode == inode


def test_quarantine_is_given_up_before_containers(store: Store, trainer: Trainer) -> None:
    one = version(1).object("a")
    trainer.save(store, one, b"1" * (40 * MIB))
    store.quarantine(one, "a test")

    def never(wanted: int) -> int:
        raise AssertionError(f"asked for {wanted} bytes")

    store.on_pressure = never
    store.reserve(trainer.client_id, 40 * MIB)
    usage = store.usage()
    assert (usage.quarantined_objects, usage.quarantined_bytes) == (1, 0)
    check_accounts(store)


def test_what_can_never_fit_drops_nothing(store: Store, trainer: Trainer) -> None:
    trainer.save(store, version(1).object("a"), b"1" * MIB)
    store.drop(version(1))
    free = store.usage().free_bytes
    with pytest.raises(StoreFullError, match="no room for 68157440 bytes"):
        store.reserve(trainer.client_id, 65 * MIB)
    assert store.usage().free_bytes == free > 0


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000", "memory.max": "5000"}, 1000),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("4:memory:/docker/1\n0::/\n", {"memory/memory.limit_in_bytes": "2000"}, 2000),
        ("4:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("5:cpu:/x\n", {"x/memory.max": "1"}, None),
    ],
)
def test_the_lowest_limit_of_either_kind_of_cgroup(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    """F23. The texts are those of the kernel; v2, v1 seen from a container, v1 without limit."""
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    assert cgroup_limit(tmp_path / "cgroup", tmp_path / "fs") == limit


GIB = 1 << 30
HERE = Path("/dev/shm/x")
SPACE = Space(total=64 * GIB, available=40 * GIB)


def test_a_budget_stays_below_what_the_cgroup_allows() -> None:
    """F23: beyond it even a reservation is answered with SIGKILL, and the agent's own memory counts, too."""
    assert settle_budget(0, SPACE, 10 * GIB, HERE) == (9 * GIB, "")
    assert settle_budget(8 * GIB, SPACE, 10 * GIB, HERE) == (8 * GIB, "")
    budget, warning = settle_budget(16 * GIB, SPACE, 10 * GIB, HERE)
    assert budget == 9 * GIB
    assert warning.startswith(
        f"budget_bytes is {16 * GIB}; the budget is {9 * GIB} bytes instead: this process may use"
    )
    budget, warning = settle_budget(0, SPACE, 300 * MIB, HERE)
    assert budget == 300 * MIB - OWN_BYTES
    assert "Raise the container's memory limit" in warning
    for asked in (0, GIB):
        with pytest.raises(ConfigError, match="nothing is left for checkpoints"):
            settle_budget(asked, SPACE, OWN_BYTES + 1000, HERE)


def test_a_budget_stays_below_what_the_file_system_has() -> None:
    """F22: 64 MB of /dev/shm in a container is said at the start, and so is a budget that can never be."""
    assert settle_budget(0, SPACE, None, HERE) == (36 * GIB, "")
    assert settle_budget(36 * GIB, SPACE, None, HERE) == (36 * GIB, "")
    budget, warning = settle_budget(50 * GIB, SPACE, None, HERE)
    assert budget == 36 * GIB
    assert f"has {64 * GIB} bytes, of which others take {24 * GIB}" in warning
    with pytest.raises(ConfigError, match=f"budget_bytes is {1 << 60}, and the whole file system of /dev/shm/x has"):
        settle_budget(1 << 60, SPACE, None, HERE)
    budget, warning = settle_budget(0, Space(64 * MIB, 64 * MIB), None, HERE)
    assert budget == int(57.6 * MIB)
    assert "docker run --shm-size" in warning


def test_a_budget_that_the_mount_cannot_give(small: StorePaths, caplog: pytest.LogCaptureFixture) -> None:
    """F22, on a real mount: refused when it never could, lowered when others are in the way; what is there stays."""
    opened = Store(small, 64 * MIB)
    with pytest.raises(ConfigError, match=r"the whole file system of .*/small/store has 16777216 bytes"):
        opened.rebuild()
    opened.close()
    (small.root.parent / "foreign").write_bytes(bytes(8 * MIB))
    opened = Store(small, 15 * MIB)
    opened.rebuild()
    assert 7 * MIB < opened.usage().budget_bytes < 7.3 * MIB
    assert "the budget is" in caplog.text
    opened.close()


def test_what_an_earlier_agent_left_is_given_up_before_anything_is_allocated(store: Store, trainer: Trainer) -> None:
    """F23: its pages are still charged, and the next agent has a smaller budget."""
    for name in ("a", "b"):
        trainer.save(store, version(1).object(name), b"1" * (12 * MIB))
    trainer.save(store, version(2).object("a"), b"2" * (10 * MIB))
    store.drop(version(1))
    store.close()
    again = Store(store.paths, 15 * MIB)
    again.rebuild()
    assert again.usage().used_bytes <= 15 * MIB
    assert again.excess() == 0
    assert again.get(version(2).object("a")) is not None
    check_accounts(again)
    again.close()
    smaller = Store(store.paths, 4 * MIB)
    smaller.rebuild()
    assert smaller.usage().free_bytes == 0
    assert 6 * MIB <= smaller.excess() < 7 * MIB, "objects are for retention to judge"
    smaller.close()


@pytest.mark.parametrize(("mode", "is_told"), [(0o700, False), (0o750, False), (0o777, True), (0o1777, True)])
def test_a_root_that_others_may_write_is_told(shm_root: Path, mode: int, is_told: bool) -> None:
    """F39's kind."""
    root = shm_root / "root"
    root.mkdir()
    root.chmod(mode)
    assert open_root(root, create=True).warning == (
        f"{root} has the mode {mode:04o}: other users may remove or replace what is in it; chmod 700 {root}"
        if is_told
        else ""
    )
