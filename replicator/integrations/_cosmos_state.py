"""What is under each key: the state of a model, an optimizer and so on, and how it gets back into them.

Modules and optimizers of PyTorch (or lists of them, one for each part of a pipeline) go through
`torch.distributed.checkpoint.state_dict`, so that names do not depend on wrappers and tensors may be sharded otherwise
when they are loaded. Anything else is asked for `state_dict()` and given `load_state_dict()`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from replicator.errors import ConfigError

_OPTIMIZER = StateDictOptions(flatten_optimizer_state_dict=True)


def model_state(model: Any) -> dict[str, Any]:
    """Raises ConfigError when two parts of the model have the same name in them."""
    parts = _parts(model, nn.Module)
    if parts is None:
        return dict(model.state_dict())
    return _merged("model", (get_model_state_dict(part) for part in parts))


def load_model(model: Any, state: dict[str, Any]) -> None:
    """What is not in `state` stays as it is."""
    parts = _parts(model, nn.Module)
    if parts is None:
        model.load_state_dict(state)
        return
    for part in parts:
        set_model_state_dict(part, model_state_dict=state, options=StateDictOptions(strict=False))


def optimizer_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Raises ConfigError as `model_state` does, or when there is not one optimizer for each part of the model."""
    pairs = _optimizers(model, optimizer)
    if pairs is None:
        return dict(optimizer.state_dict())
    return _merged("optim", (get_optimizer_state_dict(part, one, options=_OPTIMIZER) for part, one in pairs))


def load_optimizer(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    pairs = _optimizers(model, optimizer)
    if pairs is None:
        optimizer.load_state_dict(state)
        return
    for part, one in pairs:
        set_optimizer_state_dict(part, one, optim_state_dict=state, options=_OPTIMIZER)


def trainer_state(iteration: int, grad_scaler: Any, rank: int) -> dict[str, Any]:
    """The iteration, the gradient scaler's state, and this rank's random generators."""
    scaler = {} if grad_scaler is None else grad_scaler.state_dict()
    return {"iteration": iteration, "grad_scaler": scaler, random_key(rank): random_state()}


def random_key(rank: int) -> str:
    """Under which a rank's random generators are."""
    return f"rng_state_{rank}"


def random_state() -> dict[str, Any]:
    """Of Python, NumPy (when it is loaded), and PyTorch on the CPU and on this process's CUDA device."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """What `random_state` gave, here or in another process."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def dataloader_of(dataloader: Any, callbacks: Any) -> Any:
    """Who has the data loader's state: the one given, else the callback that says so, else None.

    Such a callback has `checkpoint_component == "dataloader"`, `has_checkpoint_state()`, `state_dict()` and
    `load_state_dict()`. `callbacks` is what the trainer has: a group with `_callbacks`, or an iterable.
    """
    if dataloader is not None:
        return dataloader
    group = getattr(callbacks, "_callbacks", callbacks)
    for one in group if isinstance(group, Iterable) else ():
        if getattr(one, "checkpoint_component", None) == "dataloader":
            return one if one.has_checkpoint_state() else None
    return None


def _parts(value: Any, kind: type[Any]) -> Sequence[Any] | None:
    """The parts of `value` when it is (a list of) what PyTorch knows."""
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    return parts if parts and all(isinstance(part, kind) for part in parts) else None


def _optimizers(model: Any, optimizer: Any) -> list[tuple[Any, Any]] | None:
    optimizers = _parts(optimizer, torch.optim.Optimizer)
    models = _parts(model, nn.Module)
    if optimizers is None or models is None:
        return None
    if len(optimizers) != len(models):
        raise ConfigError(
            f"expected one optimizer for each part of the model, found {len(optimizers)} for {len(models)} parts"
        )
    return list(zip(models, optimizers, strict=True))


def _merged(key: str, states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            if name in merged:
                raise ConfigError(f"key {key!r}: two parts of it have a {name!r}; give them different names")
            merged[name] = value
    return merged
