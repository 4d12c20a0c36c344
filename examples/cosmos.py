"""A Cosmos-style trainer: `load` before the first step, `save` in the background, `finalize` at the end.

REPLICATOR_JOB=my-job torchrun --nproc-per-node 2 -m examples.cosmos
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import replicator
from examples import report
from replicator.integrations.cosmos import CheckpointConfig, DistributedCheckpointer


class Batches:
    """A data loader that says where it is, and can go on from there."""

    def __init__(self, rank: int) -> None:
        self.position = {"rank": rank, "seen": 0}

    def __next__(self) -> torch.Tensor:
        self.position["seen"] += 1
        seed = 1000 * self.position["seen"] + self.position["rank"]
        return torch.randn(32, 256, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        return dict(self.position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = dict(state)


def main() -> None:
    options = report.options(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
    batches = Batches(dist.get_rank())

    def state() -> dict[str, object]:
        parameters, moments = get_state_dict(model, optimizer)
        rest = {"scheduler": scheduler.state_dict(), "batches": batches.state_dict()}
        return {"model": parameters, "optimizer": moments, **rest, "random": torch.get_rng_state()}

    session = replicator.init()
    config = CheckpointConfig(dcp_async_mode_enabled=True)
    checkpointer = DistributedCheckpointer(config, session=session, dataloader=batches, wait_for="protected")
    iteration = checkpointer.load(model, optimizer, scheduler, grad_scaler)
    if iteration:
        report.recovered(iteration, state())

    while iteration < options.steps:
        iteration += 1
        inputs = next(batches)
        (model(inputs + 0.1 * torch.randn(32, 256)) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if iteration % options.save_every == 0:
            checkpointer.save(model, optimizer, scheduler, grad_scaler, iteration=iteration)

    checkpointer.finalize()
    report.saved(iteration, state())
    dist.barrier()
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
