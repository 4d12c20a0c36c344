"""From the items that a load asks for to byte ranges of one object, and from the bytes to tensors.

A tensor that was written from a template, which is nearly every one, is read by exact byte ranges: straight into
its target where that is plain memory of the same layout, else through a staging buffer. Anything else is read whole
and given to `torch.load` or to the planner.
"""

from __future__ import annotations

import io
from typing import Protocol

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from replicator.checkpoint.items import PayloadRange, archive_prefix, box_of, is_one_run, payload_range
from replicator.checkpoint.template import payload_view
from replicator.checkpoint.verified_copy import Extent
from replicator.errors import UnsupportedError


class Reading(Protocol):
    """One item of a load. Calls come in this order, `prepare` and `finish` with the same planner."""

    ranges: list[tuple[int, int]]
    """(offset, length) in bytes of the object that it reads, ascending."""

    def prepare(self, planner: LoadPlanner) -> list[Extent]:
        """Where the bytes go."""
        ...

    def finish(self, planner: LoadPlanner) -> Reading | None:
        """Hand on what came, all of it verified; another reading of the item when it is not what it seemed."""
        ...


class TensorReading:
    """The bytes of a box of a tensor that was written from a template."""

    def __init__(
        self, request: ReadItem, info: _StorageInfo, payload: PayloadRange, dtype: torch.dtype, shape: torch.Size
    ) -> None:
        self._request = request
        self._info = info
        self._payload = payload
        self._dtype = dtype
        self._shape = shape
        self._expected = archive_prefix(dtype, shape)
        self._prefix = bytearray()
        self._area: torch.Tensor | None = None
        self._target: torch.Tensor | None = None
        self.ranges = [(info.offset, len(self._expected)), (payload.offset, payload.length)]

    def prepare(self, planner: LoadPlanner) -> list[Extent]:
        request = self._request
        self._target = target = planner.resolve_tensor(request).detach()
        if target.size() != request.lengths:
            raise ValueError(
                f"{request.storage_index.fqn}: expected a tensor of {tuple(request.lengths)} elements to load into, "
                f"found {tuple(target.size())}"
            )
        self._prefix = bytearray(len(self._expected))
        if self._is_direct(target):
            view = payload_view(target)
        else:
            self._area = torch.empty(self._payload.length, dtype=torch.uint8)
            view = payload_view(self._area)
        return [Extent(self._info.offset, memoryview(self._prefix)), Extent(self._payload.offset, view)]

    def finish(self, planner: LoadPlanner) -> Reading | None:
        request, target = self._request, self._target
        if target is None:
            raise AssertionError("expected prepare() before finish()")
        self._target = None
        if self._prefix != self._expected:
            # As long as a templated archive, but strided otherwise: not written by this package.
            return WholeReading(request, self._info)
        if self._area is not None:
            target.copy_(box_of(self._area, self._dtype, self._shape, request.lengths))
            self._area = None
        planner.commit_tensor(request, target)
        return None

    def _is_direct(self, target: torch.Tensor) -> bool:
        return (
            target.device.type == "cpu"
            and target.layout == torch.strided
            and target.dtype == self._dtype
            and target.is_contiguous()
            and not target.is_conj()
            and not target.is_neg()
            and is_one_run(self._shape, self._request.lengths)
        )


class WholeReading:
    """All bytes of an item: opaque bytes, or a tensor of a kind that has no template."""

    def __init__(self, request: ReadItem, info: _StorageInfo) -> None:
        self._request = request
        self._info = info
        self._data = bytearray()
        self.ranges = [(info.offset, info.length)]

    def prepare(self, planner: LoadPlanner) -> list[Extent]:
        self._data = bytearray(self._info.length)
        return [Extent(self._info.offset, memoryview(self._data))]

    def finish(self, planner: LoadPlanner) -> Reading | None:
        request = self._request
        stream = io.BytesIO(self._data)
        self._data = bytearray()
        if request.type == LoadItemType.BYTE_IO:
            planner.load_bytes(request, stream)
            return None
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
        box = narrow_tensor_by_index(loaded, request.storage_offsets, request.lengths)
        target = planner.resolve_tensor(request)
        if target.size() != box.size():
            raise ValueError(
                f"{request.storage_index.fqn}: expected a tensor of {tuple(box.size())} elements to load into, "
                f"found {tuple(target.size())}"
            )
        with torch.no_grad():
            # Not into a detached one: sparse tensors get other indices, quantized ones another scale.
            target.copy_(box)
        planner.commit_tensor(request, target)
        return None


class BytesReading:
    """All bytes of an object."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.ranges = [(0, size)]

    def prepare(self, planner: LoadPlanner | None) -> list[Extent]:
        return [Extent(0, memoryview(self.data))]

    def finish(self, planner: LoadPlanner | None) -> None:
        pass


class SavedTensors:
    """What the metadata says of the tensors in a checkpoint: dtype, and the shape of each saved chunk."""

    def __init__(self, metadata: Metadata) -> None:
        self._of: dict[tuple[str, torch.Size], tuple[torch.dtype, torch.Size]] = {}
        for name, item in metadata.state_dict_metadata.items():
            if isinstance(item, TensorStorageMetadata):
                for chunk in item.chunks:
                    self._of[name, torch.Size(chunk.offsets)] = (item.properties.dtype, torch.Size(chunk.sizes))

    def find(self, index: MetadataIndex, dimensions: int) -> tuple[torch.dtype, torch.Size] | None:
        """dtype and shape of the chunk that an index means; None for what is not listed."""
        offset = index.offset if index.offset is not None else torch.Size([0] * dimensions)
        return self._of.get((index.fqn, offset))


def reading_of(request: ReadItem, info: _StorageInfo, saved: SavedTensors) -> Reading:
    """How an item is read. Takes no memory yet.

    Raises:
        UnsupportedError: the item went through a stream transform when it was saved.
    """
    transforms = getattr(info, "transform_descriptors", None)  # PyTorch before 2.7 has none
    if transforms:
        raise UnsupportedError(
            f"{request.storage_index.fqn} was saved through {', '.join(transforms)}; "
            "transforms are not supported, load it with FileSystemReader after `replicator-admin pull`"
        )
    if request.type != LoadItemType.BYTE_IO:
        known = saved.find(request.storage_index, len(request.lengths))
        if known is not None:
            dtype, shape = known
            payload = payload_range(info.offset, info.length, dtype, shape, request.storage_offsets, request.lengths)
            if payload is not None:
                return TensorReading(request, info, payload, dtype, shape)
    return WholeReading(request, info)
