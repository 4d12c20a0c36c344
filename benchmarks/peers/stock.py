"""What PyTorch itself offers on the same tmpfs: `FileSystemWriter`, `FileSystemReader`, `torch.save`.

No installation: it is the torch that the product runs with. No checksum is computed by any of these.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

from benchmarks.worker import Role
from benchmarks.workload import mixed_state, zeros_like

KEPT = 2
"""Checkpoints that are kept: the one before is removed when a new one is written, as a rotation does."""


class SaveRole(Role):
    """In a process of its own: a trainer that saves the mixed state."""

    def __init__(self, directory: str, size: int) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="replicator-peer-", dir=directory))
        self._state = mixed_state(size)
        self._step = 0

    def prepare(self) -> None:
        """Remove the oldest."""
        for old in sorted(self._root.iterdir(), key=lambda path: int(path.name))[: -(KEPT - 1)]:
            shutil.rmtree(old)

    def run(self, way: str = "dcp", threads: int = 1) -> float:
        """Seconds of one save; `way` is "dcp" or "torch.save", `threads` are FileSystemWriter's."""
        self._step += 1
        path = self._root / str(self._step)
        start = time.perf_counter()
        if way == "dcp":
            state_dict_saver.save(
                self._state, storage_writer=filesystem.FileSystemWriter(path, thread_count=threads), no_dist=True
            )
        else:
            path.mkdir()
            torch.save(self._state, path / "state.pt")
        return time.perf_counter() - start

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


class AsyncRole(SaveRole):
    """In a process of its own: a trainer that saves asynchronously, as PyTorch does by default."""

    _pending: Any = None

    def prepare(self) -> None:
        """Wait for the save before, then remove the oldest."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        super().prepare()

    def run(self, way: str = "dcp", threads: int = 1) -> float:
        """Seconds until the call returned."""
        self._step += 1
        writer = filesystem.FileSystemWriter(self._root / str(self._step), thread_count=threads)
        start = time.perf_counter()
        self._pending = state_dict_saver.async_save(self._state, storage_writer=writer, no_dist=True)
        return time.perf_counter() - start

    def close(self) -> None:
        self.prepare()
        super().close()


class LoadRole(Role):
    """In a process of its own: a trainer that loads the mixed state, saved once before."""

    def __init__(self, directory: str, size: int, way: str = "dcp") -> None:
        self._root = Path(tempfile.mkdtemp(prefix="replicator-peer-", dir=directory))
        state = mixed_state(size)
        if way == "dcp":
            state_dict_saver.save(state, storage_writer=filesystem.FileSystemWriter(self._root), no_dist=True)
        else:
            torch.save(state, self._root / "state.pt")
        self._way = way
        self._target: dict[str, Any] = zeros_like(state)

    def run(self) -> float:
        """Seconds of one load."""
        start = time.perf_counter()
        if self._way == "dcp":
            state_dict_loader.load(self._target, storage_reader=filesystem.FileSystemReader(self._root), no_dist=True)
        else:
            loaded = torch.load(self._root / "state.pt", weights_only=True)
            for key, value in loaded.items():
                if isinstance(value, torch.Tensor):
                    self._target[key].copy_(value)
        return time.perf_counter() - start

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
