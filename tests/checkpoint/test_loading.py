"""Readings get the right bytes from what PyTorch's own writer wrote, and from what ours does."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import crc32c as reference
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter

from replicator.checkpoint.items import write_item
from replicator.checkpoint.loading import SavedTensors, TensorReading, WholeReading, reading_of
from replicator.checkpoint.verified_copy import Block, copy_verified

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
BLOCK = 4096


class Memory(io.BytesIO):
    """An object in memory, written to as an ObjectWriter is."""

    def next_buffer_slice(self, size: int) -> memoryview:
        raise AssertionError("only contiguous tensors are written here")


def load(directory: Path, state: dict[str, Any]) -> list[str]:
    """Load `state` through readings alone; the class of each reading that was needed."""
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, True)
    saved = SavedTensors(metadata)
    used = []
    for request in planner.create_local_plan().items:
        info = metadata.storage_data[request.storage_index]
        data = memoryview((directory / info.relative_path).read_bytes())

        def block_at(index: int, data: memoryview = data) -> Block:
            view = data[index * BLOCK : (index + 1) * BLOCK]
            return Block(index, view, reference.crc32c(view))

        reading = reading_of(request, info, saved)
        while reading is not None:
            used.append(type(reading).__name__)
            assert copy_verified(reading.prepare(planner), BLOCK, block_at) == []
            reading = reading.finish(planner)
    return used


def save(directory: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(directory), no_dist=True)


def test_what_pytorch_wrote(tmp_path: Path) -> None:
    """Archives with CRC-32 (the stock writer's) are of the same shape, and read by range."""
    state = {"a": torch.randn(30, 40), "b": torch.arange(7, dtype=torch.int16), "c": [1, "x"], "d": torch.tensor(2.5)}
    save(tmp_path, state)
    loaded = {"a": torch.zeros(30, 40), "b": torch.zeros(7, dtype=torch.int16), "c": None, "d": torch.tensor(0.0)}
    used = load(tmp_path, loaded)
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"], state["b"])
    assert loaded["c"] == [1, "x"]
    assert loaded["d"] == 2.5
    assert "TensorReading" in used


def test_a_strided_tensor_is_not_taken_for_a_contiguous_one(tmp_path: Path) -> None:
    """F01: same dtype, shape and archive length, other order of elements. The archive's own word decides."""
    state = {"a": torch.arange(36.0).reshape(6, 6).t()}
    assert not state["a"].is_contiguous()
    save(tmp_path, state)
    loaded = {"a": torch.zeros(6, 6)}
    load(tmp_path, loaded)
    assert torch.equal(loaded["a"], state["a"])


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(40, 30),
        torch.zeros(30, 40).t(),
        torch.zeros(40, 30, dtype=torch.float64),
        torch.zeros(40, 60)[:, ::2],
    ],
    ids=["plain", "transposed", "another dtype", "every other column"],
)
def test_any_target(tmp_path: Path, target: torch.Tensor) -> None:
    state = {"a": torch.randn(40, 30)}
    save(tmp_path, state)
    load(tmp_path, {"a": target})
    assert torch.equal(target, state["a"].to(target.dtype))


def test_a_target_of_another_shape(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.randn(4, 4)})
    with pytest.raises(ValueError, match=r"(?i)size|elements"):
        load(tmp_path, {"a": torch.zeros(4, 5)})


def test_boxes_of_ours_and_theirs() -> None:
    """A box in the middle of a tensor, as resharding asks for it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

    whole = torch.randn(9, 11)
    target = torch.zeros(4, 5)
    request = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex("a", torch.Size([0, 0])),
        dest_offsets=torch.Size([0, 0]),
        storage_index=MetadataIndex("a", torch.Size([2, 0])),
        storage_offsets=torch.Size([3, 6]),
        lengths=torch.Size([4, 5]),
    )
    metadata = Metadata(
        {
            "a": TensorStorageMetadata(
                TensorProperties(dtype=torch.float32),
                torch.Size([11, 11]),
                [ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([9, 11]))],
            )
        }
    )

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return target

    planner = Planner()
    for ours in (True, False):
        target.zero_()
        memory = Memory()
        memory.write(b"x" * 64)
        if ours:
            offset, length = write_item(memory, whole)
        else:
            offset = memory.tell()
            torch.save(whole, memory)
            length = memory.tell() - offset
        data = memoryview(memory.getvalue())
        reading = reading_of(request, _StorageInfo("f", offset, length), SavedTensors(metadata))
        assert isinstance(reading, TensorReading)

        def block_at(index: int, data: memoryview = data) -> Block:
            view = data[index * BLOCK : (index + 1) * BLOCK]
            return Block(index, view, reference.crc32c(view))

        assert copy_verified(reading.prepare(planner), BLOCK, block_at) == []
        again = reading.finish(planner)
        if again is not None:
            assert isinstance(again, WholeReading)
            assert copy_verified(again.prepare(planner), BLOCK, block_at) == []
            assert again.finish(planner) is None
        assert torch.equal(target, whole[3:7, 6:11])
