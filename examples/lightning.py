"""PyTorch Lightning: a CheckpointIO plugin, under AsyncCheckpointIO so that training goes on meanwhile.

REPLICATOR_JOB=my-job torchrun --nproc-per-node 2 -m examples.lightning
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

import replicator
from examples import report
from replicator.integrations.lightning import ReplicatorCheckpointIO


class Model(pl.LightningModule):
    """A small autoencoder; it keeps the last checkpoint that was saved or loaded, to be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.layers(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def state(self) -> dict[str, Any]:
        return {"model": self.state_dict(), "optimizer": self.trainer.optimizers[0].state_dict()["state"]}

    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is not None:
            report.recovered(self.trainer.global_step, self.state())


def main() -> None:
    options = report.options(__doc__)
    dist.init_process_group("gloo")  # Lightning finds it there
    session = replicator.init()  # on every rank, although only rank 0 will save
    pl.seed_everything(0)
    model = Model()
    data = DataLoader(TensorDataset(torch.randn(512, 256)), batch_size=32)
    memory = ReplicatorCheckpointIO(session)
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=ranks_here,
        num_nodes=dist.get_world_size() // ranks_here,
        max_steps=options.steps,
        plugins=[AsyncCheckpointIO(memory)],
        callbacks=[ModelCheckpoint(tempfile.mkdtemp(), every_n_train_steps=options.save_every)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, ckpt_path=memory.resume_path())
    memory.wait_protected()
    report.saved(trainer.global_step, model.state())
    dist.barrier()
    session.close()


if __name__ == "__main__":
    main()
