"""Tensors as plain PyTorch files, written with one copy.

`torch.save` of a dense tensor is a zip archive whose only large part is the tensor's own bytes. With the
archive's CRC-32 switched off, everything around them depends on dtype and shape alone: two tensors of one
dtype and shape have the same bytes before and after the payload. So the surroundings are made once per
(dtype, shape), without touching any payload (`torch.serialization.skip_data`), and writing a tensor is:
prefix, one copy of the payload, suffix. The result is byte for byte what `torch.save` writes, so
`torch.load(weights_only=True)` and the stock `FileSystemReader` read it. (Python's `zipfile` reads it too,
but complains about the CRC-32 of the payload, which is stored as 0; our checksums are CRC32C per block.)

Tensors that this does not describe (sparse, quantized, subclasses, conjugate or negative views kept lazy)
go through `torch.save` itself: `is_templated` tells which.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

PAYLOAD_ALIGNMENT = 64
"""`torch.save` aligns a payload to 64 bytes within its archive; archives are started at such offsets."""

_save_options_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class TensorTemplate:
    """The bytes of `torch.save(tensor)` around the payload; the payload has `payload_bytes` bytes."""

    prefix: bytes
    payload_bytes: int
    suffix: bytes

    @property
    def total_bytes(self) -> int:
        return len(self.prefix) + self.payload_bytes + len(self.suffix)


class _SkeletonSink:
    """A file for `torch.save` under `skip_data`: keeps what is written, and where it seeks over the payload."""

    def __init__(self) -> None:
        self.position = 0
        self.pieces: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self.pieces.append((self.position, piece))
        self.position += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != 0 and whence != 1:
            raise ValueError(f"expected a seek from the start or the current position, found whence={whence}")
        self.position = offset if whence == 0 else self.position + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        return


def is_templated(tensor: torch.Tensor) -> bool:
    """Whether `template_of` describes what `torch.save(tensor)` would write, but for strides and device.

    The tensor may lie on any device and have any strides: its contiguous CPU copy is what is written.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
        # Zeros that take no memory.
        and not tensor._is_zerotensor()
    )


@lru_cache(maxsize=65536)
def template_of(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorTemplate:
    """The template of a contiguous CPU tensor; `shape` in elements."""
    empty = torch.empty(shape, dtype=dtype, device="meta")
    payload_bytes = empty.numel() * empty.element_size()
    sink = _SkeletonSink()
    # torch.empty does not touch its pages, and skip_data does not read them.
    tensor = torch.empty(shape, dtype=dtype)
    with _save_options_lock:
        crc32 = get_crc32_options()
        set_crc32_options(False)
        try:
            with skip_data():
                torch.save(tensor, sink)  # type: ignore[arg-type]
        finally:
            set_crc32_options(crc32)
    return _split(sink.pieces, payload_bytes)


def _split(pieces: list[tuple[int, bytes]], payload_bytes: int) -> TensorTemplate:
    """Divide the written pieces at the one gap that has room for the payload."""
    before, after = bytearray(), bytearray()
    end = 0
    target = before
    for position, piece in pieces:
        gap = position - end
        if gap < 0:
            raise AssertionError(f"expected a skeleton written in order, found a piece at {position} before {end}")
        if target is before and payload_bytes and gap >= payload_bytes:
            payload_start = position - gap
            target = after
            target += bytes(gap - payload_bytes)
            if payload_start % PAYLOAD_ALIGNMENT:
                raise AssertionError(f"expected a payload aligned to 64 bytes, found it at {payload_start}")
        else:
            target += bytes(gap)
        target += piece
        end = position + len(piece)
    if payload_bytes and target is before:
        raise AssertionError(f"expected a gap of {payload_bytes} bytes in the skeleton, found none")
    return TensorTemplate(bytes(before), payload_bytes, bytes(after))


def payload_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place. The view keeps the tensor alive."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"expected a contiguous CPU tensor, found strides {tensor.stride()} on {tensor.device}")
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    area = (ctypes.c_char * size).from_address(tensor.data_ptr())
    area.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(area).cast("B")
