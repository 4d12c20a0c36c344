"""The template format is byte for byte what torch.save writes, and stock PyTorch reads it."""

from __future__ import annotations

import io
import re

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from replicator.checkpoint.template import PAYLOAD_ALIGNMENT, is_templated, payload_view, template_of

# Placeholder types of fewer than 8 bits, quantized types and raw bits have no dense tensors that torch.save writes.
NOT_DENSE = re.compile(r"torch\.(u?int[1-7]|q.*|bits.*)")
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and not NOT_DENSE.fullmatch(str(value))},
    key=str,
)
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (1000, 333)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.zeros(shape, dtype=torch.uint8).to(dtype) if dtype == torch.bool else torch.empty(shape, dtype=dtype)
    if tensor.numel():
        size = tensor.numel() * tensor.element_size()
        high = 2 if dtype == torch.bool else 256
        payload_view(tensor)[:] = bytes(torch.randint(0, high, (size,), dtype=torch.uint8).tolist())
    return tensor


def saved(tensor: torch.Tensor) -> bytes:
    crc32 = get_crc32_options()
    set_crc32_options(False)
    try:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return stream.getvalue()
    finally:
        set_crc32_options(crc32)


def templated(tensor: torch.Tensor) -> bytes:
    template = template_of(tensor.dtype, tuple(tensor.shape))
    return template.prefix + bytes(payload_view(tensor)) + template.suffix


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_torch_save_and_loads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """F36: every dtype, bitwise, through the stock loader."""
    tensor = random_tensor(dtype, shape)
    assert is_templated(tensor)
    data = templated(tensor)
    assert data == saved(tensor)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded.dtype == dtype
    assert loaded.shape == tensor.shape
    assert bytes(payload_view(loaded)) == bytes(payload_view(tensor))


def test_payload_is_aligned() -> None:
    assert len(template_of(torch.float32, (5, 5)).prefix) % PAYLOAD_ALIGNMENT == 0


def test_above_four_gib() -> None:
    """F29: zip64 fields appear in the template, and the size is exact. Nothing of 5 GiB is touched."""
    template = template_of(torch.uint8, (5 << 30,))
    assert template.payload_bytes == 5 << 30
    assert b"PK\x06\x06" in template.suffix
    assert len(template.prefix) % PAYLOAD_ALIGNMENT == 0
    assert template.total_bytes < (5 << 30) + 4096


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_others_are_told_apart() -> None:
    class Sub(torch.Tensor):
        pass

    dense = torch.randn(4, 4)
    assert is_templated(torch.nn.Parameter(dense))
    assert not is_templated(dense.to_sparse())
    assert not is_templated(dense.as_subclass(Sub))
    assert not is_templated(torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8))
    assert not is_templated(torch.randn(3, dtype=torch.complex64).conj())
    assert not is_templated(torch.randn(3, device="meta"))


def test_save_options_are_restored() -> None:
    before = get_crc32_options()
    template_of(torch.float64, (3, 3, 3))
    assert get_crc32_options() == before


def test_payload_view_refuses_strided() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        payload_view(torch.randn(4, 4).t())
