"""What all ranks are about to load is dropped on none of their nodes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import nodes, run_job

import replicator
from replicator.checkpoint import ReplicatedStorageWriter
from replicator.errors import StoreFullError
from replicator.ids import CheckpointContainerId

_SIZE = 4 << 20


def save_two() -> list[str]:
    with replicator.init(replicas=0) as session:
        writer = ReplicatedStorageWriter(session, wait_for="protected")
        for step in (2, 3):
            state = {f"rank-{dist.get_rank()}": torch.full((_SIZE,), step, dtype=torch.uint8)}
            dcp.save(state, checkpoint_id=step, storage_writer=writer)
        return [str(session.lookup().version), str(session.node.node_id)]


def look_up_and_fill() -> list[int | None]:
    """Steps found: by all; and again after a save that took all the room that could be had, and was not committed."""
    with replicator.init(replicas=0) as session:
        found = session.lookup()
        assert found.version is not None
        version = session.begin(CheckpointContainerId(session.job, 4)) if dist.get_rank() == 0 else None
        told = [version]
        dist.broadcast_object_list(told)
        assert told[0] is not None
        with contextlib.suppress(StoreFullError):
            for number in range(8):
                name = f"rank-{dist.get_rank()}-{number}"
                with session.create(told[0].object(name), _SIZE) as sink:
                    sink.write(bytes(_SIZE))
        dist.barrier()
        return [found.step, session.lookup().step]


def test_the_plan_survives_pressure_on_a_node_that_has_all_of_a_newer_step(shm_root: Path) -> None:
    """F04: step 3 lost an object on n0. n1 has all of step 3; only its trainer tells it that step 2 is needed."""
    with nodes(shm_root, 2, start=False) as two:
        for node in two:
            node.start("--budget-bytes", "22Mi", "--keep-last", "5")
        run_job(two, save_two)
        (lost,) = (two[0].root / "objects").glob("*/step-3_ckpt/*/__0_0.distcp")
        two[0].kill()
        lost.unlink()
        two[0].start("--budget-bytes", "22Mi", "--keep-last", "5")
        assert run_job(two, look_up_and_fill) == [[2, 2], [2, 2]]
