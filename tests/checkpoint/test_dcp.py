"""torch.distributed.checkpoint on nodes that share nothing: saves, losses, loads. Real agents, ranks and kills."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import Job, Node, nodes, run_alone, run_job, wait_until
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter
from replicator.ids import ContainerVersion

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]


def tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


def plain_state(step: int) -> dict[str, Any]:
    """What every rank of a data-parallel job has: the same everywhere."""
    return {
        "model": {f"w{i}": tensor(step * 100 + i, (64, 3 + i), dtype) for i, dtype in enumerate(DTYPES)},
        "scalar": torch.tensor(float(step)),
        "empty": torch.empty(0, 4),
        "view": tensor(step, (40, 40)).t()[3:7],
        "extra": {"step": step, "words": ["a", "b"]},
    }


def blank(state: Any) -> Any:
    """The same structure with nothing in it."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Bitwise, with dtypes and shapes."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    return bool(one == other)


def sharded_state(step: int, rows: int = 37) -> dict[str, Any]:
    """DTensors over all ranks, of odd sizes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rows": distribute_tensor(tensor(step, (rows, 5)), mesh, [Shard(0)]),
        "columns": distribute_tensor(tensor(step + 1, (6, rows), torch.bfloat16), mesh, [Shard(1)]),
        "large": distribute_tensor(tensor(step + 2, (512, 1024)), mesh, [Shard(0)]),
        "tiny": distribute_tensor(tensor(step + 3, (1, 2)), mesh, [Shard(0)]),
        "step": step,
    }


def full(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def blank_sharded(rows: int = 37) -> dict[str, Any]:
    state = sharded_state(0, rows)
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1 for key, value in state.items()}


def save_sharded(step: int) -> ContainerVersion | None:
    with replicator.init() as session:
        writer = ReplicatedStorageWriter(session, wait_for="protected")
        dcp.save(sharded_state(step), checkpoint_id=f"step-{step}", storage_writer=writer)
        assert all(future.result(10).object.version.container.step == step for future in writer.replica_futures)
        return session.lookup().version


def load_sharded(expected_step: int) -> tuple[bool, int, list[str]]:
    """(all as saved, step, what came from other nodes)."""
    with replicator.init() as session:
        reader = ReplicatedStorageReader(session)
        state = blank_sharded()
        dcp.load(state, storage_reader=reader)
        wanted = full(sharded_state(expected_step))
        return same(full(state), wanted), reader.plan.step or -1, [one.name for one in reader.pulled]


def container_directory(node: Node, version: ContainerVersion) -> Path:
    """Where the node's store keeps the objects, for tools that know nothing of it."""
    return node.root / "objects" / version.container.job / version.container.step_name / f"{version.generation:016x}"


# -- round trips


def test_sharded_round_trip_and_the_stock_reader(shm_root: Path) -> None:
    """Two nodes of two ranks. With one replica each node has everything, and PyTorch's own reader loads it."""
    with nodes(shm_root, 2) as two:
        placement = [two[0], two[0], two[1], two[1]]
        (version, *others) = run_job(placement, save_sharded, 5)
        assert others == [version] * 3
        for good, step, pulled in run_job(placement, load_sharded, 5):
            assert (good, step, pulled) == (True, 5, [])
        for node in two:
            directory = container_directory(node, version)
            assert sorted(path.name for path in directory.iterdir()) == [
                ".metadata",
                *(f"__{rank}_0.distcp" for rank in range(4)),
            ]
            loaded: dict[str, Any] = {"rows": torch.zeros(37, 5), "large": torch.zeros(512, 1024), "step": -1}
            dcp.load(loaded, storage_reader=FileSystemReader(directory))
            assert same(loaded, {"rows": tensor(5, (37, 5)), "large": tensor(7, (512, 1024)), "step": 5})


def fsdp_round_trip() -> bool:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(13, 29), torch.nn.ReLU(), torch.nn.Linear(29, 7))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            loss = model(tensor(step, (8, 13)) / 100).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    with replicator.init() as session:
        model, optimizer = build(1)
        train(model, optimizer, 3)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id="step-3", storage_writer=ReplicatedStorageWriter(session, wait_for="commit"))
        expected = train(model, optimizer, 3)

        model, optimizer = build(2)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, storage_reader=ReplicatedStorageReader(session))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return train(model, optimizer, 3) == expected


def test_fsdp2_model_and_optimizer(shm_root: Path) -> None:
    """F08: what is loaded is what was saved: training goes on with bitwise equal losses."""
    with nodes(shm_root, 2) as two:
        assert run_job(two, fsdp_round_trip) == [True, True]


def save_and_load_plain(kind: str) -> bool:
    with replicator.init() as session:
        writer = ReplicatedStorageWriter(session, wait_for="protected", thread_count=3)
        for step in (0, 1):
            state = plain_state(step)
            if kind == "save":
                dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            else:
                future = dcp.async_save(
                    state,
                    checkpoint_id=f"step-{step}",
                    storage_writer=writer,
                    async_checkpointer_type=AsyncCheckpointerType(kind),
                )
                for value in state["model"].values():
                    value.zero_()  # F02: training goes on while the save runs
                future.result(60)  # type: ignore[union-attr]
        good = True
        for step in (0, 1):
            state = blank(plain_state(step))
            dcp.load(state, checkpoint_id=f"step-{step}", storage_reader=ReplicatedStorageReader(session))
            good = good and same(state, plain_state(step))
        return good


@pytest.mark.parametrize("kind", ["save", "thread", "process"])
def test_every_way_to_save(shm_root: Path, kind: str) -> None:
    """F02, F14, F36: two steps, 0 among them, of all kinds of values, by each executor of PyTorch."""
    with nodes(shm_root, 2) as two:
        assert run_job(two, save_and_load_plain, kind) == [True, True]


def without_dist() -> bool:
    with replicator.init() as session:
        writer = ReplicatedStorageWriter(session, "step-7")
        dcp.save(plain_state(7), storage_writer=writer, no_dist=True)
        assert writer.commit_future is not None
        writer.commit_future.result(10)
        state = blank(plain_state(7))
        dcp.load(state, storage_reader=ReplicatedStorageReader(session), no_dist=True)
        return same(state, plain_state(7))


def test_a_process_alone(shm_root: Path) -> None:
    with nodes(shm_root, 1) as (node,):
        assert run_alone(node, without_dist)


def implicit() -> bool:
    dcp.save(plain_state(1), checkpoint_id="step-1", storage_writer=ReplicatedStorageWriter())
    state = blank(plain_state(1))
    dcp.load(state, storage_reader=ReplicatedStorageReader())
    return same(state, plain_state(1))


def test_no_session_given(shm_root: Path) -> None:
    """Zero configuration: the writer joins by itself, and starts the agents."""
    with nodes(shm_root, 2, start=False) as two:
        assert run_job(two, implicit) == [True, True]


# -- other world sizes, other nodes


@pytest.mark.parametrize("world", [2, 1])
def test_fewer_ranks_load_what_four_saved(shm_root: Path, world: int) -> None:
    """F10, F44: logical names, and byte ranges of what is elsewhere."""
    with nodes(shm_root, 4) as four:
        run_job(four, save_sharded, 5)
        results = run_job(four[:world], load_sharded, 5)
        assert [(good, step) for good, step, _ in results] == [(True, 5)] * world
        assert any(pulled for _, _, pulled in results)


def save_large() -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with replicator.init() as session:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {
            "a": distribute_tensor(tensor(1, (4096, 1024)), mesh, [Shard(0)]),
            "b": distribute_tensor(tensor(2, (4096, 1024)), mesh, [Shard(0)]),
        }
        dcp.save(state, checkpoint_id=1, storage_writer=ReplicatedStorageWriter(session, wait_for="protected"))
        return session.lookup().size_bytes


def load_some_rows() -> tuple[bool, list[tuple[str, int, bool]]]:
    """One rank wants a few rows of one tensor, as one of many ranks of a larger job does."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    class SomeRows(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            zero, row = torch.Size([0, 0]), torch.Size([1000, 0])
            index = MetadataIndex("b", torch.Size([2048, 0]))
            return LoadPlan(
                [ReadItem(LoadItemType.TENSOR, MetadataIndex("b"), zero, index, row, torch.Size([8, 1024]))]
            )

    with replicator.init() as session:
        state = {"b": torch.zeros(8, 1024)}
        reader = ReplicatedStorageReader(session)
        dcp.load(state, storage_reader=reader, planner=SomeRows())
        pulled = [(one.name, one.size, one.whole) for one in reader.pulled if one.name != ".metadata"]
        return torch.equal(state["b"], tensor(2, (4096, 1024))[3048:3056]), pulled


def test_only_the_needed_blocks_move(shm_root: Path) -> None:
    """F44: of an object of 8 MiB that is elsewhere one block of 4 MiB is brought."""
    with nodes(shm_root, 4) as four:
        assert run_job(four, save_large)[0] > 32 << 20
        node = next(node for node in four if not any(node.root.glob("objects/*/*/*/__2_0.distcp")))
        assert run_alone(node, load_some_rows) == (True, [("__2_0.distcp", 4 << 20, False)])
        assert reserved_bytes(node) == 0


def test_a_lost_node_is_replaced(shm_root: Path) -> None:
    """F10, F13: the replacement is empty and has the same name; everything comes from the survivor."""
    import shutil

    with nodes(shm_root, 2) as two:
        run_job(two, save_sharded, 5)
        two[1].kill()
        shutil.rmtree(two[1].root)
        results = run_job(two, load_sharded, 5)
        assert [(good, step) for good, step, _ in results] == [(True, 5)] * 2
        assert results[0][2] == []
        # Unless the survivor has brought it there before anybody asked.
        assert "__1_0.distcp" in results[1][2] or any(two[1].root.glob("objects/*/*/*/__1_0.distcp"))
        assert run_job(two, save_sharded, 6)[0].container.step == 6


# -- failures


class Failing(DefaultSavePlanner):
    """Raises on one rank in the middle of writing."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "large":
            raise OSError("no such luck")
        return super().resolve_data(write_item)


def fail_then_save() -> tuple[str, int | None, int | None]:
    with replicator.init() as session:
        writer = ReplicatedStorageWriter(session, wait_for="commit")
        try:
            dcp.save(sharded_state(1), checkpoint_id="step-1", storage_writer=writer, planner=Failing())
            error = "none"
        except BaseException as raised:
            error = str(raised)
        between = session.lookup().step
        dcp.save(sharded_state(2), checkpoint_id="step-2", storage_writer=writer)
        return error, between, session.lookup().step


def reserved_bytes(node: Node) -> int:
    """What the node's agent says is being written."""
    return int(node.status().reserved_bytes)


def test_a_failed_save_is_not_a_checkpoint(shm_root: Path) -> None:
    """F06, F40: every rank hears of it, recovery does not see it, nothing stays reserved, the next save works."""
    with nodes(shm_root, 2) as two:
        for error, between, after in run_job(two, fail_then_save):
            assert "no such luck" in error
            assert between is None
            assert after == 2
        assert [reserved_bytes(node) for node in two] == [0, 0]


def save_too_much() -> list[str]:
    with replicator.init() as session:
        outcomes = []
        for step, size in ((1, 100), (2, 10_000_000), (3, 200)):
            writer = ReplicatedStorageWriter(session, wait_for="commit")
            state = {"a": tensor(step, (size,)), "b": tensor(step, (size,))}
            try:
                dcp.save(state, checkpoint_id=step, storage_writer=writer)
                outcomes.append("saved")
            except BaseException as error:
                outcomes.append(str(error))
        return [*outcomes, str(session.lookup().step)]


def test_a_full_store(shm_root: Path) -> None:
    """F22, F40: the numbers on every rank, nothing half-written, and the next save that fits works."""
    with nodes(shm_root, 2, start=False) as two:
        for node in two:
            node.start("--budget-bytes", "8Mi")
        for first, second, third, step in run_job(two, save_too_much):
            assert (first, third, step) == ("saved", "saved", "3")
            assert "StoreFullError" in second
            assert "budget of 8388608 bytes" in second
        assert [reserved_bytes(node) for node in two] == [0, 0]


class Stopping(DefaultSavePlanner):
    """Says so on a pipe and stops for good in the middle of writing."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "large":
            Path(os.environ["STOPPED"] + os.environ["RANK"]).touch()
            threading.Event().wait()
        return super().resolve_data(write_item)


def save_then_stop(stopped: str) -> None:
    os.environ["STOPPED"] = stopped
    session = replicator.init()
    writer = ReplicatedStorageWriter(session, wait_for="protected")
    dcp.save(sharded_state(1), checkpoint_id="step-1", storage_writer=writer)
    dcp.save(sharded_state(2), checkpoint_id="step-2", storage_writer=writer, planner=Stopping())


def test_killed_in_the_middle_of_a_save(shm_root: Path) -> None:
    """F05: SIGKILL to every rank while it writes; recovery sees the step before, and nothing stays reserved."""
    with nodes(shm_root, 2) as two:
        job = Job(two, save_then_stop, str(shm_root / "stopped"))
        try:
            wait_until(lambda: len(list(shm_root.glob("stopped*"))) == 2, 60)
        finally:
            job.kill()
        assert [(good, step) for good, step, _ in run_job(two, load_sharded, 1)] == [(True, 1)] * 2
        wait_until(lambda: [reserved_bytes(node) for node in two] == [0, 0], 10)


def flip(path: Path, offset: int) -> None:
    """One bit of a sealed object changes, as memory does it."""
    with open(path, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_flipped_bit_on_this_node(shm_root: Path, name: str) -> None:
    """F01, F08: the bad copy is quarantined, the load takes the buddy's, and the next load the repaired one."""
    with nodes(shm_root, 2) as two:
        version = run_job(two, save_sharded, 5)[0]
        path = container_directory(two[0], version) / name
        flip(path, 1000)
        assert [(good, step) for good, step, _ in run_job(two, load_sharded, 5)] == [(True, 5)] * 2
        assert any((two[0].root / "quarantine").iterdir())
        results = run_job(two, load_sharded, 5)
        assert [(good, pulled) for good, _, pulled in results] == [(True, [])] * 2


def load_bad(name: str) -> tuple[str, bool]:
    with replicator.init() as session:
        state = blank_sharded()
        plan = session.lookup(5)
        state["large"] = state["large"].fill_(7)
        try:
            dcp.load(state, storage_reader=ReplicatedStorageReader(session, plan=plan))
        except BaseException as error:
            values = set(state["large"].to_local().unique().tolist())
            return str(error), dist.get_rank() == 1 or values <= {0.0, 7.0}
        return "no error", False


def test_a_flipped_bit_everywhere(shm_root: Path) -> None:
    """F01: no rank ever sees the bytes; all of them get the error."""
    with nodes(shm_root, 2) as two:
        version = run_job(two, save_sharded, 5)[0]
        for node in two:
            flip(container_directory(node, version) / "__0_0.distcp", 100_000)
        for error, untouched in run_job(two, load_bad, "__0_0.distcp"):
            assert "__0_0.distcp" in error
            assert untouched


def save_without_an_agent(lost: str) -> tuple[str, str]:
    with replicator.init(auto_start=False) as session:
        dist.barrier()
        if dist.get_rank() == 0:
            Path(lost + "-joined").touch()
            wait_until(Path(lost).exists, 30)
        dist.barrier()
        quick = ReplicatedStorageWriter(session)
        dcp.save(plain_state(1), checkpoint_id="step-1", storage_writer=quick)
        careful = ReplicatedStorageWriter(session, wait_for="commit")
        try:
            dcp.save(plain_state(2), checkpoint_id="step-2", storage_writer=careful)
        except BaseException as error:
            return type(error).__name__, str(error)
        return "", "no error"


def test_saving_goes_on_when_an_agent_is_lost(shm_root: Path) -> None:
    """F16: no lost agent, its own or a peer's, stops a save; who waits for the commit gets the error on every rank."""
    with nodes(shm_root, 2, deadline_s=2.0) as two:
        lost = str(shm_root / "lost")
        job = Job([two[0], two[0], two[1]], save_without_an_agent, lost)
        try:
            wait_until(Path(lost + "-joined").exists, 30)
            two[1].kill()
            Path(lost).touch()
            for kind, message in job.results():
                assert kind == "CheckpointException"
                assert "step-2" in message
                assert "n1" in message
        finally:
            job.kill()


class Caching(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def save_with_cached_plans() -> list[bool]:
    with replicator.init() as session:
        writer = ReplicatedStorageWriter(session, wait_for="commit")
        for step in (1, 2, 3):
            dcp.save(sharded_state(step), checkpoint_id=f"step-{step}", storage_writer=writer, planner=Caching())
        results = []
        for step in (2, 3):
            state = blank_sharded()
            dcp.load(state, storage_reader=ReplicatedStorageReader(session, step))
            results.append(same(full(state), full(sharded_state(step))))
        return results


def test_planner_that_caches_plans(shm_root: Path) -> None:
    """It hands a rank the plan of an earlier save; the objects still belong to this one."""
    with nodes(shm_root, 2) as two:
        assert run_job(two, save_with_cached_plans) == [[True] * 2] * 2


def refusals() -> list[str]:
    with replicator.init() as session:
        errors = []
        for arguments in (
            {"storage_writer": ReplicatedStorageWriter(session)},
            {"storage_writer": ReplicatedStorageWriter(session), "checkpoint_id": "latest"},
            {"storage_writer": ReplicatedStorageWriter(session), "checkpoint_id": "other/step-1"},
            {"storage_writer": ReplicatedStorageWriter(session, 1), "use_collectives": False},
        ):
            try:
                dcp.save(plain_state(1), **arguments)
            except BaseException as error:
                errors.append(str(error))
        try:
            dcp.load(blank(plain_state(1)), storage_reader=ReplicatedStorageReader(session))
        except BaseException as error:
            errors.append(str(error))
        return errors


def test_refusals(shm_root: Path) -> None:
    """One clear line, on every rank, before anything is written."""
    with nodes(shm_root, 1) as (node,):
        for errors in run_job([node, node], refusals):
            assert len(errors) == 5
            for error, expected in zip(
                errors,
                ["expected a checkpoint_id", "'latest'", "names job 'other'", "use_collectives=False", "No checkpoint"],
                strict=True,
            ):
                assert expected in error
        assert not (node.root / "objects" / "job").exists()


def load_two_steps() -> str:
    with replicator.init() as session:
        plan = [session.lookup(step) for step in (1, 2)][dist.get_rank()]
        state = blank_sharded()
        try:
            dcp.load(state, storage_reader=ReplicatedStorageReader(session, plan=plan))
        except BaseException as error:
            return str(error)
        return "no error"


def test_ranks_with_different_plans(shm_root: Path) -> None:
    """F09: a mixture of two steps is never loaded."""
    with nodes(shm_root, 1) as (node,):
        run_job([node, node], save_sharded, 1)
        run_job([node, node], save_sharded, 2)
        for error in run_job([node, node], load_two_steps):
            assert "rank 1" in error
            assert "step-1" in error
            assert "step-2" in error
