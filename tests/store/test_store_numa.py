"""Memory near to its writer, on machines with several nodes: made up, for this one may have a single one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_support import MIB, Trainer

from replicator.store import Store, mapping, numa, segment
from replicator.store.client_lock import client_pid
from replicator.store.paths import StorePaths


def machine(top: Path, processors: dict[int, str], memory: str) -> Path:
    """A sysfs tree."""
    (top / "has_memory").write_text(memory + "\n")
    for node, text in processors.items():
        (top / f"node{node}").mkdir()
        (top / f"node{node}" / "cpulist").write_text(text + "\n")
    return top


def test_lists() -> None:
    assert numa.parse_list("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert numa.parse_list("\n") == frozenset()
    with pytest.raises(ValueError, match="invalid"):
        numa.parse_list("0-x")


def test_a_process_is_where_it_is_bound_or_was_last(tmp_path: Path) -> None:
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    pid = os.getpid()
    two = tmp_path / "two"
    two.mkdir()
    machine(two, {0: "4000-4003", 1: mine, 2: "4004"}, "0-1")
    assert numa.nodes(two) == {0: {4000, 4001, 4002, 4003}, 1: os.sched_getaffinity(0)}
    assert numa.node_of(pid, two) == 1

    split = tmp_path / "split"
    split.mkdir()
    first, *rest = sorted(os.sched_getaffinity(0))
    if rest:
        machine(split, {0: str(first), 5: ",".join(map(str, rest))}, "0,5")
        assert numa.node_of(pid, split) in (0, 5)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    machine(elsewhere, {0: "4000", 1: "4001"}, "0-1")
    assert numa.node_of(pid, elsewhere) is None
    assert numa.node_of(2**22 + 1, two) is None


def test_one_node_or_none_is_nothing_to_choose_from(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == {}
    assert numa.node_of(os.getpid(), tmp_path) is None
    machine(tmp_path, {0: "0-63"}, "0")
    assert numa.node_of(os.getpid(), tmp_path) is None


def test_the_kernel_takes_the_preference(store: Store) -> None:
    """Node 0 is everywhere; of one that is not there the kernel says so."""
    if not numa.nodes():
        pytest.skip("this kernel has no nodes")
    fd = os.open(store.paths.segments / "x", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, MIB)
        with mapping.mapped_for_advice(fd, MIB) as address:
            assert numa.prefer(address, MIB, 0) == 0
            assert f"{address:x} prefer" in Path("/proc/self/numa_maps").read_text()
            assert numa.prefer(address, MIB, 200) != 0
        os.posix_fallocate(fd, 0, MIB)
    finally:
        os.close(fd)
        (store.paths.segments / "x").unlink()


def test_a_segment_is_put_near_to_the_process_that_asked(
    store: Store, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(numa, "prefer", lambda address, length, node: asked.append((length, node)) or 0)
    trainer.reserve(store, MIB)
    if len(numa.nodes()) < 2:
        assert asked == []
    asked.clear()
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    monkeypatch.setattr(numa, "SYSFS", machine(tmp_path, {0: "4000", 3: mine}, "0,3"))
    trainer.reserve(store, 2 * MIB)
    assert asked == [(2 * MIB, 3)]
    segment.create_segment(store.paths, "0" * 32, MIB)
    assert len(asked) == 1


def test_who_a_client_is(store: Store, trainer: Trainer) -> None:
    assert client_pid(store.paths, trainer.client_id) == os.getpid()
    assert client_pid(store.paths, "0" * 32) is None
    assert _seen_by_another(store.paths, trainer.client_id) == os.getpid()


def _seen_by_another(paths: StorePaths, client_id: str) -> int:
    program = (
        "from replicator.store.paths import open_root; from replicator.store.client_lock import client_pid\n"
        f"print(client_pid(open_root({str(paths.root)!r}, create=False), {client_id!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    return int(done.stdout)
