"""Staging for `dcp.async_save`: a copy of the state that training can go on from at once.

PyTorch's own stager makes new memory for every save, and faulting it in takes as long as the copy. Here the memory of a
save is used again by the next one, as soon as nobody has a tensor in it any more, and several threads share the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from replicator.checkpoint.items import strides_of
from replicator.checkpoint.template import is_templated, payload_view
from replicator.native import copy_parts

Parts = list[tuple[memoryview | None, memoryview]]

# A storage that nothing but its owner here refers to.
_FREE = 1


class Stager:
    """Copies state dicts to host memory. Not thread-safe.

    Tensors on the CPU and on other devices become CPU tensors, `DTensor`s keep their placement. Mappings, lists and
    tuples are gone through, other values are copied with `copy.deepcopy`. What was staged stays what it was until its
    last tensor is gone (F02, F03).
    """

    def __init__(self) -> None:
        self._kept: list[torch.UntypedStorage] = []
        self._copying: set[torch.device] | None = None

    def stage(self, state_dict: Mapping[str, Any], *, non_blocking: bool = False) -> dict[str, Any]:
        """A copy of the state dict, complete when this returns.

        Args:
            non_blocking: let the copies from a device run side by side, and wait for them at the end.

        Raises:
            RuntimeError: there is no memory for it.
        """
        free: dict[int, list[torch.UntypedStorage]] = {}
        for storage in self._kept:
            # What was handed to another process may be read there, whoever refers to it here.
            if _users(storage) == _FREE and not storage.is_shared():
                free.setdefault(storage.nbytes(), []).append(storage)
        # What this state does not need is let go; what an unfinished save has stays with that save.
        self._kept = []
        parts: Parts = []
        self._copying = set() if non_blocking else None
        try:
            staged = {key: self._copy(value, free, parts) for key, value in state_dict.items()}
            if parts:
                copy_parts(parts)
        finally:
            # Also when a copy raised: the memory of those under way must not serve again before they have ended.
            copying, self._copying = self._copying, None
            for device in copying or ():
                torch.get_device_module(device).synchronize(device)
        return staged

    def clear(self) -> None:
        """Keep no memory."""
        self._kept = []

    def _copy(self, value: Any, free: dict[int, list[torch.UntypedStorage]], parts: Parts) -> Any:
        if isinstance(value, DTensor):
            return placed_like(value, self._copy(value.to_local().detach(), free, parts))
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value.detach(), free, parts)
        if isinstance(value, Mapping):
            # Modules give their state as an OrderedDict; what is in it counts, not what it is.
            return {key: self._copy(item, free, parts) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, free, parts) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(self._copy(item, free, parts) for item in value)
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor, free: dict[int, list[torch.UntypedStorage]], parts: Parts) -> Any:
        if type(tensor) is not torch.Tensor or tensor.is_quantized:
            return copy.deepcopy(tensor.cpu())
        if tensor.layout != torch.strided:
            # Compressed sparse tensors have no storage that a deep copy could go into.
            return tensor.cpu().clone()
        if not tensor.numel() or tensor.device.type == "meta":
            return tensor.clone()
        size = tensor.numel() * tensor.element_size()
        spare = free.get(size)
        storage = spare.pop() if spare else torch.empty(size, dtype=torch.uint8).untyped_storage()
        self._kept.append(storage)
        target = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, strides_of(tensor.shape))
        if tensor.device.type == "cpu" and tensor.is_contiguous() and is_templated(tensor):
            parts.append((payload_view(target), payload_view(tensor)))
        else:
            self._copy_other(target, tensor)
        return target

    def _copy_other(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """From a device, or with other strides."""
        if self._copying is None or tensor.device.type == "cpu":
            target.copy_(tensor)
            return
        self._copying.add(tensor.device)
        target.copy_(tensor, non_blocking=True)


def placed_like(value: DTensor, local: torch.Tensor) -> DTensor:
    """Another DTensor of the same shape and placement, with another local tensor, which stays where it is."""
    # `from_local` would move it to the mesh's device.
    made: DTensor = DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def _users(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects refer to the memory."""
    return int(torch._C._storage_Use_Count(storage._cdata))
