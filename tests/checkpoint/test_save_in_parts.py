"""One container that is saved in parts, by several writers, and committed once. Real agents and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import nodes, run_job

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter, SaveInParts
from replicator.errors import ConfigError
from replicator.ids import CheckpointContainerId

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def state(seed: int) -> dict[str, Any]:
    return {"shared": torch.full((100,), float(seed)), f"of-rank-{dist.get_rank()}": torch.arange(seed), "seed": seed}


def save_parts() -> list[Any]:
    with replicator.init(job="first") as session:
        before = session.lookup().found
        whole = SaveInParts(session, CheckpointContainerId("first", 3))
        for seed, prefix in enumerate(("model/", "optim/"), start=5):
            dcp.save(state(seed), storage_writer=ReplicatedStorageWriter(session, prefix=prefix, part_of=whole))
        between = session.lookup().found
        # Without a prefix of its own a part would hide another one.
        clash = "none"
        try:
            dcp.save(state(9), storage_writer=ReplicatedStorageWriter(session, prefix="model/", part_of=whole))
        except BaseException as error:
            clash = str(error)
        if dist.get_rank() == 0:
            whole.give_up()
        whole = SaveInParts(session, CheckpointContainerId("first", 4))
        with pytest.raises(ConfigError, match="no part was saved"):
            whole.commit(2)
        for seed, prefix in enumerate(("model/", "optim/"), start=7):
            dcp.save(state(seed), storage_writer=ReplicatedStorageWriter(session, prefix=prefix, part_of=whole))
        if dist.get_rank() == 0:
            whole.commit(2).protected.result(20)
        plan = session.lookup()
        dist.barrier()
        return [before, between, clash, plan.step, sorted(source.name for source in plan.sources)]


def load_part(job: str, of: str) -> tuple[str | None, bool]:
    """Of another job than this one, in which nothing was saved."""
    with replicator.init(job=job) as session:
        assert not session.lookup().found
        plan = session.lookup(job=of)
        loaded = {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for key, one in state(8).items()}
        dcp.load(loaded, storage_reader=ReplicatedStorageReader(session, plan=plan, prefix="optim/"))
        good = all(
            torch.equal(loaded[key], one) if isinstance(one, torch.Tensor) else loaded[key] == one
            for key, one in state(8).items()
        )
        return plan.container and plan.container.job, good


def test_parts_are_committed_together_and_read_by_another_job(shm_root: Path) -> None:
    """F07: a step is all of its parts or nothing; a part that takes another one's names fails the save."""
    with nodes(shm_root, 2) as two:
        for before, between, clash, step, names in run_job(two, save_parts, job="first"):
            assert (before, between, step) == (False, False, 4)
            assert "model/" in clash
            objects = (".metadata", "__0_0.distcp", "__1_0.distcp")
            assert names == [f"{prefix}/{name}" for prefix in ("model", "optim") for name in objects]
        assert run_job(two, load_part, "second", "first", job="second") == [("first", True)] * 2
