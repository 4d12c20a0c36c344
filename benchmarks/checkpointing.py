"""A real training process that saves and loads a state dict through `torch.distributed.checkpoint`."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.trainer import DEADLINE_S, TrainerRole
from benchmarks.worker import Role
from benchmarks.workload import differing, mixed_state, state_bytes, zeros_like
from replicator.checkpoint.reader import ReplicatedStorageReader
from replicator.checkpoint.writer import ReplicatedStorageWriter
from replicator.client.plan import Plan


class TimedWriter(ReplicatedStorageWriter):
    """Tells how long this rank's tensors took to become sealed objects: the save without PyTorch's planning."""

    sealed_s = 0.0

    def write_data(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        future = super().write_data(*arguments, **named)
        future.wait()
        self.sealed_s = time.perf_counter() - start
        return future


class SaveRole(TrainerRole):
    """Saves the mixed state of `size` bytes with `dcp.save`."""

    def __init__(self, size: int, threads: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._state = mixed_state(size)
        self._writer = TimedWriter(self.session, thread_count=threads)
        self.bytes = state_bytes(self._state)

    def prepare(self) -> None:
        """Wait until the last save is protected, so that nothing goes on in the background."""
        if self._writer.protected_future is not None:
            self._writer.protected_future.result(DEADLINE_S)

    def run(self) -> dict[str, float]:
        """Seconds of `dcp.save`, and of the part between tensors and sealed objects."""
        self.step += 1
        start = time.perf_counter()
        save(self._state, checkpoint_id=str(self.step), storage_writer=self._writer, no_dist=True)
        return {"total": time.perf_counter() - start, "sealed": self._writer.sealed_s}


class AsyncRole(SaveRole):
    """Saves with `dcp.async_save`, which blocks the training for as long as the state is being copied."""

    _pending: Future[Any] | Any = None

    def prepare(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        super().prepare()

    def run(self) -> dict[str, float]:
        """Seconds until the call returned."""
        self.step += 1
        start = time.perf_counter()
        self._pending = async_save(self._state, checkpoint_id=str(self.step), storage_writer=self._writer, no_dist=True)
        return {"total": time.perf_counter() - start}

    def close(self) -> None:
        self.prepare()
        super().close()


class CopyRole(Role):
    """Copies the mixed state once, into tensors that are there: what an asynchronous save cannot avoid."""

    def __init__(self, size: int) -> None:
        self._state = mixed_state(size)
        self._copy = zeros_like(self._state)

    def run(self) -> float:
        """Seconds of one copy."""
        start = time.perf_counter()
        for key, value in self._state.items():
            if isinstance(value, torch.Tensor):
                self._copy[key].copy_(value)
        return time.perf_counter() - start


class TimedReader(ReplicatedStorageReader):
    """Tells how long the bytes took from the store into the tensors: the load without lookup and planning."""

    read_s = 0.0

    def read_data(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        future = super().read_data(*arguments, **named)
        future.wait()
        self.read_s = time.perf_counter() - start
        return future


class RestoreRole(TrainerRole):
    """Loads the mixed state on a node that has nothing of it."""

    def __init__(self, size: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._target = zeros_like(mixed_state(size))
        self._plan: Plan | None = None

    def plan(self) -> None:
        """Look up the newest step, after all of the last one is here: nothing goes on in the background."""
        if self._plan is not None:
            self.session.replication.sync_bulk_retrieve(self._plan)
        self._plan = self.session.lookup()
        self._plan.require()

    def run(self, retrieve: bool) -> float:
        """Seconds of `dcp.load`; with `retrieve` of bringing all objects into this node's store before it."""
        assert self._plan is not None
        reader = ReplicatedStorageReader(self.session, plan=self._plan)
        start = time.perf_counter()
        if retrieve:
            self.session.replication.sync_bulk_retrieve(self._plan)
        load(self._target, storage_reader=reader, no_dist=True)
        elapsed = time.perf_counter() - start
        if bool(reader.pulled) == retrieve:
            raise RuntimeError(f"expected the load to bring {'nothing' if retrieve else 'it all'} from other nodes")
        return elapsed


class LoadRole(TrainerRole):
    """Loads the mixed state, saved once before into this node's store, into tensors that are there."""

    def __init__(self, size: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        state = mixed_state(size)
        writer = ReplicatedStorageWriter(self.session, wait_for="commit")
        save(state, checkpoint_id="1", storage_writer=writer, no_dist=True)
        self._reader = TimedReader(self.session, 1)
        self._target = zeros_like(state)
        self.run()
        wrong = differing(state, self._target)
        if wrong:
            raise RuntimeError(f"expected what was saved to be loaded, {len(wrong)} tensors differ: {wrong[0]}")

    def run(self) -> dict[str, float]:
        """Seconds of `dcp.load`, and of the part between store and tensors; checksums included."""
        start = time.perf_counter()
        load(self._target, storage_reader=self._reader, no_dist=True)
        return {"total": time.perf_counter() - start, "read": self._reader.read_s}
