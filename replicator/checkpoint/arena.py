"""Staging memory that two processes share: one copies a state into it, the other one saves from there.

The memory is an anonymous file (`memfd_create`) that the other process inherits: it has no name, so nothing is left
after a kill (F24, F25), and it is not part of `/dev/shm`, whose size does not matter (F22). Where a state has tensors
on CUDA devices it is also pinned. It is kept from save to save and grows when a state needs more.

A state travels as one pickle in which tensors are places in the memory. It is written and read by the two processes of
one rank only.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from replicator.checkpoint.items import strides_of
from replicator.checkpoint.staging import Parts
from replicator.checkpoint.template import PAYLOAD_ALIGNMENT, payload_view
from replicator.errors import StoreFullError
from replicator.native import copy_parts

_GRANULE = 2 << 20
_cuda: Any = torch.cuda


@dataclass(frozen=True, slots=True)
class Staged:
    """A state in an arena: where its pickle lies, and how large the arena is. For the other process."""

    capacity: int
    pickle_offset: int
    pickle_bytes: int


class Arena:
    """The side that stages. Not thread-safe. One state at a time: `stage` overwrites the one before (F03)."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("replicator-staging", os.MFD_CLOEXEC)
        self._capacity = 0
        self._memory: torch.Tensor | None = None
        self._is_pinned = False

    def stage(self, state: Any) -> Staged:
        """Copy all tensors of a state here; complete when this returns, also for those on other devices (F02).

        The caller knows that the other process reads nothing of the state before any more.

        Raises:
            StoreFullError: there is no memory for it.
            TypeError, AttributeError, pickle.PicklingError: a value that cannot go to another process.
        """
        placing = _Placing()
        data = placing.dump(state)
        used = placing.used
        memory = self._grown(used + len(data))
        if placing.has_cuda and not self._is_pinned:
            self._pin(memory)
        parts: Parts = [(payload_view(memory)[used : used + len(data)], memoryview(data))]
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for tensor, offset in placing.placed:
            if not tensor.numel():
                continue
            target = _at(memory, offset, tensor.dtype, tuple(tensor.shape))
            if tensor.is_cuda:
                _copy_from_device(target, tensor, streams)
            elif tensor.device.type == "cpu" and _is_plain(tensor):
                parts.append((payload_view(target), payload_view(tensor)))
            else:
                target.copy_(tensor)
        copy_parts(parts)
        for stream in streams.values():
            stream.synchronize()
        return Staged(self._capacity, used, len(data))

    def close(self) -> None:
        """Let go of the memory here; the other process keeps what it has mapped. Idempotent."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _grown(self, size: int) -> torch.Tensor:
        if self._memory is None or size > self._capacity:
            self._unmap()
            capacity = -(-size // _GRANULE) * _GRANULE
            try:
                # Room is made here: a copy into memory that cannot be had would end the process with SIGBUS.
                os.posix_fallocate(self.fd, 0, capacity)
                mapped = mmap.mmap(self.fd, capacity, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            except (OSError, ValueError) as error:
                raise StoreFullError(
                    f"expected {capacity} bytes of host memory to stage a checkpoint in, beside the state itself, "
                    f"found {error}; save synchronously, or give the job more memory"
                ) from None
            self._capacity = capacity
            self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._memory

    def _pin(self, memory: torch.Tensor) -> None:
        code = _cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        # Without it the copies are slower, and as good.
        self._is_pinned = int(code) == 0

    def _unmap(self) -> None:
        if self._is_pinned and self._memory is not None:
            _cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._is_pinned = False
        self._memory = None


def can_be_staged(state: Any) -> bool:
    """Whether all of a state can go to another process."""
    try:
        _Placing().dump(state)
    except Exception:
        return False
    return True


class ArenaReader:
    """The side that saves from an arena, in the other process. Not thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = torch.empty(0, dtype=torch.uint8)

    def load(self, staged: Staged) -> Any:
        """The state, on the CPU, in place: its tensors are what is in the arena, until the next state is staged."""
        if self._memory.numel() != staged.capacity:
            self._memory = torch.frombuffer(mmap.mmap(self._fd, staged.capacity), dtype=torch.uint8)
        end = staged.pickle_offset + staged.pickle_bytes
        data = payload_view(self._memory)[staged.pickle_offset : end]
        return _Unpickler(io.BytesIO(data), self._memory).load()


class _Placing(pickle.Pickler):
    """Pickles a state with places instead of tensors; `placed` says which tensor belongs to which offset."""

    def __init__(self) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.placed: list[tuple[torch.Tensor, int]] = []
        self.used = 0
        self.has_cuda = False
        self._known: dict[int, tuple[Any, ...]] = {}

    def dump(self, state: Any) -> bytes:  # type: ignore[override]
        super().dump(state)
        return self._stream.getvalue()

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.is_meta or value.is_nested:
            return None
        if id(value) not in self._known:
            tensor = value.detach()
            offset = -(-self.used // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
            self.used = offset + tensor.numel() * tensor.element_size()
            self.has_cuda = self.has_cuda or tensor.is_cuda
            # The value itself is kept too: its id must not become that of another one.
            self.placed.append((value.detach(), offset))
            self._known[id(value)] = (offset, value.dtype, tuple(value.shape), value)
        return self._known[id(value)][:3]

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            # Its own way needs the mesh's device in the other process, too.
            return _dtensor, (value.to_local().detach(), value._spec)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: torch.Tensor) -> None:
        super().__init__(stream)
        self._memory = memory

    def persistent_load(self, place: Any) -> torch.Tensor:
        offset, dtype, shape = place
        return _at(self._memory, offset, dtype, shape)


def _dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    make: Callable[..., DTensor] = DTensor
    return make(local, spec, requires_grad=False)


def _at(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(memory.untyped_storage(), offset // empty.element_size(), shape, strides_of(shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy_from_device(
    target: torch.Tensor, tensor: torch.Tensor, streams: dict[torch.device, torch.cuda.Stream]
) -> None:
    """On a stream of its own for each device, after everything that was asked of the device so far."""
    if tensor.device not in streams:
        streams[tensor.device] = _cuda.Stream(tensor.device)
        streams[tensor.device].wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(streams[tensor.device]):
        target.copy_(tensor, non_blocking=True)
