"""One item of a checkpoint in an object: how it is written, and which bytes of it a load needs.

An item is a tensor (its `torch.save` archive, see `template`) or opaque bytes. Items stand one after
another in an object; an archive starts at a multiple of 64 bytes, so payloads are aligned.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from replicator.checkpoint.page_lock import PAGE_LOCKS
from replicator.checkpoint.template import PAYLOAD_ALIGNMENT, is_templated, payload_view, template_of
from replicator.errors import UnsupportedError

_PACKED = (torch.quint4x2, torch.quint2x4)
_UNKNOWN = re.compile(r"GLOBAL (\S+) was not an allowed global")


class ItemSink(Protocol):
    """What an item is written to: `store.writer.ObjectWriter`, or anything alike."""

    def write(self, data: memoryview | bytes) -> int: ...
    def next_buffer_slice(self, size: int) -> memoryview: ...
    def tell(self) -> int: ...


class BufferSink(ItemSink, Protocol):
    """What a `Gathering` ends in."""

    def write_many(self, buffers: Sequence[memoryview | bytes]) -> int: ...


class Gathering:
    """A sink that keeps what is written to it, and passes it on in large pieces: see `write_many`. Flush it at the end.

    What is written must not change before that.
    """

    LIMIT_BYTES = 128 << 20

    def __init__(self, sink: BufferSink) -> None:
        self._sink = sink
        self._kept: list[memoryview | bytes] = []
        self._bytes = 0

    def write(self, data: memoryview | bytes) -> int:
        size = memoryview(data).nbytes
        self._kept.append(data)
        self._bytes += size
        if self._bytes >= self.LIMIT_BYTES:
            self.flush()
        return size

    def next_buffer_slice(self, size: int) -> memoryview:
        self.flush()
        return self._sink.next_buffer_slice(size)

    def tell(self) -> int:
        return self._sink.tell() + self._bytes

    def flush(self) -> None:
        kept, self._kept, self._bytes = self._kept, [], 0
        self._sink.write_many(kept)


def write_item(
    sink: ItemSink, data: torch.Tensor | io.BytesIO | memoryview | bytes, *, stock: bool = False
) -> tuple[int, int]:
    """Append one item; (offset, length) in bytes of what a reader of the item needs.

    A dense tensor is copied once, from wherever it lies and whatever its strides, to the sink. Others, and all of them
    with `stock`, go through `torch.save`, which raises what it raises for tensors that cannot be saved.

    Raises:
        UnsupportedError: `torch.load(weights_only=True)` does not give back what `torch.save` wrote.
    """
    if not isinstance(data, torch.Tensor):
        offset = sink.tell()
        sink.write(data.getbuffer() if isinstance(data, io.BytesIO) else data)
        return offset, sink.tell() - offset
    padding = -sink.tell() % PAYLOAD_ALIGNMENT
    if padding:
        sink.write(bytes(padding))
    offset = sink.tell()
    tensor = data.detach()
    if is_templated(tensor) and not stock:
        template = template_of(tensor.dtype, tuple(tensor.shape))
        sink.write(template.prefix)
        if template.payload_bytes:
            _write_payload(sink, tensor, template.payload_bytes)
        sink.write(template.suffix)
    else:
        sink.write(saved_bytes(tensor).getbuffer())
    return offset, sink.tell() - offset


def _write_payload(sink: ItemSink, tensor: torch.Tensor, size: int) -> None:
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        sink.write(payload_view(tensor))
        return
    piece = sink.next_buffer_slice(size)
    if tensor.device.type == "cuda":
        PAGE_LOCKS.lock(piece)
    area = torch.frombuffer(piece, dtype=torch.uint8)
    area.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def saved_bytes(tensor: torch.Tensor) -> io.BytesIO:
    """What `torch.save` writes, without the rest of a larger storage.

    Raises:
        UnsupportedError: of a kind that `torch.load(weights_only=True)` would not give back. Such tensors are rare, and
            small, so it is tried.
        Exception: what `torch.save` raises.
    """
    if tensor.dtype in _PACKED:
        raise UnsupportedError(f"PyTorch does not copy {tensor.dtype} into the tensor that is loaded")
    stream = io.BytesIO()
    torch.save(_own_storage(tensor), stream)
    if is_templated(tensor):
        return stream
    stream.seek(0)
    try:
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        unknown = _UNKNOWN.search(str(error))
        raise UnsupportedError(
            f"torch.load(weights_only=True) does not know {unknown[1] if unknown else 'what it is made of'}; save its "
            "parts as plain tensors, or allow its class with torch.serialization.add_safe_globals"
        ) from error
    found = (type(loaded), loaded.dtype, loaded.layout, loaded.shape)
    expected = (type(tensor), tensor.dtype, tensor.layout, tensor.shape)
    if found != expected:
        raise UnsupportedError(f"torch.load would give {found} for {expected}")
    return stream


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, without the rest of a larger storage that it is a view of."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and type(tensor) is torch.Tensor
        and tensor.untyped_storage().size() != tensor.numel() * tensor.element_size()
    ):
        return tensor.clone()
    return tensor


@dataclass(frozen=True, slots=True)
class PayloadRange:
    """The bytes of an object that a read of (part of) a templated tensor needs.

    `offset` and `length` are in bytes of the object. `first` is the element of the saved tensor, counted in
    row-major order, at which the range starts.
    """

    offset: int
    length: int
    first: int


def payload_range(
    item_offset: int,
    item_length: int,
    dtype: torch.dtype,
    saved_shape: Sequence[int],
    storage_offsets: Sequence[int],
    lengths: Sequence[int],
) -> PayloadRange | None:
    """Where the box `storage_offsets`/`lengths` (in elements, per dimension) of a saved tensor lies.

    None when the item cannot be a templated tensor of this dtype and shape, because its length is another:
    then it must be read whole and given to `torch.load`. The range is the smallest contiguous one.
    """
    try:
        template = template_of(dtype, tuple(saved_shape))
    except (RuntimeError, TypeError, KeyError):  # a dtype that has no plain tensors: a quantized one
        return None
    if template.total_bytes != item_length:
        return None
    element = template.payload_bytes // max(_product(saved_shape), 1)
    start = item_offset + len(template.prefix)
    if _product(lengths) == 0:
        return PayloadRange(start, 0, 0)
    strides = strides_of(saved_shape)
    first = sum(o * s for o, s in zip(storage_offsets, strides, strict=True))
    last = sum((o + n - 1) * s for o, n, s in zip(storage_offsets, lengths, strides, strict=True))
    return PayloadRange(start + first * element, (last - first + 1) * element, first)


def is_one_run(saved_shape: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether a box of this size lies in the saved tensor's bytes without gaps."""
    return _product(lengths) == _covered(saved_shape, lengths)


def box_of(area: torch.Tensor, dtype: torch.dtype, saved_shape: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The box as a tensor over `area`, the uint8 bytes of its `PayloadRange`. No copy."""
    if _product(lengths) == 0:
        return torch.empty(tuple(lengths), dtype=dtype)
    return area.view(dtype).as_strided(tuple(lengths), strides_of(saved_shape))


def archive_prefix(dtype: torch.dtype, saved_shape: Sequence[int]) -> bytes:
    """What the item starts with when it is a templated tensor of this dtype and shape."""
    return template_of(dtype, tuple(saved_shape)).prefix


def _product(numbers: Sequence[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _covered(saved_shape: Sequence[int], lengths: Sequence[int]) -> int:
    if _product(lengths) == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(lengths, strides_of(saved_shape), strict=True))
