"""Files of one's own, written with torch.save or by any other program: `commit_dir` makes a checkpoint of a directory.

REPLICATOR_JOB=my-job torchrun --nproc-per-node 2 -m examples.commit_dir
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import replicator
from examples import report
from replicator.errors import NoRecoverableCheckpointError


def main() -> None:
    options = report.options(__doc__)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noise = torch.Generator().manual_seed(rank)  # each rank's own
    scratch = Path(tempfile.mkdtemp())
    step = 0

    session = replicator.init()
    try:
        found = replicator.restore_dir(scratch / "found")
    except NoRecoverableCheckpointError:
        pass
    else:
        step = found.version.container.step
        shared = torch.load(found.path / "model.pt")
        own = torch.load(found.path / f"rank-{rank}" / "noise.pt")
        model.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        noise.set_state(own)
        report.recovered(step, [shared, own])

    while step < options.steps:
        step += 1
        inputs = torch.randn(32, 256, generator=noise)
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % options.save_every == 0:
            shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            own = noise.get_state()
            directory = scratch / f"step-{step}"
            (directory / f"rank-{rank}").mkdir(parents=True)
            torch.save(own, directory / f"rank-{rank}" / "noise.pt")
            if rank == 0:  # the same on all ranks
                torch.save(shared, directory / "model.pt")
            commit = replicator.commit_dir(directory, session.job, step)
            shutil.rmtree(directory)  # its bytes are in memory now

    commit.wait_protected()
    report.saved(step, [shared, own])
    session.close()
    shutil.rmtree(scratch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
