"""The tmpfs that an agent mounts for itself: made once, kept over restarts, and never over somebody's files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agent_harness import running_agent
from cluster import MIB, Node, Rank

from replicator.errors import StoreRootError
from replicator.store import Store, own_mount
from replicator.store.mounts import filesystem_of
from replicator.store.own_mount import mount_own
from replicator.store.paths import open_root
from replicator.store.segment import round_up


@pytest.fixture
def mountable(shm_root: Path) -> Iterator[Path]:
    """A directory that does not exist yet, in which we may mount; what is mounted is unmounted."""
    root = shm_root / "own"
    if mount_own(shm_root / "probe", 1 << 20):
        pytest.skip("this process may not mount a tmpfs with huge pages")
    subprocess.run(["umount", shm_root / "probe"], check=True)
    yield root
    subprocess.run(["umount", "-l", root], check=False, capture_output=True)


def test_an_agent_mounts_once_and_finds_its_checkpoints_again(mountable: Path) -> None:
    node = Node("n0", mountable, ("--mount-size", "200Mi")).start()
    rank = Rank(node)
    try:
        rank.join(1, [node])
        assert node.status().filesystem == "tmpfs huge=within_size"
        assert mountable.is_mount()
        assert stat.S_IMODE(mountable.stat().st_mode) == 0o700
        size = os.statvfs(mountable)
        assert size.f_blocks * size.f_frsize == 200 * MIB
        assert node.status().budget_bytes <= 200 * MIB
        one = rank.begin(1).object("shard")
        data = os.urandom(MIB) * 17
        rank.write(one, data)
        assert os.stat(node.paths.object(one)).st_size % (2 * MIB) == 0
        node.kill()
        node.start()
        assert node.status().sealed_objects == 1
        assert node.bytes_of(one) == data
        mounts = Path("/proc/self/mountinfo").read_text().split()
        assert mounts.count(str(mountable)) == 1
    finally:
        rank.close()
        node.kill()


def test_somebodys_files_are_not_hidden(mountable: Path) -> None:
    mountable.mkdir()
    (mountable / "precious").write_text("x")
    with running_agent(mountable, "--mount-size", "64Mi") as agent:
        assert any("is not empty" in line for line in agent.output)
        assert not mountable.is_mount()
        assert (mountable / "precious").exists()


def test_who_may_not_mount_is_told_what_to_do(shm_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(path: Path, options: str) -> int:
        asked.append(options)
        return errno.EPERM

    monkeypatch.setattr("replicator.store.own_mount._mount", refuse)
    told = mount_own(shm_root / "own", 64 * MIB)
    assert "Operation not permitted" in told
    assert f"mount -t tmpfs -o size={64 * MIB},mode=0700,huge=within_size tmpfs {shm_root / 'own'}" in told
    assert asked == [f"size={64 * MIB},mode=0700,huge=within_size"]
    assert (shm_root / "own").is_dir()


def test_without_huge_pages_in_the_kernel_it_is_mounted_all_the_same(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "replicator.store.own_mount._mount", lambda path, options: errno.EINVAL if "huge" in options else 0
    )
    assert "without them" in mount_own(shm_root / "own", 64 * MIB)


def test_only_large_segments_take_whole_huge_pages(mountable: Path) -> None:
    assert mount_own(mountable, 64 * MIB) == ""
    assert mount_own(mountable, 64 * MIB) == "", "mounted already"
    assert mount_own(mountable, 64 * MIB - 1) == "", "which the kernel rounds up"
    told = mount_own(mountable, 32 * MIB)
    assert f"mount_size is {32 * MIB}, and what is mounted at {mountable} has {64 * MIB} bytes" in told
    assert f"mount -o remount,size={32 * MIB} {mountable}" in told
    assert filesystem_of(mountable) == ("tmpfs", "within_size")
    paths = open_root(mountable, create=True)
    assert round_up(paths, 1) == 4096
    assert round_up(paths, 15 * MIB + 1) == 15 * MIB + 4096
    assert round_up(paths, 16 * MIB + 1) == 18 * MIB
    store = Store(paths, 50 * MIB)
    store.rebuild()
    assert store.reserve("ab", 17 * MIB).capacity == 18 * MIB
    store.close()


def test_agents_that_start_at_once_mount_once(mountable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mount would hide the first one's store, and its lock."""
    mount = own_mount._mount

    def slowly(path: Path, options: str) -> int:
        time.sleep(0.2)
        return mount(path, options)

    monkeypatch.setattr(own_mount, "_mount", slowly)
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda _: mount_own(mountable, 64 * MIB), range(4)))
    mounts = Path("/proc/self/mountinfo").read_text().split().count(str(mountable))
    for _ in range(mounts - 1):
        subprocess.run(["umount", mountable], check=True)
    assert told == [""] * 4
    assert mounts == 1


def test_a_root_that_somebody_keeps_locked_is_not_waited_for_for_ever(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_mount, "LOCK_DEADLINE_S", 0.1)
    fd = os.open(shm_root, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        with pytest.raises(StoreRootError, match="locked by another process"):
            mount_own(shm_root, 64 * MIB)
    finally:
        os.close(fd)
