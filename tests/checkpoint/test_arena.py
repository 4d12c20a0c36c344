"""A state is the same in the other process, bit for bit, whatever its tensors are, and stays what it was."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from replicator.checkpoint.arena import Arena, ArenaReader
from replicator.errors import StoreFullError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.complex32),
]


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.rand(shape) * 100).to(torch.complex64 if dtype == torch.complex32 else dtype).to(dtype)


@pytest.fixture
def arena() -> Any:
    made = Arena()
    yield made
    made.close()


def test_every_kind_of_value_comes_out_as_it_went_in(arena: Arena) -> None:
    """F36."""
    base = some(torch.float32, 40, 30)
    shared = some(torch.float32, 7)
    state: dict[str, Any] = {
        "dtypes": [some(dtype, 5, 3) for dtype in DTYPES],
        "views": [base.t(), base[3:7, ::2], base[0, 0], torch.arange(3.0).expand(4, 3), torch.empty(0, 4)],
        "conjugate": some(torch.complex64, 6).conj(),
        "negative": some(torch.complex64, 6).conj().imag,
        "parameter": torch.nn.Parameter(some(torch.float32, 3)),
        "sparse": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,)),
        "quantized": torch.quantize_per_tensor(torch.rand(8), 0.1, 3, torch.qint8),
        "tied": (shared, shared),
        "plain": {"step": 5, "words": ["a", None, (1.5, b"x")]},
    }
    loaded = ArenaReader(arena.fd).load(arena.stage(state))
    for key in ("dtypes", "views"):
        for found, wanted in zip(loaded[key], state[key], strict=True):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert bits(found) == bits(wanted)
    for key in ("conjugate", "negative"):
        assert torch.equal(loaded[key], state[key].resolve_conj().resolve_neg())
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert torch.equal(loaded["parameter"], state["parameter"])
    assert torch.equal(loaded["sparse"].to_dense(), state["sparse"].to_dense())
    assert torch.equal(loaded["quantized"].int_repr(), state["quantized"].int_repr())
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
    assert loaded["plain"] == state["plain"]


def test_what_is_staged_does_not_change_with_the_training(arena: Arena) -> None:
    """F02, F03: later steps write elsewhere, a larger state gets more memory, and a smaller one uses it again."""
    reader = ArenaReader(arena.fd)
    weights = torch.zeros(1000)
    staged = arena.stage({"weights": weights})
    weights += 1
    assert torch.equal(reader.load(staged)["weights"], torch.zeros(1000))
    larger = arena.stage({"weights": torch.ones(1 << 20)})
    assert larger.capacity > staged.capacity
    assert torch.equal(reader.load(larger)["weights"], torch.ones(1 << 20))
    again = arena.stage({"weights": weights})
    assert again.capacity == larger.capacity
    assert torch.equal(reader.load(again)["weights"], weights)


def test_no_memory_is_said_with_numbers(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """F22. The next state that fits is staged."""

    def refuse(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        with pytest.raises(StoreFullError, match=r"4194304 bytes of host memory"):
            arena.stage({"weights": torch.zeros(3 << 18)})
    assert torch.equal(ArenaReader(arena.fd).load(arena.stage({"a": torch.ones(3)}))["a"], torch.ones(3))


def test_a_value_that_cannot_travel_is_refused(arena: Arena) -> None:
    with pytest.raises((TypeError, AttributeError)):
        arena.stage({"hook": lambda: None})
