"""What is written is read back bitwise: whole, or as the byte range that a box needs."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.checkpoint.items import archive_prefix, box_of, is_one_run, payload_range, write_item
from replicator.checkpoint.template import PAYLOAD_ALIGNMENT


class Sink:
    """An ItemSink in memory."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.slices: list[tuple[int, bytearray]] = []

    def write(self, data: memoryview | bytes) -> int:
        self.data += data
        return len(data)

    def next_buffer_slice(self, size: int) -> memoryview:
        area = bytearray(size)
        self.slices.append((len(self.data), area))
        self.data += bytes(size)
        return memoryview(area)

    def tell(self) -> int:
        return len(self.data)

    def bytes(self) -> bytes:
        for offset, area in self.slices:
            self.data[offset : offset + len(area)] = area
        return bytes(self.data)


def variants() -> dict[str, torch.Tensor]:
    base = torch.randn(12, 10)
    return {
        "contiguous": base,
        "transposed": base.t(),
        "sliced": base[2:9, 3:7],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "requires_grad": torch.nn.Parameter(torch.randn(3, 3)),
        "bf16_strided": base.to(torch.bfloat16)[:, ::2],
        "fp8_transposed": base.to(torch.float8_e4m3fn).t(),
        "bool": base > 0,
        "sparse": base.relu().to_sparse(),
    }


@pytest.mark.parametrize("name", variants())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_items_are_readable_by_torch_load(name: str) -> None:
    tensor = variants()[name]
    sink = Sink()
    sink.write(b"abc")
    offset, length = write_item(sink, tensor)
    assert offset % PAYLOAD_ALIGNMENT == 0
    loaded = torch.load(io.BytesIO(sink.bytes()[offset : offset + length]), weights_only=True)
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    if tensor.layout == torch.strided:
        same = loaded.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        expected = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, expected)
    else:
        assert torch.equal(loaded.to_dense(), tensor.to_dense())
    assert length < tensor.numel() * 16 + 4096


def test_bytes_item() -> None:
    sink = Sink()
    assert write_item(sink, io.BytesIO(b"hello")) == (0, 5)
    assert write_item(sink, b"world!") == (5, 6)
    assert sink.bytes() == b"helloworld!"


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=4)))
    offsets = [draw(st.integers(0, size)) for size in shape]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return shape, offsets, lengths


@settings(max_examples=300, deadline=None)
@given(boxes(), st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex128]))
def test_any_box_of_a_saved_tensor(case: tuple[tuple[int, ...], list[int], list[int]], dtype: torch.dtype) -> None:
    """F44: the range is exact, and nothing outside it is needed."""
    shape, offsets, lengths = case
    numbers = 1
    for size in shape:
        numbers *= size
    tensor = torch.arange(numbers).reshape(shape).to(dtype)
    sink = Sink()
    sink.write(b"x" * 70)
    item_offset, item_length = write_item(sink, tensor)
    data = sink.bytes()
    assert data[item_offset:].startswith(archive_prefix(dtype, shape))
    found = payload_range(item_offset, item_length, dtype, shape, offsets, lengths)
    assert found is not None
    area = torch.tensor(list(data[found.offset : found.offset + found.length]), dtype=torch.uint8)
    expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    box = box_of(area, dtype, shape, lengths)
    assert torch.equal(box, expected)
    if is_one_run(shape, lengths):
        assert found.length == expected.numel() * tensor.element_size()


def test_another_length_is_not_templated() -> None:
    sink = Sink()
    offset, length = write_item(sink, torch.randn(3, 3))
    assert payload_range(offset, length + 1, torch.float32, (3, 3), (0, 0), (3, 3)) is None
    assert payload_range(offset, length, torch.float64, (3, 3), (0, 0), (3, 3)) is None


def test_quantized_tensors_are_read_whole() -> None:
    sink = Sink()
    offset, length = write_item(sink, torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 3, torch.quint8))
    assert payload_range(offset, length, torch.quint8, (3, 4), (0, 0), (3, 4)) is None
