"""A load on an empty node: straight to the tensors, and the node's store filled behind it. Real agents and kills."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import Job, Node, kill, nodes, run_alone, run_job, wait_until
from torch.distributed.checkpoint import DefaultLoadPlanner

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter
from replicator.client import windows
from replicator.client.launch import read_record
from replicator.ids import ContainerVersion

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MIB = 1 << 20
NAME = "__0_0.distcp"
TENSORS = 8
WAIT_S = 30.0


def value(index: int) -> torch.Tensor:
    """4 MiB and a little, so that blocks and tensors end at different places."""
    return torch.full((1025, 1024), float(index)) + torch.arange(1024)


def state() -> dict[str, Any]:
    return {f"t{index:02}": value(index) for index in range(TENSORS)} | {"step": 5}


def blank() -> dict[str, Any]:
    return {f"t{index:02}": torch.full((1025, 1024), 7.0) for index in range(TENSORS)} | {"step": None}


def same(loaded: dict[str, Any]) -> bool:
    return all(torch.equal(loaded[f"t{index:02}"], value(index)) for index in range(TENSORS)) and loaded["step"] == 5


def save() -> ContainerVersion | None:
    """One object, of rank 0, of which the other node gets a copy."""
    with replicator.init() as session:
        writer = ReplicatedStorageWriter(session, wait_for="protected")
        dcp.save(state() if dist.get_rank() == 0 else {}, checkpoint_id="step-5", storage_writer=writer)
        return session.lookup().version


class Interrupting(DefaultLoadPlanner):
    """Does something when the second tensor is about to be read, and most of the object is not on its way yet."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if read_item.dest_index.fqn == "t01":
            self._act()
        return super().resolve_tensor(read_item)


def full_plan(session: Any) -> Any:
    """One that has both holders; on a busy machine one of them may answer late."""
    for _ in range(10):
        plan = session.lookup()
        if any(one.name == NAME and {"n0", "n1"} <= set(one.node_ids) for one in plan.sources):
            return plan
    raise AssertionError(f"expected n0 and n1 as holders, found {plan}")


def load(
    act: Callable[[], object] | None = None, window: int = 4 * MIB
) -> tuple[bool, list[tuple[str, int, str, bool]]]:
    """(all as saved, what came from elsewhere). Windows of one block, so that there are many."""
    windows.WINDOW_BYTES = window
    with replicator.init() as session:
        reader = ReplicatedStorageReader(session, plan=full_plan(session))
        loaded = blank()
        dcp.load(loaded, storage_reader=reader, planner=Interrupting(act or (lambda: None)))
        pulled = [(one.name, one.size, one.source_node_id, one.whole) for one in reader.pulled]
        return same(loaded), [one for one in pulled if one[0] != ".metadata"]


def file_of(node: Node, version: ContainerVersion) -> Path:
    return node.root / "objects" / version.container.job / "step-5_ckpt" / f"{version.generation:016x}" / NAME


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 4]))


class Saved:
    """Two nodes that both hold the checkpoint, and empty ones that are added."""

    def __init__(self, base: Path, holders: list[Node]) -> None:
        self._base = base
        self.holders = holders
        version = run_job(holders, save)[0]
        assert version is not None
        self.version = version
        self.added: list[Node] = []

    def empty(self, *flags: str) -> Node:
        """One more node, which knows where the others are."""
        record = [read_record(node.root) for node in self.holders]
        peers = ",".join(one.grpc_address for one in record if one is not None)
        node = Node(f"e{len(self.added)}", self._base / f"e{len(self.added)}", self.holders[0].deadline_s)
        self.added.append(node)
        node.start("--peers", peers, *flags)
        return node


@pytest.fixture(scope="module")
def saved() -> Iterator[Saved]:
    """For tests that leave the holders as they were."""
    base = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    try:
        with nodes(base, 2) as two:
            made = Saved(base, two)
            yield made
            for node in made.added:
                node.stop()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def test_straight_to_the_tensors_and_the_store_is_filled_behind(saved: Saved) -> None:
    """F08: the second load finds everything on its node."""
    node = saved.empty()
    good, pulled = run_alone(node, load)
    assert good
    assert [(name, whole) for name, _, _, whole in pulled] == [(NAME, True)]
    wait_until(lambda: node.counter("objects_refilled") == 1, WAIT_S)
    assert node.status().reserved_bytes == 0
    assert (
        file_of(node, saved.version).read_bytes()[: pulled[0][1]]
        == (file_of(saved.holders[0], saved.version).read_bytes()[: pulled[0][1]])
    )
    assert run_alone(node, load) == (True, [])


def test_ranks_of_a_node_that_want_the_same_bring_it_once_more_at_most(saved: Saved) -> None:
    node = saved.empty()
    results = run_job([node, node, node], load)
    assert [good for good, _ in results] == [True] * 3
    wait_until(lambda: file_of(node, saved.version).exists(), WAIT_S)
    assert node.counter("bytes_pulled") < 1.5 * file_of(saved.holders[0], saved.version).stat().st_size


def load_in_little_memory() -> str:
    try:
        good, _ = load(window=32 * MIB)
    except BaseException as error:
        return str(error)
    return "good" if good else "bad"


def test_a_store_that_cannot_hold_the_object(saved: Saved) -> None:
    """F22: as long as a window of one block fits, the tensors are loaded; else there is an error with numbers."""
    node = saved.empty("--budget-bytes", "10Mi")
    assert run_alone(node, load_in_little_memory) == "good"
    wait_until(lambda: node.counter("pulls_failed") == 1, WAIT_S)
    assert node.status().reserved_bytes == 0
    assert not file_of(node, saved.version).exists()

    smaller = saved.empty("--budget-bytes", "2Mi")
    error = run_alone(smaller, load_in_little_memory)
    assert "StoreFullError" in error
    assert "budget of 2097152 bytes" in error
    assert smaller.status().reserved_bytes == 0


def stop_for_good(reached: str) -> None:
    def act() -> None:
        Path(reached).touch()
        threading.Event().wait()

    load(act)


def test_a_trainer_killed_in_the_middle_leaves_nothing_reserved(saved: Saved, tmp_path: Path) -> None:
    """F24."""
    node = saved.empty()
    job = Job([node], stop_for_good, str(tmp_path / "reached"))
    try:
        wait_until((tmp_path / "reached").exists, 60)
        assert node.status().reserved_bytes > 0
    finally:
        job.kill()
    wait_until(lambda: node.status().reserved_bytes == 0, WAIT_S)
    assert run_alone(node, load)[0]


def lose_own_agent() -> tuple[bool, int]:
    root = Path(os.environ["REPLICATOR_ROOT"])

    def act() -> None:
        record = read_record(root)
        assert record is not None
        kill(record.pid)

    good, _ = load(act)
    record = read_record(root)
    assert record is not None
    return good, record.pid


def test_the_agent_is_killed_in_the_middle(saved: Saved) -> None:
    """The next one takes over what the load had reserved, and brings the rest."""
    node = saved.empty()
    before = read_record(node.root)
    good, pid = run_alone(node, lose_own_agent)
    assert good
    assert before is not None
    assert pid != before.pid
    wait_until(lambda: node.status().reserved_bytes == 0, WAIT_S)


def lose_a_holder(pid: int, number: int) -> tuple[bool, list[tuple[str, int, str, bool]]]:
    def act() -> None:
        if number == signal.SIGKILL:
            kill(pid)
        else:
            os.kill(pid, number)

    return load(act)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_is_gone_or_hangs_in_the_middle_is_replaced(saved: Saved, number: int) -> None:
    """F15, F47: what is missing comes from the other one, and so does the copy in the store."""
    node = saved.empty()
    lost = read_record(saved.holders[0].root)
    assert lost is not None
    try:
        good, pulled = run_alone(node, lose_a_holder, lost.pid, number)
        assert good
        assert pulled[0][2] == "n1"
        wait_until(lambda: node.counter("objects_refilled") == 1, WAIT_S)
    finally:
        if number == signal.SIGSTOP:
            os.kill(lost.pid, signal.SIGCONT)
        else:
            saved.holders[0].start()


def load_bad() -> tuple[str, list[float]]:
    windows.WINDOW_BYTES = 4 * MIB
    with replicator.init() as session:
        loaded = blank()
        try:
            dcp.load(loaded, storage_reader=ReplicatedStorageReader(session, plan=full_plan(session)))
        except BaseException as error:
            return str(error), [float(one.sum()) for one in loaded.values() if isinstance(one, torch.Tensor)]
        return "no error", []


def test_a_bad_block_comes_from_another_holder_and_else_is_an_error(saved: Saved) -> None:
    """F01: no byte of it is ever seen. The last test: the holders do not stay as they were."""
    first, second = (file_of(node, saved.version) for node in saved.holders)
    # Each holder in its turn is asked first, so one of two neighbours is asked of the bad one first.
    blocks = [4 * (4 * MIB), 5 * (4 * MIB)]
    for block in blocks:
        flip(first, block + 12_345)
    node = saved.empty()
    for other in saved.added[:-1]:
        other.kill()
    assert run_alone(node, load)[0]
    assert node.counter("bad_blocks_received") > 0
    wait_until(lambda: node.counter("objects_refilled") == 1, WAIT_S)

    # Its holder may have been told, and may have brought a good copy in the meantime.
    wait_until(first.exists, WAIT_S)
    node = saved.empty()
    for other in saved.added[:-1]:
        other.kill()
    for path in (first, second):
        for block in blocks:
            flip(path, block + 777)
    error, sums = run_alone(node, load_bad)
    assert NAME in error
    untouched = float(torch.full((1025, 1024), 7.0).sum())
    for index, found in enumerate(sums):
        assert found in (float(value(index).sum()), untouched, 0.0)
    assert 0.0 in sums
    assert node.status().reserved_bytes == 0
