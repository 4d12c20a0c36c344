"""The Trainer and Accelerate themselves, on the CPU: what they save is committed, and they go on from it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from job_support import nodes, run_job

import replicator
from replicator.client.session import Session
from replicator.errors import NoRecoverableCheckpointError, StaleEpochError
from replicator.integrations.huggingface import ReplicatorCallback, load_state, resume_from, save_state

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(16, 16)
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.dropout(self.layer(inputs)) - labels).square().mean()}


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(16, generator=generator) for name in ("inputs", "labels")} for _ in range(64)]


def train(directory: Path, steps: int, callbacks: list[Any], resume: str | None = None, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        lr_scheduler_type="constant",  # a linear one would look at the number of steps
        **settings,
    )
    torch.manual_seed(3)
    trainer = transformers.Trainer(Regression(), arguments, train_dataset=rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == steps
    return trainer


def bits(trainer: Any) -> list[bytes]:
    moments = trainer.optimizer.state_dict()["state"]
    tensors = [*trainer.model.state_dict().values(), *(value for one in moments.values() for value in one.values())]
    return [tensor.detach().contiguous().numpy().tobytes() for tensor in tensors]


def test_the_trainer_goes_on_bit_for_bit(session: Session, tmp_path: Path) -> None:
    """F07: model, optimizer, scheduler, random generators and the position in the data are of one step."""
    whole = train(tmp_path / "whole", 8, [])
    here = tmp_path / "here"
    assert resume_from(here, session) is None
    commits = ReplicatorCallback(session)
    train(here, 4, [commits], save_total_limit=1)
    assert commits.last_error is None
    assert commits.last_commit is not None
    commits.last_commit.wait_protected(10)
    shutil.rmtree(here)  # the disk goes with the node
    path = resume_from(here, session)
    assert path == str(here / "checkpoint-4")
    assert json.loads((here / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    again = train(here, 8, [commits], path)
    assert bits(again) == bits(whole)
    assert session.lookup().step == 8


def test_what_is_on_disk_counts(session: Session, tmp_path: Path) -> None:
    """F12: a newer complete checkpoint on disk is taken, an incomplete one is not, and other content is replaced."""
    commits = ReplicatorCallback(session)
    train(tmp_path, 4, [commits])
    assert commits.last_commit is not None
    commits.last_commit.wait_protected(10)
    newest = tmp_path / "checkpoint-4"
    unchanged = newest.stat().st_ino
    assert resume_from(tmp_path, session) == str(newest)
    assert newest.stat().st_ino == unchanged, "it lies there already"
    before = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoint-6").mkdir()
    assert resume_from(tmp_path, session) == str(newest)
    assert (newest / "model.safetensors").read_bytes() == before
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text("{}")
    assert resume_from(tmp_path, session) == str(tmp_path / "checkpoint-6")


def test_a_commit_that_fails_does_not_stop_the_training(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F40: it is told, and the next one works; a newer incarnation ends the job (F11)."""
    commits = ReplicatorCallback(session)

    class Spoil(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                (tmp_path / "checkpoint-2" / "no name?").touch()
            else:
                assert commits.last_error is not None
                assert "no name?" in str(commits.last_error)

    train(tmp_path, 4, [Spoil(), commits])
    assert commits.last_error is None
    assert commits.last_commit is not None
    commits.last_commit.wait_protected(10)
    with pytest.raises(NoRecoverableCheckpointError):
        session.lookup(2).require()
    assert session.lookup().step == 4
    with (
        replicator.init(session.job, root=session.agent.root, deadline_s=session.deadline_s),
        pytest.raises(StaleEpochError),
    ):
        train(tmp_path / "old", 2, [commits])


def accelerated() -> dict[str, Any]:
    """On each of two ranks: save, change everything, load."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    torch.manual_seed(accelerator.process_index)
    session = replicator.init()
    told: dict[str, Any] = {"nothing": load_state(accelerator)}

    def step() -> None:
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def bits() -> list[bytes]:
        moments = [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
        return [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *moments, torch.get_rng_state())]

    step()
    commit = save_state(accelerator, 1)
    saved = bits()
    commit.wait_protected(20)
    told["objects"] = commit.objects
    step()
    told["changed"] = bits() != saved
    told["step"] = load_state(accelerator)
    told["equal"] = bits() == saved
    session.close()
    return told


def trained(scratch: Path) -> list[Any]:
    """The Trainer on each of two ranks, which writes the files of the job on both, and what each goes on from."""
    rank = int(os.environ["RANK"])
    session = replicator.init()
    commits = ReplicatorCallback(session)
    train(scratch / f"each-{rank}", 2, [commits], save_on_each_node=True)
    assert commits.last_error is None, commits.last_error
    assert commits.last_commit is not None
    commits.last_commit.wait_protected(20)
    written = json.loads((scratch / f"each-{rank}" / "checkpoint-2" / "trainer_state.json").read_text())
    assert written["is_world_process_zero"] == (rank == 0), "the nodes' files differ"
    path = resume_from(scratch / f"again-{rank}", session)
    trainer = train(scratch / f"again-{rank}", 4, [commits], path, save_on_each_node=True)
    session.close()
    return [path, trainer.state.is_world_process_zero, commits.last_error]


def accelerated_and_trained(scratch: Path) -> dict[str, Any]:
    return {"accelerated": accelerated(), "trained": trained(scratch)}


def content(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_two_ranks(shm_root: Path, tmp_path: Path) -> None:
    """F07, F10: also what each rank has of its own, its random generators, and what both write for the whole job."""
    with nodes(shm_root, 2) as made:
        told = run_job(made, accelerated_and_trained, tmp_path)
    for rank, one in enumerate(told):
        assert one["trained"] == [str(tmp_path / f"again-{rank}" / "checkpoint-2"), rank == 0, None]
        assert one["accelerated"] == {"nothing": None, "objects": 4, "changed": True, "step": 1, "equal": True}
    files = [content(tmp_path / f"again-{rank}" / "checkpoint-2") for rank in (0, 1)]
    assert files[0] == files[1]
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"} < files[0].keys()
    for name, data in content(tmp_path / "each-0" / "checkpoint-2").items():
        assert files[0][name] == data
