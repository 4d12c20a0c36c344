"""Segments whose pages are locked for CUDA: the device writes straight into them, without a buffer of the driver.

Locking costs about as much as touching the pages. So a whole mapping is registered, once, and stays so for as long as
it is kept: a segment that comes back is registered already. It is unregistered before it is unmapped.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable

import torch

MIN_BYTES = 1 << 20
"""Smaller mappings are copied into faster than they are registered."""

logger = logging.getLogger("replicator.checkpoint")


def _register(address: int, length: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, length, 0))  # type: ignore[no-untyped-call]


def _unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


class PageLocks:
    """Thread-safe. `register` and `unregister` are those of the CUDA runtime, and return its error codes."""

    def __init__(
        self,
        register: Callable[[int, int], int] = _register,
        unregister: Callable[[int], int] = _unregister,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._lock = threading.Lock()
        self._locked: set[int] = set()
        self._given_up = False

    def lock(self, piece: memoryview) -> bool:
        """Whether the mapping that `piece` is a part of is locked, which it now is where that can be done."""
        memory = piece.obj
        if not isinstance(memory, ctypes.Array) or len(memory) < MIN_BYTES:
            return False
        address, length = ctypes.addressof(memory), len(memory)
        with self._lock:
            if address in self._locked:
                return True
            if self._given_up:
                return False
            problem = self._try(address, length)
            if problem:
                self._given_up = True
                logger.warning(
                    "cannot page-lock a segment of %d bytes (%s): tensors on the device are copied through the "
                    "driver's own buffer, which is slower",
                    length,
                    problem,
                )
                return False
            self._locked.add(address)
            # Of all that happens at the end of an object, what was asked for last comes first: this precedes unmapping.
            weakref.finalize(memory, self._end, os.getpid(), address).atexit = False
            return True

    def _try(self, address: int, length: int) -> str:
        try:
            code = self._register(address, length)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"CUDA error {code}" if code else ""

    def _end(self, pid: int, address: int) -> None:
        # A forked child has neither the mapping nor the device.
        if os.getpid() != pid:
            return
        # Not under the lock: this may run wherever an object is let go. The address is in use until it is unmapped.
        self._locked.discard(address)
        try:
            code = self._unregister(address)
        except Exception as error:
            logger.warning("a segment was not unregistered from CUDA: %s: %s", type(error).__name__, error)
        else:
            if code:
                logger.warning("a segment was not unregistered from CUDA: error %d", code)


PAGE_LOCKS = PageLocks()
"""Of this process."""
