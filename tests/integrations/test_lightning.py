"""Lightning's own Trainer saves into memory, and goes on from there bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from job_support import Node, run_job

import replicator
from replicator.client.session import Session
from replicator.errors import ConfigError, NoRecoverableCheckpointError, NotFoundError, ReplicatorError
from replicator.integrations.lightning import ReplicatorCheckpointIO, _object_name

pl = pytest.importorskip("pytorch_lightning")
from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: E402
from pytorch_lightning.plugins.io import AsyncCheckpointIO  # noqa: E402

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(64, 64)
        self.note = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.layer(batch[0]) * self.note.float().sum() - batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def bits(self) -> list[bytes]:
        moments = self.trainer.optimizers[0].state_dict()["state"]
        tensors = [*self.state_dict().values(), *(value for one in moments.values() for value in one.values())]
        return [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


class Data:
    """Batches whose position Lightning saves and restores."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while True:
            self.position += 1
            yield [torch.randn(4, 64, generator=torch.Generator().manual_seed(self.position))]

    def __len__(self) -> int:
        return 1000  # of those without, Lightning takes one batch too many

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train(steps: int, plugin: Any, directory: Path, ckpt_path: str | None = None, **keeps: Any) -> Model:
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        plugins=[plugin],
        callbacks=[ModelCheckpoint(directory, every_n_train_steps=2, **keeps)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Data(), ckpt_path=ckpt_path)
    assert trainer.global_step == steps
    return model


def test_training_goes_on_bit_for_bit(session: Session, tmp_path: Path) -> None:
    """F07: one object has the model, the optimizer and the position in the data."""
    uninterrupted = train(8, ReplicatorCheckpointIO(session), tmp_path)
    with replicator.init(f"{session.job}-2", root=session.agent.root, deadline_s=session.deadline_s) as other:
        plugin = ReplicatorCheckpointIO(other)
        assert plugin.resume_path() is None
        first = train(4, AsyncCheckpointIO(plugin), tmp_path)
        plugin.wait_protected(10)
        path = plugin.resume_path()
        assert path == f"replicator://{other.job}/step-4_ckpt"
        loaded = plugin.load_checkpoint(path)
        assert loaded["global_step"] == 4
        assert torch.equal(loaded["state_dict"]["note"], first.state_dict()["note"])
        again = train(8, AsyncCheckpointIO(plugin), tmp_path, ckpt_path=path)
        assert again.bits() == uninterrupted.bits()
        assert first.bits() != again.bits()
        assert list(tmp_path.iterdir()) == [], "nothing was written to disk"
        (only,) = other.lookup().sources
        assert only.name.endswith("step=8.ckpt")


def test_some_checkpoints_are_files_too(session: Session, tmp_path: Path) -> None:
    """Lightning removes those that it does not keep; what was saved can be named by its path."""
    plugin = ReplicatorCheckpointIO(session, durable_every=4)
    train(8, plugin, tmp_path, save_top_k=-1)
    paths = {int(path.stem.partition("step=")[2]): path for path in tmp_path.iterdir()}
    assert sorted(paths) == [4, 8]
    plugin.wait_protected(10)
    in_memory = plugin.load_checkpoint(paths[8])
    as_file = ReplicatorCheckpointIO(session).load_checkpoint(paths[8])
    assert in_memory["global_step"] == as_file["global_step"] == 8
    assert torch.equal(in_memory["state_dict"]["layer.weight"], as_file["state_dict"]["layer.weight"])
    not_kept = tmp_path / paths[4].name.replace("step=4", "step=2")
    assert not not_kept.exists()
    plugin.remove_checkpoint(not_kept)
    plugin.remove_checkpoint(paths[4])
    plugin.remove_checkpoint(f"replicator://{session.job}/step-8")
    assert sorted(tmp_path.iterdir()) == [paths[8]]
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(NoRecoverableCheckpointError):
        plugin.load_checkpoint("replicator://step-77")


def test_a_save_that_fails_is_told_and_the_next_one_works(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F40, F04: nothing of it is kept, and what was there stays."""
    plugin = ReplicatorCheckpointIO(session)
    plugin.save_checkpoint({"global_step": 0, "w": torch.ones(9)}, tmp_path / "zero ok?.ckpt")
    plugin.wait_protected(10)
    with pytest.raises(ConfigError, match="global_step"):
        plugin.save_checkpoint({"w": torch.ones(1)}, "x.ckpt")
    with pytest.raises(ReplicatorError, match="bytes"):
        plugin.save_checkpoint({"global_step": 1, "w": torch.empty(1 << 44, device="meta").expand(1 << 44)}, "a.ckpt")
    with pytest.raises(AttributeError, match="pickle"):
        plugin.save_checkpoint({"global_step": 1, "w": lambda: None}, "b.ckpt")
    assert plugin.resume_path() == f"replicator://{session.job}/step-0_ckpt", "F14"
    assert torch.equal(plugin.load_checkpoint(tmp_path / "zero ok?.ckpt", weights_only=True)["w"], torch.ones(9))
    # Of a rank that trains on a device: each rank that loads gets it on the CPU, as from a file.
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        plugin.save_checkpoint({"global_step": 1, "w": torch.eye(3).to_sparse()}, "c.ckpt")
    plugin.wait_protected(10)
    loaded = plugin.load_checkpoint("replicator://step-1")
    assert loaded["global_step"] == 1
    assert torch.equal(loaded["w"].to_dense(), torch.eye(3))
    replicator.commit_dir(_directory(tmp_path), session.job, 2).wait_protected(10)
    with pytest.raises(NotFoundError, match="something else"):
        plugin.load_checkpoint("replicator://step-2")


def ask_for(paths: list[str]) -> list[str]:
    plugin = ReplicatorCheckpointIO(replicator.init())
    if dist.get_rank() == 0:
        plugin.save_checkpoint({"global_step": 3}, "a.ckpt")
    found = []
    for path in paths[dist.get_rank()].split():
        try:
            found.append(str(plugin.load_checkpoint(path)["global_step"]))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_ranks_that_load_different_checkpoints(node: Node) -> None:
    """F41: an error on all of them, and not the one that rank 0 asked for."""
    paths = ["a.ckpt a.ckpt replicator://step-3 a.ckpt", "a.ckpt b.ckpt replicator://step-4 replicator://step-3"]
    for same, file, step, one_step in run_job([node, node], ask_for, paths, job="ask-for"):
        assert same == one_step == "3"
        expected = "ConfigError: expected all ranks to load the same checkpoint, found "
        assert file.startswith(f"{expected}'a.ckpt' on rank 0 and 'b.ckpt' on rank 1")
        assert step.startswith(f"{expected}'replicator://step-3' on rank 0 and 'replicator://step-4' on rank 1")


def _directory(tmp_path: Path) -> Path:
    root = tmp_path / "directory"
    root.mkdir()
    for name in ("a", "b"):
        (root / name).write_bytes(b"x")
    return root


def test_rank_0_alone_makes_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """F41: it would wait for the others, which never save."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"replicator\.init"):
        ReplicatorCheckpointIO().save_checkpoint({"global_step": 1}, "a.ckpt")
    with pytest.raises(ConfigError, match="durable_every"):
        ReplicatorCheckpointIO(durable_every=-1)


def test_names_of_objects() -> None:
    assert _object_name("/a/epoch=1-val_loss=0.25.ckpt") == "epoch=1-val_loss=0.25.ckpt"
    assert _object_name(Path("/a/with space.ckpt")) == "checkpoint.ckpt"
