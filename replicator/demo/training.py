"""The demo's training loop: FSDP2 over gloo, on the CPU, the same bits in every run.

With `plain` nothing of Replicator is used: that is the uninterrupted reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from replicator.demo import model as small
from replicator.demo.events import Reporter
from replicator.demo.text import standard_library

PEER_LOST_S = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one rank: see the options of `train`."""

    node: str
    events: str
    out: Path
    seed: int
    steps: int
    save_every: int
    replicas: int
    plain: bool


class Job:
    """Everything that a restart must bring back: parameters, optimizer, random generators, position in the data."""

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.rank = rank
        mesh = init_device_mesh("cpu", (world_size,))
        self.model, self.optimizer = small.build(mesh, seed)
        self.windows = small.Windows(standard_library(), seed, rank)
        self.step = 0
        torch.manual_seed(seed * 1_000_003 + 500_000 + rank)

    def train_step(self) -> float:
        """One optimizer step; the loss of this rank's batch before it."""
        inputs, targets = next(self.windows)
        loss = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """As torch.distributed.checkpoint wants it. What each rank has of its own carries the rank in its name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {"random": torch.get_rng_state(), "data": self.windows.state}
        return {"model": model, "optimizer": optimizer, "step": self.step, f"rank-{self.rank}": own}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state()` gave, after it was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]
        self.windows.state = state[f"rank-{self.rank}"]["data"]
        torch.set_rng_state(state[f"rank-{self.rank}"]["random"])

    def dump(self, path: Path) -> int:
        """Write the bytes of all local shards, in the order of their names; their number."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        tensors: dict[str, torch.Tensor] = {}
        _collect("", {"model": model, "state": optimizer["state"]}, tensors)
        with open(path, "wb") as output:
            for name in sorted(tensors):
                local = tensors[name].detach().contiguous().view(-1).view(torch.uint8)
                output.write(name.encode() + b"\n" + local.numpy().tobytes())
            return output.tell()


def _collect(prefix: str, value: Any, into: dict[str, torch.Tensor]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{prefix}/{key}", item, into)
    elif isinstance(value, torch.Tensor):
        into[prefix] = value.to_local() if isinstance(value, DTensor) else value


def train(settings: Settings) -> None:
    """The job, from its start or from what it can recover, to its last step."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = Reporter(settings.events, settings.node, rank)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PEER_LOST_S))
    job = Job(settings.seed, rank, world_size)
    if settings.plain:
        report.send("started", epoch=0)
        _loop(job, settings, report, lambda: None)
    else:
        from replicator.demo.saves import Saves

        with Saves(job, settings.replicas, report) as saves:
            report.send("started", epoch=saves.epoch)
            saves.restore()
            _loop(job, settings, report, saves.save)
            saves.finish()
    report.send("finished", bytes=job.dump(settings.out / f"rank-{rank}.bin"))
    dist.destroy_process_group()


def _loop(job: Job, settings: Settings, report: Reporter, save: Callable[[], None]) -> None:
    while job.step < settings.steps:
        loss = job.train_step()
        report.send("step", step=job.step, loss=loss.hex())
        if job.step % settings.save_every == 0:
            save()
