"""torch_checkpointing: the framework's own manager, asynchronous, with a config that makes its saves replicated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig

import replicator
from examples import report
from replicator.integrations.torch_checkpointing import ReplicatorStorageConfig, load_latest, replicated


def main() -> None:
    options = report.options(__doc__)
    dist.init_process_group("gloo")
    with replicator.init() as session:
        storage = ReplicatorStorageConfig(session=session, wait_for="protected")
        save = AsyncCheckpointSaverConfig(process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=120))
        manager = CheckpointManager(replicated(CheckpointManager.Config(save=save), storage))

        torch.manual_seed(dist.get_rank())
        model = torch.nn.Linear(128, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        step = 0
        found = load_latest(manager, into={"model": model.state_dict(), "optimizer": None})
        if found is not None:
            step, state = found
            optimizer.load_state_dict(state["optimizer"])
            report.recovered(step, state_of(model, optimizer))

        while step < options.steps:
            step += 1
            data = torch.randn(8, 128, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
            optimizer.zero_grad()
            model(data).square().mean().backward()
            with manager.lock():  # only while an earlier step's state is still being copied
                optimizer.step()
            if step % options.save_every == 0:
                future = manager.save(f"checkpoints/step-{step}", state_of(model, optimizer))

        future.result()  # the last save is protected
        report.saved(step, state_of(model, optimizer))
        manager.close()
    dist.destroy_process_group()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


if __name__ == "__main__":
    main()
