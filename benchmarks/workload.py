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
    generator = torch.Generator().manual_seed(seed)
    hidden = HIDDEN
    while hidden > _MIN_LAYER and _layer_bytes(hidden) > size // 4:
        hidden //= 2
    state: dict[str, Any] = {}
    used = 0
    layer = 0
    while used + _layer_bytes(hidden) <= size * 9 // 10:
        tensors = _layer(hidden, generator)
        used += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        state.update({f"layers.{layer}.{name}": tensor for name, tensor in tensors.items()})
        layer += 1
    columns = 256
    rows = max((size - used) // (4 * columns), 1)
    state["embedding.weight"] = _filled((rows, columns), torch.float32, generator)
    state["progress"] = {"step": 100, "schedule": [0.1, 0.2, 0.3], "name": "benchmark"}
    return state


def _layer_bytes(hidden: int) -> int:
    matrix = hidden * hidden
    return 12 * matrix * 2 + 2 * 12 * matrix * 4 + 13 * hidden * 4 + 8


def _layer(hidden: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    shapes = {
        "attention.qkv": (3 * hidden, hidden),
        "attention.out": (hidden, hidden),
        "mlp.up": (4 * hidden, hidden),
        "mlp.down": (hidden, 4 * hidden),
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = _filled(shape, torch.bfloat16, generator)
        tensors[f"{name}.exp_avg"] = _filled(shape, torch.float32, generator)
        tensors[f"{name}.exp_avg_sq"] = _filled(shape, torch.float32, generator)
    for name, width in (("norm.scale", hidden), ("norm.bias", hidden), ("mlp.bias", 4 * hidden), ("bias", 7 * hidden)):
        tensors[name] = _filled((width,), torch.float32, generator)
    tensors["step"] = torch.tensor(100, dtype=torch.int64)
    return tensors


def _filled(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random bits (no two pages alike), made fast: the exponent is kept small, so no NaN among them."""
    count = 1
    for length in shape:
        count *= length
    if dtype == torch.bfloat16:
        return torch.randint(0, 0x4000, (count,), dtype=torch.int16, generator=generator).view(dtype).view(shape)
    return torch.randint(0, 0x40000000, (count,), dtype=torch.int32, generator=generator).view(dtype).view(shape)


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
