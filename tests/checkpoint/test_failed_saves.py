"""Saves that fail again and again: whoever fails, however it saves, the next one finds room. Real agents and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import nodes, run_job
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# Of one rank; a store has room for about four saves of two ranks.
SHARD_BYTES = 2 << 20
BUDGET = "20Mi"
FAILURES = 8


class Failing(DefaultSavePlanner):
    """Raises on one rank when everything before is written."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == self.rank and write_item.index.fqn.startswith("z"):
            raise OSError("no such luck")
        return super().resolve_data(write_item)


class FailingWriter(ReplicatedStorageWriter):
    """Fails on the coordinator when all ranks have written."""

    def finish(self, metadata: Any, results: Any) -> None:
        metadata.__class__ = _Unpicklable
        super().finish(metadata, results)


class _Unpicklable(dcp.Metadata):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OSError("no such luck")


def shards(step: int) -> dict[str, Any]:
    """Of this rank: one that is written before the planner fails, and one on which it does."""
    rank = dist.get_rank()
    values = torch.arange(SHARD_BYTES // 8, dtype=torch.int64) * (step + 1) + rank
    return {f"a{rank}": values, f"z{rank}": torch.tensor([step, rank])}


def fail_then_save(failing: str, writers: str, kind: str) -> tuple[list[str], bool]:
    with replicator.init() as session:
        writer: Any = None

        def save(step: int, fail: bool) -> None:
            nonlocal writer
            made = FailingWriter if fail and failing == "finish" else ReplicatedStorageWriter
            if writer is None or writers == "new" or type(writer) is not made:
                writer = made(session, wait_for="protected")
            options: dict[str, Any] = {"checkpoint_id": f"step-{step}", "storage_writer": writer}
            if fail and failing != "finish":
                options["planner"] = Failing(int(failing))
            if kind == "process":
                future: Any = dcp.async_save(
                    shards(step), async_checkpointer_type=AsyncCheckpointerType.PROCESS, **options
                )
                future.result(60)
            else:
                dcp.save(shards(step), **options)

        save(0, False)
        errors = []
        for step in range(1, FAILURES + 1):
            try:
                save(step, True)
                errors.append("none")
            except BaseException as error:
                errors.append(str(error))
        step = FAILURES + 1
        save(step, False)
        wanted = shards(step)
        state = {key: torch.zeros_like(value) for key, value in wanted.items()}
        dcp.load(state, storage_reader=ReplicatedStorageReader(session))
        return errors, all(torch.equal(state[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("failing", "writers", "kind"),
    [
        ("0", "one", "save"),
        ("1", "one", "save"),
        ("1", "new", "save"),
        ("finish", "one", "save"),
        ("1", "one", "process"),
    ],
)
def test_any_number_of_failed_saves_leaves_room(shm_root: Path, failing: str, writers: str, kind: str) -> None:
    with nodes(shm_root, 2, start=False) as two:
        for node in two:
            node.start("--budget-bytes", BUDGET)
        for errors, good in run_job(two, fail_then_save, failing, writers, kind):
            assert len(errors) == FAILURES
            assert all("no such luck" in error for error in errors), errors
            assert good
