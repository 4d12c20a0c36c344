"""How the tests drive a saver and a loader: with PyTorch's own planners, as a trainer does."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from replicator.checkpoint import (
    CheckpointObjectManager,
    CheckpointSaver,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
)
from replicator.client.session import Session
from replicator.ids import CheckpointContainerId, CheckpointObjectId


def planned(state: dict[str, Any], planner: DefaultSavePlanner | None = None) -> tuple[Any, SavePlan, Metadata]:
    """The planner, its plan, and the metadata, of a process that saves alone."""
    planner = planner or DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    return planner, planner.finish_plan(plans[0]), metadata


def saver_of(session: Session, **options: Any) -> DefaultCheckpointSaver:
    """Of a process that saves alone."""
    objects = CheckpointObjectManager(session)
    options = {"global_rank_getter": int, "local_rank_getter": int, "global_barrier_func": lambda: None, **options}
    return DefaultCheckpointSaver(ckpt_obj_manager=objects, replication_manager=session.replication, **options)


def with_results(metadata: Metadata, results: list[WriteResult]) -> Metadata:
    return dataclasses.replace(metadata, storage_data={one.index: one.storage_data for one in results})


def save(saver: CheckpointSaver, step: int, state: dict[str, Any], *, order: str = "dcp", buckets: int = 1) -> Any:
    """A whole save of a process alone, in one of the two orders; the future of `finalize_checkpoint`."""
    saver.initialize_checkpoint(step)
    if order == "megatron":
        planner, plan, metadata = planned(state)
        prepared = saver.prepare_write_data(step, plan.items, planner, "__0", buckets)
        saver.stage_data(step, state)
    else:
        planner, plan, metadata = planned(saver.stage_data(step, state))
        prepared = saver.prepare_write_data(step, plan.items, planner, "__0", buckets)
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.numel():
            value.detach().zero_()  # F02: training goes on
    results = saver.write_data(step, prepared, True, buckets)
    saver.write_metadata(step, with_results(metadata, results))
    return saver.finalize_checkpoint(step)


def protected(future: Future[Any] | None) -> Any:
    assert future is not None
    return future.result(30)


# -- in a job of several ranks


def local_rank() -> int:
    """Ranks 0 and 1 are on the first node, 2 and 3 on the second; of two, each is alone on its node."""
    return dist.get_rank() % 2 if dist.get_world_size() == 4 else 0


def job_saver_of(session: Session, **options: Any) -> DefaultCheckpointSaver:
    options = {"global_barrier_func": dist.barrier, **options}
    return DefaultCheckpointSaver(
        dist.get_rank,
        local_rank,
        ckpt_obj_manager=CheckpointObjectManager(session),
        replication_manager=session.replication,
        **options,
    )


def gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def planned_by_all(values: dict[str, Any], planner: DefaultSavePlanner | None = None) -> tuple[Any, Any, Any]:
    """As every rank plans, and every rank knows the metadata."""
    planner = planner or DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(values, is_coordinator=True)
    plans, metadata = planner.create_global_plan(gathered(planner.create_local_plan()))
    return planner, planner.finish_plan(plans[dist.get_rank()]), metadata


def finish(saver: DefaultCheckpointSaver, step: int, metadata: Any, results: list[Any]) -> Any:
    every = [one for rank in gathered(results) for one in rank]
    saver.write_metadata(step, with_results(metadata, every))
    return saver.finalize_checkpoint(step)


def save_by_all(saver: DefaultCheckpointSaver, step: int, values: dict[str, Any], threads: int = 1) -> Any:
    """A whole save, in the order of DCP; the future of `finalize_checkpoint`."""
    saver.initialize_checkpoint(step)
    planner, plan, metadata = planned_by_all(saver.stage_data(step, values))
    buckets = saver.prepare_write_data(step, plan.items, planner, f"__{dist.get_rank()}", threads)
    return finish(saver, step, metadata, saver.write_data(step, buckets, True, threads))


# -- loads


def loader_of(session: Session) -> DefaultCheckpointLoader:
    return DefaultCheckpointLoader(CheckpointObjectManager(session))


def load(loader: DefaultCheckpointLoader, state: dict[str, Any], step: int | None = None) -> int | None:
    """Fill the state from the newest checkpoint, or that of a step; its step."""
    if step is not None:
        container: CheckpointContainerId | None = CheckpointContainerId("job", step)
    else:
        container = loader.get_latest_complete_checkpoint("job")
    if container is None:
        return None
    metadata = loader.read_metadata(container)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    by_object: dict[str, list[Any]] = {}
    for item in planner.create_local_plan().items:
        by_object.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    for name, items in by_object.items():
        loader.read_data(CheckpointObjectId(container, name), items, planner, metadata.storage_data)
    # The planner works on a flattened copy of the dict.
    state.update({key: planner.state_dict[key] for key, value in state.items() if not isinstance(value, torch.Tensor)})
    return container.step


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bitwise, with dtype and shape."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
