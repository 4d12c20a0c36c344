"""Huge pages for segments on a tmpfs that gives none by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_support import MIB, Trainer, check_accounts, version

from replicator.errors import StoreFullError
from replicator.store import Store, huge
from replicator.store.mapping import HUGE_PAGE
from replicator.store.paths import open_root
from replicator.store.reader import open_object
from replicator.store.segment import MappedSegment, create_segment
from replicator.store.stock import fault_in, new_file


def huge_bytes(inode: int, kind: str) -> int:
    """Bytes of this process's mapping of a file that are mapped by huge pages. `kind`: `rw-s` or `r--s`."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            within = words[1] == kind and int(words[4]) == inode
        elif within and words[0] == "ShmemPmdMapped:":
            return int(words[1]) << 10
    raise AssertionError("it is not mapped")


@pytest.fixture
def has_huge(store: Store) -> None:
    """Skips where the kernel has none to give: older than 6.1, told to deny them, or without 8 MiB in a row."""
    with new_file(store.paths, 8 * MIB) as path:
        mapped = MappedSegment(path, path.name)
        if mapped.collapse(0, 8 * MIB) != 8 * MIB:
            pytest.skip("the kernel gives this tmpfs no huge pages on request")


@pytest.mark.usefixtures("has_huge")
def test_a_new_segment_has_huge_pages_and_the_size_that_was_asked_for(
    store: Store, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge, "SLOW_BYTES_PER_CPU_S", 1)
    capacity = 21 * MIB + 4096
    mapped = trainer.reserve(store, capacity)
    found = os.stat(store.paths.segment(mapped.name))
    assert (found.st_size, found.st_blocks * 512) == (capacity, capacity)
    assert bytes(mapped.view[: 1 << 16]) == bytes(1 << 16)
    mapped.view[0] = mapped.view[-1] = 1
    for offset in range(0, capacity, HUGE_PAGE):
        mapped.view[offset] = 1
    assert huge_bytes(mapped.inode, "rw-s") == 20 * MIB
    check_accounts(store)


@pytest.mark.usefixtures("has_huge")
def test_what_is_touched_ahead_of_need_has_huge_pages_and_so_have_its_readers(store: Store, trainer: Trainer) -> None:
    assert store.stock(trainer.client_id, 18 * MIB, lambda mapped, stop: fault_in(mapped, stop), False)
    data = os.urandom(17 * MIB + 3)
    trainer.save(store, version().object("a"), data)
    with open_object(store.paths, version().object("a")) as held:
        assert bytes(held.view) == data
        assert huge_bytes(os.fstat(held.fd).st_ino, "r--s") == 16 * MIB


def test_without_huge_pages_segments_are_as_good(shm_root: Path) -> None:
    """PR_SET_THP_DISABLE has the kernel refuse them, as older ones do."""
    program = f"""
import ctypes, os
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0
from replicator.store import huge
from replicator.store.paths import open_root
from replicator.store.segment import MappedSegment, create_segment
paths = open_root({str(shm_root / "plain")!r}, create=True)
name, _ = create_segment(paths, "0" * 32, {9 * MIB})
mapped = MappedSegment(paths.segment(name), name)
assert mapped.collapse(0, {8 * MIB}) == 0
assert os.stat(paths.segment(name)).st_blocks * 512 == {9 * MIB}
mapped.view[:] = b"x" * {9 * MIB}
assert bytes(mapped.view) == b"x" * {9 * MIB}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.usefixtures("has_huge")
def test_where_making_them_is_slow_the_rest_has_small_pages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = huge.collapse

    def slow(fd: int, address: int, offset: int, length: int) -> int:
        asked.append(length)
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return real(fd, address, offset, length)

    monkeypatch.setattr(huge, "collapse", slow)
    name, _ = create_segment(store.paths, "0" * 32, 40 * MIB)
    assert asked == [huge.SLICE_BYTES]
    assert os.stat(store.paths.segment(name)).st_blocks * 512 == 40 * MIB


def test_a_full_file_system_is_an_error(shm_root: Path) -> None:
    """F22: never a signal, neither when the first page of a huge one does not fit nor when the rest does not."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    mount = shm_root / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mount], check=True)
    try:
        paths = open_root(mount / "store", create=True)
        for capacity in (40 * MIB, 17 * MIB):
            with pytest.raises(StoreFullError, match="no room"):
                create_segment(paths, "0" * 32, capacity)
            assert not list(paths.segments.iterdir())
        name, _ = create_segment(paths, "0" * 32, 15 * MIB)
        assert os.stat(paths.segment(name)).st_blocks * 512 == 15 * MIB
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
