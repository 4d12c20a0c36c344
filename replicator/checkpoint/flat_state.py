"""Staging of a flattened state dict, and of buckets that were prepared from it before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from replicator.checkpoint.buckets import ObjectWriteBucket
from replicator.checkpoint.items import saved_bytes
from replicator.checkpoint.staging import Stager, placed_like
from replicator.checkpoint.template import is_templated, template_of
from replicator.errors import ConfigError, UnsupportedError


def stage_flat(
    stager: Stager,
    state_dict: Mapping[str, Any],
    buckets: Iterable[ObjectWriteBucket],
    *,
    non_blocking: bool,
    copy_cpu: bool,
) -> dict[str, Any]:
    """The state with copies of its tensors; the buckets hold such copies afterwards, too. Complete when it returns.

    Raises:
        ConfigError: the state is not flattened; with the key.
        UnsupportedError: a tensor that cannot be saved; with the key.
    """
    _check_flat(state_dict)
    wanted: dict[Any, tuple[str, torch.Tensor]] = {}

    def want(key: str, tensor: torch.Tensor) -> None:
        with _naming(key, tensor):
            if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
                raise UnsupportedError("its ranks hold parts of a sum; give it a placement without Partial first")
            local = _local(tensor)
            _check_kind(local)
            if copy_cpu or local.device.type != "cpu":
                wanted.setdefault(_place(tensor, local), (key, local))

    tensors = {key: value for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
    for key, tensor in tensors.items():
        want(key, tensor)
    kept = list(buckets)
    for bucket in kept:
        for index, (item, tensor) in enumerate(bucket.tensor_data):
            if not bucket.owns(index):
                want(item.index.fqn, tensor)
    copies = _copies(stager, wanted, non_blocking)

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        local = _local(tensor)
        copied = copies.get(_place(tensor, local), local)
        return placed_like(tensor, copied) if isinstance(tensor, DTensor) else copied

    for bucket in kept:
        bucket.stage(copy_of)
    return {key: copy_of(value) if key in tensors else value for key, value in state_dict.items()}


def _copies(stager: Stager, wanted: Mapping[Any, tuple[str, torch.Tensor]], non_blocking: bool) -> dict[Any, Any]:
    """Those of kinds that may refuse to be copied one by one, so that the error has the key."""
    plain = {place: tensor for place, (_, tensor) in wanted.items() if is_templated(tensor)}
    copies = stager.stage(plain, non_blocking=non_blocking)
    for place, (key, tensor) in wanted.items():
        if place in copies:
            continue
        with _naming(key, tensor):
            copies[place] = Stager().stage({key: tensor})[key]
    return copies


@contextmanager
def _naming(key: str, tensor: torch.Tensor) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(f"key {key!r}: a {type(tensor).__name__} that cannot be saved: {reason}") from error


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _place(tensor: torch.Tensor, local: torch.Tensor) -> Any:
    """The same for tensors that are the same elements in the same memory."""
    if not is_templated(local):
        return id(tensor)
    return (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride())


def _check_flat(state_dict: Mapping[str, Any]) -> None:
    if not isinstance(state_dict, Mapping):
        raise ConfigError(f"expected a state dict, text to tensors and values, found {type(state_dict).__name__}")
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise ConfigError(f"expected keys that are text in the state dict, found {key!r}")
        inner = _tensor_in(value, key) if isinstance(value, Mapping | list | tuple) else ""
        if inner:
            raise ConfigError(
                f"key {key!r}: expected a flattened state dict, found a tensor at {inner}; use "
                "torch.distributed.checkpoint._nested_dict.flatten_state_dict first"
            )


def _tensor_in(value: Any, path: str) -> str:
    """Where the first tensor in it is; empty when it has none."""
    if isinstance(value, torch.Tensor):
        return path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return next((found for key, item in items if (found := _tensor_in(item, f"{path}[{key!r}]"))), "")


def _check_kind(tensor: torch.Tensor) -> None:
    """Refuse now what could not be saved, or not be loaded, later."""
    if tensor.is_meta:
        raise UnsupportedError("it is on the meta device, and has no data")
    if not is_templated(tensor):
        saved_bytes(tensor)
        return
    try:
        template_of(tensor.dtype, ())
        # Planners ask for it, and know no raw bits.
        torch._utils._element_size(tensor.dtype)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UnsupportedError(f"PyTorch does not save {tensor.dtype}: {error}") from error
