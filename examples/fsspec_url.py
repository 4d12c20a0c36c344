"""torch.distributed.checkpoint with nothing but a URL: `replicator://my-job/step-5` through fsspec.

REPLICATOR_JOB=my-job torchrun --nproc-per-node 2 -m examples.fsspec_url
"""

from __future__ import annotations

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import replicator
from examples import report

# What a save waits for; the same as FSSPEC_REPLICATOR_WAIT_FOR=protected. Without it, for no other node.
fsspec.config.conf["replicator"] = {"wait_for": "protected"}


def main() -> None:
    options = report.options(__doc__)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, object]:
        parameters, moments = get_state_dict(model, optimizer)
        return {"model": parameters, "optimizer": moments, "step": step}

    session = replicator.init()
    url = f"replicator://{session.job}"
    step = 0
    plan = session.lookup()  # the same on all ranks
    if plan.found:
        loaded = state()
        dcp.load(loaded, checkpoint_id=f"{url}/step-{plan.step}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        step = loaded["step"]
        report.recovered(step, state())

    while step < options.steps:
        step += 1
        inputs = torch.randn(32, 256, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % options.save_every == 0:
            dcp.save(state(), checkpoint_id=f"{url}/step-{step}")

    report.saved(step, state())
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
