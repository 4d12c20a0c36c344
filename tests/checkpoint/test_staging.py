"""Staged state is a copy that nobody changes, and its memory serves again when nobody has it any more."""

from __future__ import annotations

import multiprocessing
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from replicator.checkpoint.staging import Stager
from replicator.checkpoint.writer import ReplicatedStorageWriter


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(3 << 20, dtype=torch.float32).view(3, -1),
        "half": torch.randn(7, 5).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "zero_dim": torch.tensor(5, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "strided": torch.arange(24.0).view(4, 6).t(),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(8)),
        "optimizer": {"state": [{"step": torch.tensor(3.0), "lr": 0.1}, ("x", torch.ones(2))]},
        "step": 7,
    }


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert type(left) is type(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def places(stager: Stager) -> set[int]:
    return {storage.data_ptr() for storage in stager._kept}


def test_it_is_a_copy_of_everything_that_training_cannot_change() -> None:
    """F02."""
    source = state()
    expected = Stager().stage(source)
    assert_same(source, expected)
    staged = Stager().stage(source)
    with torch.no_grad():
        for value in source.values():
            if isinstance(value, torch.Tensor) and value.numel():
                value.zero_()
    source["optimizer"]["state"][0]["step"].zero_()
    source["optimizer"]["state"].append("more")
    assert_same(expected, staged)
    assert not any(value.requires_grad for value in staged.values() if isinstance(value, torch.Tensor))


def test_a_module_and_its_optimizer_are_staged_into_kept_memory() -> None:
    """Their state is an OrderedDict, also of tensors that are no leaves, and in named tuples."""

    class Moments(NamedTuple):
        first: torch.Tensor
        second: torch.Tensor

    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    inner = OrderedDict(product=module[0].weight * 2, moments=Moments(torch.ones(9), torch.zeros(9)))
    stager = Stager()
    staged = stager.stage({"model": module.state_dict(), "inner": inner})
    assert_same(dict(module.state_dict()), staged["model"])
    assert torch.equal(staged["inner"]["product"], inner["product"])
    assert isinstance(staged["inner"]["moments"], Moments)
    assert len(stager._kept) == len(module.state_dict()) + 3


def test_memory_serves_again_only_when_nobody_has_a_tensor_in_it() -> None:
    """F03: also when what is left is a view of a view."""
    stager = Stager()
    source = state()
    first = stager.stage(source)
    before = places(stager)
    weight = first["weight"].data_ptr()
    view = first["weight"][1].view(-1)[5:]
    del first
    source["weight"] += 1
    second = stager.stage(source)
    assert before - places(stager) == {weight}
    assert view[0] == (1 << 20) + 5
    assert second["weight"][1][5] == (1 << 20) + 6
    again = places(stager)
    del second, view
    stager.stage(source)
    assert places(stager) == again


def test_what_another_process_was_given_is_not_used_again() -> None:
    """F03: it may read it for as long as it likes."""
    stager = Stager()
    staged = stager.stage({"a": torch.ones(1000)})
    place = staged["a"].untyped_storage()
    staged["a"].share_memory_()
    del staged
    later = stager.stage({"a": torch.zeros(1000)})
    assert later["a"].untyped_storage().data_ptr() != place.data_ptr()
    assert torch.empty(0).set_(place, 0, (1000,)).eq(1).all()


def test_no_more_than_one_state_is_kept() -> None:
    stager = Stager()
    for size in range(1000, 1100):
        stager.stage({"a": torch.ones(size), "b": torch.ones(4)})
    assert len(stager._kept) == 2
    stager.clear()
    assert not stager._kept


def test_dtensors_keep_their_placement(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        source = distribute_tensor(torch.randn(6, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        staged = Stager().stage({"w": source})["w"]
        assert isinstance(staged, DTensor)
        assert staged.placements == source.placements
        assert torch.equal(staged.to_local(), source.to_local())
        assert staged.to_local().data_ptr() != source.to_local().data_ptr()
    finally:
        dist.destroy_process_group()


def test_async_save_finds_the_stager_in_the_writer() -> None:
    writer = ReplicatedStorageWriter()
    assert isinstance(writer, AsyncStager)
    assert not writer.should_synchronize_after_execute
    staged = writer.stage({"a": torch.ones(3)})
    assert torch.equal(staged["a"], torch.ones(3))
    writer.close()


@pytest.fixture(autouse=True)
def _no_children_left() -> Any:
    yield
    assert not multiprocessing.active_children()
