"""The saver and the loader in a job of two nodes with two ranks each: real agents, ranks, forks and kills."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from job_support import Job, Node, nodes, run_job, wait_until
from saver_support import finish, job_saver_of, load, loader_of, local_rank, planned_by_all, same, save_by_all
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import replicator
from replicator.checkpoint import DefaultCheckpointSaver
from replicator.client.session import Session
from replicator.errors import ReplicatorError, SaveError
from replicator.ids import CheckpointContainerId, CheckpointObjectId
from replicator.store.reader import open_object

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ROWS = 37


def state(step: int) -> dict[str, Any]:
    """Sharded over all ranks, the same on all, and of one rank alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    values: dict[str, Any] = {
        "rows": distribute_tensor(torch.arange(ROWS * 5.0).view(ROWS, 5) + step, mesh, [Shard(0)]),
        "all": torch.full((3,), step),
        f"own{rank}": torch.full((7,), 100 * step + rank),
        "note": {"step": step},
    }
    if rank == 0:
        values["big"] = torch.arange(3 << 20, dtype=torch.int32).view(3072, 1024) + step
    return values


def save(saver: DefaultCheckpointSaver, step: int, threads: int = 1) -> Any:
    return save_by_all(saver, step, state(step), threads)


def loaded(session: Session, expected: int) -> tuple[int | None, list[str]]:
    """The step, and the keys that are not as they were saved."""
    found = state(0)
    found["note"] = None
    step = load(loader_of(session), found)
    wanted = state(expected)
    for values in (found, wanted):
        values["rows"] = values["rows"].full_tensor()
    bad = [key for key, value in wanted.items() if key != "note" and not same(found[key], value)]
    return step, bad if found["note"] == wanted["note"] else [*bad, "note"]


# -- one job, whose facts the tests look at


def life(facts: dict[str, Any]) -> dict[str, Any]:
    with replicator.init() as session:
        for part in PARTS:
            part(session, facts)
        facts["at the end"] = loaded(session, facts["good"])
    return facts


def held(session: Session, step: int) -> list[str]:
    plan = session.lookup(step)
    directory = session.agent.paths.objects_of(plan.require())
    return sorted(path.name for path in directory.iterdir())


def plain_save(session: Session, facts: dict[str, Any]) -> None:
    rank = dist.get_rank()
    saver = job_saver_of(session)
    future = save(saver, 1, threads=2)
    facts["future"] = future is not None
    if future is not None:
        facts["protected"] = future.result(30).is_protected
    dist.barrier()
    facts["held"] = held(session, 1)
    plan = session.lookup(1)
    (metadata,) = [source for source in plan.sources if source.name == ".metadata"]
    with open_object(session.agent.paths, plan.require().object(".metadata")) as mine:
        facts["metadata"] = (mine.info.crc32c == metadata.crc32c, mine.info.owner_node_id)
    facts["candidates"] = [str(one) for one in loader_of(session).get_candidate_checkpoints("job")]
    facts["loaded"] = loaded(session, 1)

    saver.initialize_checkpoint(2)
    planner, plan2, global_metadata = planned_by_all(saver.stage_data(2, state(2)))
    buckets = saver.prepare_write_data(2, plan2.items, planner, f"__{rank}", 1)
    if rank == 1:
        # Other content of the same buckets, of which copies are on their way.
        stale = [replace(one, tensor_data=[(item, value + 1) for item, value in one.tensor_data]) for one in buckets]
        saver.write_data(2, stale, replicate_after_write=True)
    # As another process does it, where the buckets get other names; here they keep those of the first writing.
    results = saver.write_data(2, pickle.loads(pickle.dumps(buckets)), replicate_after_write=False)
    copies = [future for bucket in buckets for future in saver.async_replicate_object(bucket.object_id)]
    facts["copies"] = [(one.result(30).object.name, one.result(30).buddy_node_id) for one in copies]
    future = finish(saver, 2, global_metadata, results)
    if future is not None:
        future.result(30)
    dist.barrier()
    plan = session.lookup(2)
    facts["written again"] = [source.name for source in plan.sources], loaded(session, 2)
    for source in plan.sources:
        with open_object(session.agent.paths, plan.require().object(source.name)) as mine:
            assert mine.info.crc32c == source.crc32c
    facts["good"] = 2


def write_in_another_process(session: Session, facts: dict[str, Any]) -> None:
    """Rank 3's buckets, staged after they were prepared, as Megatron's workers have them."""
    saver = job_saver_of(session)
    saver.initialize_checkpoint(3)
    values = state(3)
    planner, plan, metadata = planned_by_all(values)
    buckets = saver.prepare_write_data(3, plan.items, planner, f"__{dist.get_rank()}", 1)
    saver.stage_data(3, values)
    for value in values.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    if dist.get_rank() == 3:
        results = in_another_process((saver, buckets))
    else:
        results = saver.write_data(3, buckets, True)
    future = finish(saver, 3, metadata, results)
    if future is not None:
        facts["protected from elsewhere"] = future.result(30).is_protected
    dist.barrier()
    facts["loaded from elsewhere"] = loaded(session, 3)
    facts["good"] = 3


WRITE = """
import pickle, sys
saver, buckets = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps(saver.write_data(3, buckets, True)))
"""


def in_another_process(what: Any) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", WRITE], input=pickle.dumps(what), stdout=subprocess.PIPE, timeout=50, check=True
    )
    return pickle.loads(done.stdout)


def told(action: Any) -> str:
    try:
        action()
    except ReplicatorError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ranks_that_collide(session: Session, facts: dict[str, Any]) -> None:
    saver = job_saver_of(session)
    saver.initialize_checkpoint(4)
    planner, plan, metadata = planned_by_all(saver.stage_data(4, state(4)))
    buckets = saver.prepare_write_data(4, plan.items, planner, f"__{dist.get_rank()}", 1)
    results = saver.write_data(4, buckets, True)
    common = CheckpointObjectId(CheckpointContainerId("job", 4), "common.pt")
    if local_rank() == 0:
        saver._objects.write_bytes(common, f"of rank {dist.get_rank()}".encode())
    facts["collision"] = told(partial(finish, saver, 4, metadata, results))
    dist.barrier()
    facts["after the collision"] = session.lookup().step


def barrier_that_throws(session: Session, facts: dict[str, Any]) -> None:
    def throw() -> None:
        dist.barrier()
        raise TimeoutError("the network went away")

    facts["barrier"] = told(partial(save, job_saver_of(session, global_barrier_func=throw), 5))
    dist.barrier()
    facts["after the barrier"] = session.lookup().step


class Raising(DefaultSavePlanner):
    """Cannot give one item of one rank."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "own1":
            raise OSError("no such luck")
        return super().resolve_data(write_item)


def planner_that_raises(session: Session, facts: dict[str, Any]) -> None:
    saver = job_saver_of(session)
    saver.initialize_checkpoint(6)
    planner, plan, _ = planned_by_all(saver.stage_data(6, state(6)), Raising(flatten_state_dict=False))
    facts["planner"] = told(partial(saver.prepare_write_data, 6, plan.items, planner, f"__{dist.get_rank()}", 1))
    dist.barrier()
    facts["after the planner"] = session.lookup().step
    future = save(saver, 7)
    if future is not None:
        future.result(30)
    dist.barrier()
    facts["good"] = 7


def rank_that_never_began(session: Session, facts: dict[str, Any]) -> None:
    """Rank 0 began step 8, and the others failed before they did: then all save it again, the others first."""
    saver = job_saver_of(session)
    if dist.get_rank() == 0:
        saver.initialize_checkpoint(8)
    dist.barrier()
    if dist.get_rank() != 0:
        saver.initialize_checkpoint(8)
    dist.barrier()
    if dist.get_rank() == 0:
        saver.initialize_checkpoint(8)
    planner, plan, metadata = planned_by_all(saver.stage_data(8, state(8)))
    buckets = saver.prepare_write_data(8, plan.items, planner, f"__{dist.get_rank()}", 1)
    future = finish(saver, 8, metadata, saver.write_data(8, buckets, True))
    if future is not None:
        future.result(30)
    dist.barrier()
    facts["loaded after the second beginning"] = loaded(session, 8)

    # Rank 0 gives up what it began, and this time says so before the others come.
    container = CheckpointContainerId("job", 9)
    if dist.get_rank() == 0:
        session.abandon(session.begin(container, saver))
    dist.barrier()
    if dist.get_rank() == 0:
        # The others are in their wait, or come to it later: neither gets what was given up.
        facts["attempts"] = str(session.begin(container, saver))
    else:
        facts["attempts"] = str(session.await_next(container))
    dist.barrier()
    facts["good"] = 8


PARTS = (
    plain_save,
    write_in_another_process,
    ranks_that_collide,
    barrier_that_throws,
    planner_that_raises,
    rank_that_never_began,
)


@pytest.fixture(scope="module")
def three() -> Iterator[list[Node]]:
    base = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    with nodes(base, 3) as made:
        yield made
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="module")
def facts(three: list[Node]) -> list[dict[str, Any]]:
    """Of each rank."""
    return run_job([three[0], three[0], three[1], three[1]], life, {})


def each(facts: list[dict[str, Any]], name: str) -> list[Any]:
    return [rank[name] for rank in facts if name in rank]


def test_every_object_is_with_its_buddy_right_after_its_seal(facts: list[dict[str, Any]]) -> None:
    names = {f"__{rank}_{n}_src{rank}.distcp" for rank in range(4) for n in range(2)} | {".metadata"}
    for held in each(facts, "held"):
        assert set(held) == names


def test_one_rank_commits_and_has_the_future(facts: list[dict[str, Any]]) -> None:
    assert each(facts, "future") == [True, False, False, False]
    assert each(facts, "protected") == [True]


def test_metadata_are_written_once_on_each_node(facts: list[dict[str, Any]]) -> None:
    """The same bytes on both nodes; of the second node's own, or of the first's, whose copy may have come before."""
    (n0, also_n0, n1, also_n1) = each(facts, "metadata")
    assert n0 == also_n0
    assert n1 == also_n1
    assert n0[0]
    assert n1[0]
    assert {n0[1], n1[1]} <= {"n0", "n1"}


def test_replication_on_request(facts: list[dict[str, Any]]) -> None:
    for rank, copies in enumerate(each(facts, "copies")):
        name = f"__{rank}_0_src{rank}{'.1' if rank == 1 else ''}.distcp"
        assert copies == [(name, "n1" if rank < 2 else "n0")]


def test_an_object_that_is_written_again(facts: list[dict[str, Any]]) -> None:
    """F01: the manifest has the last writing alone, and both nodes hold what it says."""
    names = [".metadata", *(f"__{rank}_0_src{rank}{'.1' if rank == 1 else ''}.distcp" for rank in range(4))]
    assert each(facts, "written again") == [(names, (2, []))] * 4


def test_all_ranks_find_and_load_the_same(facts: list[dict[str, Any]]) -> None:
    """F09."""
    assert each(facts, "candidates") == [["job/step-1_ckpt"]] * 4
    assert each(facts, "loaded") == [(1, [])] * 4
    assert each(facts, "at the end") == [(8, [])] * 4


def test_buckets_may_be_written_in_another_process(facts: list[dict[str, Any]]) -> None:
    """F02: staged after they were prepared, while training changes what they were prepared from."""
    assert each(facts, "protected from elsewhere") == [True]
    assert each(facts, "loaded from elsewhere") == [(3, [])] * 4


def test_an_object_name_that_two_nodes_use(facts: list[dict[str, Any]]) -> None:
    """Bad input: the coordinator names ranks and nodes, and commits nothing."""
    first, *others = each(facts, "collision")
    assert first.startswith("SaveError: ")
    assert "rank 0 on n0 and rank 2 on n1 wrote different objects called 'common.pt'" in first
    assert others == ["no error"] * 3
    assert each(facts, "after the collision") == [3] * 4


def test_a_barrier_that_throws(facts: list[dict[str, Any]]) -> None:
    """Bad input."""
    for rank, error in enumerate(each(facts, "barrier")):
        assert error.startswith("SaveError: ")
        assert f"the barrier threw on rank {rank}, TimeoutError: the network went away" in error
    assert each(facts, "after the barrier") == [3] * 4


def test_a_planner_that_raises_for_one_item(facts: list[dict[str, Any]]) -> None:
    """Bad input: the key is named; the step before is still there, and the next save works."""
    errors = each(facts, "planner")
    assert [error == "no error" for error in errors] == [True, False, True, True]
    assert errors[1] == "SaveError: key 'own1': its value cannot be had: OSError: no such luck"
    assert each(facts, "after the planner") == [3] * 4


def test_a_rank_that_failed_before_it_began(facts: list[dict[str, Any]]) -> None:
    """All ranks save the step again, in whichever order they come, and none is given the attempt that was given up."""
    assert each(facts, "loaded after the second beginning") == [(8, [])] * 4
    assert len(set(each(facts, "attempts"))) == 1


def rows_of_big(wanted: int) -> tuple[bool, list[tuple[str, int, bool]], list[tuple[str, bool]]]:
    """On a node that holds nothing: a few rows first, as a job of another size wants them, then all of it."""

    class SomeRows(DefaultLoadPlanner):
        rows = (1000, 8)

        def create_local_plan(self) -> LoadPlan:
            start, count = self.rows
            index = MetadataIndex("big", torch.Size([0, 0]))
            at, zero = torch.Size([start, 0]), torch.Size([0, 0])
            return LoadPlan([ReadItem(LoadItemType.TENSOR, index, zero, index, at, torch.Size([count, 1024]))])

    big = torch.arange(3 << 20, dtype=torch.int32).view(3072, 1024) + wanted
    good = True
    pulled = []
    with replicator.init() as session:
        for rows in ((1000, 8), (0, 3072)):
            loader = loader_of(session)
            container = loader.get_latest_complete_checkpoint("job")
            assert container is not None
            metadata = loader.read_metadata(container)
            state = {"big": torch.zeros(rows[1], 1024, dtype=torch.int32)}
            planner = SomeRows()
            planner.rows = rows
            planner.set_up_planner(state, metadata, is_coordinator=True)
            (item,) = planner.create_local_plan().items
            (name,) = {info.relative_path for index, info in metadata.storage_data.items() if index.fqn == "big"}
            loader.read_data(CheckpointObjectId(container, name), [item], planner, metadata.storage_data)
            good = good and torch.equal(state["big"], big[rows[0] : rows[0] + rows[1]])
            pulled.append([one for one in loader.pulled if one.name != ".metadata"])
        part, whole = pulled
        return good, [(one.name, one.size, one.whole) for one in part], [(one.name, one.whole) for one in whole]


def test_what_is_missing_is_pulled_and_byte_ranges_only_when_resharding(
    three: list[Node], facts: list[dict[str, Any]]
) -> None:
    """F44: of an object of 12 MiB, one block of 4 MiB for a few rows; all of it when all is wanted."""
    _, (good, part, whole) = run_job([three[0], three[2]], rows_of_big, 8)
    assert good
    assert [(size, all_of_it) for _, size, all_of_it in part] == [(4 << 20, False)]
    assert [all_of_it for _, all_of_it in whole] == [True]


# -- a rank that dies


def die_in_write_data(killed: str) -> str:
    session = replicator.init()
    saver = job_saver_of(session)
    future = save(saver, 1)
    if future is not None:
        future.result(30)
    dist.barrier()
    if dist.get_rank() == 1:
        saver._objects.acquire_buffer = partial(_die, saver._objects.acquire_buffer)  # type: ignore[method-assign]
    try:
        save(saver, 2)
    except SaveError as error:
        return str(error)
    except RuntimeError:
        # The collective of the plans came before the barrier.
        return told(partial(saver.finalize_checkpoint, 2))
    return "no error"


def _die(acquire: Any, *args: Any) -> Any:
    """With memory reserved and half of an object written."""
    sink = acquire(*args)
    sink.write(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)


def go_on() -> tuple[Any, Any]:
    with replicator.init() as session:
        before = loaded(session, 1)
        future = save(job_saver_of(session), 2)
        if future is not None:
            future.result(30)
        dist.barrier()
        return before, loaded(session, 2)


def test_a_rank_that_dies_inside_write_data(shm_root: Path) -> None:
    """F05: SIGKILL. The others hear which rank it was; the step before is recovered, and the next save works."""
    with nodes(shm_root, 2) as two:
        job = Job(two, die_in_write_data, "")
        try:
            error = job.ranks[0].result(time.monotonic() + 60)
        finally:
            job.kill()
        assert job.ranks[1].process.exitcode == -signal.SIGKILL
        assert "step-2_ckpt is not committed" in error
        assert "rank 1 had not finished" in error
        assert [path.name for path in two[1].root.glob("unfinished/job/*")] == ["step-2_ckpt__0__unfinished"]
        assert run_job(two, go_on) == [((1, []), (2, []))] * 2
        for node in two:
            assert not list(node.root.glob("unfinished/job/*"))
            wait_until(lambda node=node: node.status().reserved_bytes == 0, 10)
