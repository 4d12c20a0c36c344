"""Accelerate: `save_state` and `load_state` of an Accelerator, into memory and back.

REPLICATOR_JOB=my-job torchrun --nproc-per-node 2 -m examples.accelerate
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator

import replicator
from examples import report
from replicator.integrations.huggingface import load_state, save_state


def main() -> None:
    options = report.options(__doc__)
    accelerator = Accelerator(cpu=True)  # also the process group
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch.manual_seed(accelerator.process_index)  # Accelerate saves the generators of every rank

    def state() -> dict[str, object]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "random": torch.get_rng_state(),
        }

    session = replicator.init()
    step = load_state(accelerator) or 0
    if step:
        report.recovered(step, state())

    while step < options.steps:
        step += 1
        inputs = torch.randn(32, 256)
        accelerator.backward((model(inputs) - inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % options.save_every == 0:
            commit = save_state(accelerator, step)

    commit.wait_protected()
    report.saved(step, state())
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
