"""`replicator://job/step-5` as a checkpoint id of torch.distributed.checkpoint, without any code. Real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import nodes, run_job
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

URL = "replicator://job"
ROWS = 4096


def state_of(step: int, *, blank: bool = False) -> dict[str, Any]:
    """Sharded over all ranks: a tensor of many blocks, small ones, and a value."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(step)
    large = torch.rand(ROWS, 1024, generator=generator)
    state = {
        "large": distribute_tensor(large, mesh, [Shard(0)]),
        "odd": distribute_tensor(large[:37, :5].to(torch.bfloat16), mesh, [Shard(0)]),
        "step": step,
    }
    return {k: torch.zeros_like(v) if torch.is_tensor(v) else -1 for k, v in state.items()} if blank else state


def is_state(state: dict[str, Any], step: int) -> bool:
    wanted = state_of(step)
    return state["step"] == step and all(
        torch.equal(state[key].to_local(), wanted[key].to_local()) for key in ("large", "odd")
    )


def load(step: int, **arguments: Any) -> bool:
    state = state_of(0, blank=True)
    dcp.load(state, **(arguments or {"checkpoint_id": f"{URL}/step-{step}"}))
    return is_state(state, step)


class Failing(DefaultSavePlanner):
    """Raises on rank 1 in the middle of writing."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "odd":
            raise OSError("no such luck")
        return super().resolve_data(write_item)


def error_of(call: Any) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def save_in_every_way() -> dict[str, Any]:
    """A job's whole life, on every rank: no session is made by hand."""
    found: dict[str, Any] = {}
    fs = fsspec.filesystem("replicator")
    found["nothing"] = error_of(lambda: fs.ls("job"))
    dist.barrier()
    dcp.save(state_of(5), checkpoint_id=f"{URL}/step-5")
    found["loaded"] = load(5)
    found["listed"] = fs.ls(URL)
    found["objects"] = sorted(fs.ls(f"{URL}/step-5_ckpt", detail=False))

    found["failed"] = error_of(lambda: dcp.save(state_of(6), checkpoint_id=f"{URL}/step-6", planner=Failing()))
    found["after failure"] = (fs.exists(f"{URL}/step-6"), fs.exists(f"{URL}/step-6/.metadata"))
    dist.barrier()
    dcp.save(state_of(6), checkpoint_id=f"{URL}/step-6")
    # The same step once more, with other content, in many files; and again by the storage writer.
    dcp.save(state_of(66), storage_writer=FsspecWriter(f"{URL}/step-6", single_file_per_rank=False, wait_for="commit"))
    state = state_of(0, blank=True)
    dcp.load(state, checkpoint_id=f"{URL}/step-6")
    found["saved again"] = is_state(state, 66)
    found["file per item"] = len(fs.ls(f"{URL}/step-6", detail=False))
    session = replicator.init.__globals__["open_session"]()
    dcp.save(state_of(7), checkpoint_id="step-7", storage_writer=ReplicatedStorageWriter(session))
    found["by the writer"] = load(7)
    found["by the reader"] = load(66, storage_reader=ReplicatedStorageReader(session, step=6))

    def exclusive() -> None:
        dcp.save(state_of(7), storage_writer=FsspecWriter(f"{URL}/step-7", overwrite=False))

    found["overwrite"] = error_of(exclusive)
    found["no collectives"] = error_of(
        lambda: dcp.save(state_of(7), checkpoint_id=f"{URL}/step-7", use_collectives=False)
    )
    dist.barrier()
    future = dcp.async_save(state_of(8), storage_writer=None, checkpoint_id=f"{URL}/step-8")
    future.result(60)  # type: ignore[union-attr]
    dist.barrier()
    dcp.async_save(
        state_of(10), checkpoint_id=f"{URL}/step-10", async_checkpointer_type=AsyncCheckpointerType.PROCESS
    ).result(60)  # type: ignore[union-attr]
    dist.barrier()
    found["async"] = load(8), load(10)
    found["epochs"] = session.epoch
    writer = FsspecWriter(f"{URL}/step-9", thread_count=3, wait_for="protected")
    dcp.save(state_of(9), storage_writer=writer)
    found["threads"] = load(9, storage_reader=FsspecReader(f"{URL}/step-9"))
    found["end"] = fs.ls(URL, detail=False)
    found["reserved"] = session.job
    return found


def test_all(shm_root: Path) -> None:
    with nodes(shm_root, 2) as two:
        for found in run_job(two, save_in_every_way):
            for key, value in found.items():
                print(key, value)
