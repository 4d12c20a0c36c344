"""The state that is saved and loaded: tensors of mixed sizes and types, as a transformer and its optimizer have.

Imported only in processes that play a trainer; everything else here runs without torch.
"""

from __future__ import annotations

from typing import Any

import torch

HIDDEN = 1024
_MIN_LAYER = 64


def mixed_state(size: int, seed: int = 0) -> dict[str, Any]:
    """A state dict whose tensors have `size` bytes together, give or take 1%; deterministic.

    Per layer: bfloat16 weights of several shapes, their float32 optimizer moments, vectors, and a step counter. The
    rest of `size` is one large embedding.
    """
    bits = RandomBits(seed)
    hidden = HIDDEN
    while hidden > _MIN_LAYER and _layer_bytes(hidden) > size // 4:
        hidden //= 2
    state: dict[str, Any] = {}
    used = 0
    layer = 0
    while used + _layer_bytes(hidden) <= size * 9 // 10:
        tensors = _layer(hidden, bits)
        used += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        state.update({f"layers.{layer}.{name}": tensor for name, tensor in tensors.items()})
        layer += 1
    columns = 256
    rows = max((size - used) // (4 * columns), 1)
    state["embedding.weight"] = bits.tensor((rows, columns), torch.float32)
    state["progress"] = {"step": 100, "schedule": [0.1, 0.2, 0.3], "name": "benchmark"}
    return state


def _layer_bytes(hidden: int) -> int:
    matrix = hidden * hidden
    return 12 * matrix * 2 + 2 * 12 * matrix * 4 + 13 * hidden * 4 + 8


def _layer(hidden: int, bits: RandomBits) -> dict[str, torch.Tensor]:
    shapes = {
        "attention.qkv": (3 * hidden, hidden),
        "attention.out": (hidden, hidden),
        "mlp.up": (4 * hidden, hidden),
        "mlp.down": (hidden, 4 * hidden),
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = bits.tensor(shape, torch.bfloat16)
        tensors[f"{name}.exp_avg"] = bits.tensor(shape, torch.float32)
        tensors[f"{name}.exp_avg_sq"] = bits.tensor(shape, torch.float32)
    for name, width in (("norm.scale", hidden), ("norm.bias", hidden), ("mlp.bias", 4 * hidden), ("bias", 7 * hidden)):
        tensors[name] = bits.tensor((width,), torch.float32)
    tensors["step"] = torch.tensor(100, dtype=torch.int64)
    return tensors


class RandomBits:
    """Tensors of random bits, made fast: pieces of one pool, each from another place of it."""

    POOL = 4 << 20
    STRIDE = 7919

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # The exponent is kept small in every 16 bits: no NaN in any floating type.
        low = torch.randint(0, 0x4000, (2 * self.POOL,), dtype=torch.int16, generator=generator)
        self._pool = low.view(torch.int32)
        self._place = 0

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, of a dtype with 2 or 4 bytes, an even number of bytes in all."""
        result = torch.empty(shape, dtype=dtype)
        flat = result.view(-1).view(torch.int16)
        words = self._pool.view(torch.int16)
        done = 0
        while done < len(flat):
            self._place = (self._place + 2 * self.STRIDE) % len(words)
            count = min(len(flat) - done, len(words) - self._place)
            flat[done : done + count] = words[self._place : self._place + count]
            done += count
        return result


def state_bytes(state: dict[str, Any]) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, torch.Tensor))


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict to load into: same shapes, every page touched."""
    return {k: torch.zeros_like(v).fill_(0) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Keys whose tensors or values differ, bit by bit."""
    return [
        key
        for key, value in left.items()
        if not (
            torch.equal(_bits(value), _bits(right[key])) if isinstance(value, torch.Tensor) else value == right[key]
        )
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor
