"""Hugging Face Trainer: a callback commits what the Trainer saves, and a restart resumes from it.

REPLICATOR_JOB=my-job torchrun --nproc-per-node 2 -m examples.huggingface
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import replicator
from examples import report
from replicator.integrations.huggingface import ReplicatorCallback, resume_from


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same random text in every run."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def state_of(trainer: Trainer) -> dict[str, Any]:
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()["state"]}


class ReportRecovery(TrainerCallback):
    """Before the first step after a restart; the Trainer has loaded everything by then."""

    trainer: Trainer

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            report.recovered(state.global_step, state_of(self.trainer))


def main() -> None:
    options = report.options(__doc__)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),  # of this node; what survives it is in the memory of its buddy
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=1,
        per_device_train_batch_size=8,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    assert arguments.world_size == int(dist.get_world_size())  # the process group is there now
    session = replicator.init()
    commits, recovery = ReplicatorCallback(session), ReportRecovery()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    trainer = Trainer(model, arguments, train_dataset=Tokens(), callbacks=[commits, recovery])
    recovery.trainer = trainer
    trainer.train(resume_from_checkpoint=resume_from(arguments.output_dir, session))
    commits.last_commit.wait_protected()
    report.saved(trainer.state.global_step, state_of(trainer))
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
