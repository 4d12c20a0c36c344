"""A training job of two ranks under torchrun that crashes once. Run by test_torchrun.py. Argument: where to log."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter


def main() -> None:
    dist.init_process_group("gloo")
    session = replicator.init()
    plan = session.lookup()
    state = {"weights": torch.zeros(1000), "step": 0}
    if plan.found:
        dcp.load(state, storage_reader=ReplicatedStorageReader(session, plan=plan))
    started_at = state["step"]
    for step in range(started_at + 1, 5):
        state["weights"] += step
        state["step"] = step
        dcp.save(
            state, checkpoint_id=f"step-{step}", storage_writer=ReplicatedStorageWriter(session, wait_for="commit")
        )
        if step == 2 and not plan.found and dist.get_rank() == 1:
            os._exit(13)
    if dist.get_rank() == 0:
        with open(Path(sys.argv[1]), "a") as log:
            log.write(f"{session.job} {session.epoch} {started_at} {state['weights'][0].item()}\n")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
