"""A Cosmos-style training job of two ranks, each on a node of its own, for test_cosmos_background.py.

The first incarnation saves in the background, loses a background process in the middle of a
save, and is killed between two saves; the second one resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import replicator
from replicator.errors import SaveFailedError, UnsupportedError
from replicator.integrations.cosmos import CheckpointConfig, DistributedCheckpointer

SAVED = 5
WIDTH = 512


class Loader:
    """A data loader: where it is."""

    def __init__(self, rank: int) -> None:
        self.state = {"rank": rank, "seen": 0, "order": torch.arange(4) + rank}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Trainer:
    """Everything that a checkpointer is given, on this rank."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.loader = Loader(rank)

    def step(self) -> None:
        self.loader.state["seen"] += 1
        loss = self.model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.grad_scaler.load_state_dict({**self.grad_scaler.state_dict(), "scale": 1024.0 + self.loader.state["seen"]})

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler, self.grad_scaler

    def words(self) -> str:
        """All of this rank's state as text, with every bit of the tensors."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.grad_scaler.state_dict(),
            "loader": self.loader.state,
            "random": torch.get_rng_state(),
        }
        return repr(_plain(state))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(local.dtype), tuple(local.shape), hash_of(data))
    return value


def hash_of(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def wait_protected(session: replicator.Session, step: int) -> None:
    """Until the step is what a lookup says, with all of it on both nodes."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        plan = session.lookup()
        if plan.step == step and all(len(source.node_ids) == 2 for source in plan.sources):
            return
        # A new background process needs the processor to load PyTorch; all ranks get the same plan.
        time.sleep(0.1)
    raise TimeoutError(f"step {step} is not protected: {plan.reason}")


def first(base: Path, trainer: Trainer, checkpointer: DistributedCheckpointer, told: list[int]) -> dict[str, Any]:
    rank = dist.get_rank()
    session = checkpointer.session
    found: dict[str, Any] = {"started_at": checkpointer.load(*trainer.parts())}
    first_pid = checkpointer.background_pid
    assert first_pid is not None

    # F02, F03: the state changes at once after each save, and the staging memory is used by the next one.
    trainer.step()
    checkpointer.save(*trainer.parts(), iteration=1)
    trainer.step()
    wanted = trainer.words()
    checkpointer.save(*trainer.parts(), iteration=2)
    found["told_after_2"] = list(told)
    model, optimizer, _, grad_scaler = trainer.parts()
    local = SimpleNamespace(state_dict=lambda: {"a": (lambda: None) if rank == 1 else 1})
    try:
        checkpointer.save(model, optimizer, local, grad_scaler, iteration=3)
        found["cannot_go"] = "not"
    except UnsupportedError as error:
        found["cannot_go"] = str(error)
    trainer.step()
    checkpointer.wait_for_save()

    # The third is on its way when one rank's process is killed: a failed save at the next call, on all ranks.
    if rank == 1:
        os.kill(first_pid, signal.SIGSTOP)
    dist.barrier()
    checkpointer.save(*trainer.parts(), iteration=3)
    if rank == 1:
        os.kill(first_pid, signal.SIGKILL)
    try:
        checkpointer.save(*trainer.parts(), iteration=4)
        found["failed"] = "not"
    except SaveFailedError as error:
        found["failed"] = str(error)
    found["told_after_4"] = list(told)
    wait_protected(session, 2)
    again = Trainer(rank)
    again.loader = trainer.loader  # the one that the checkpointer knows
    found["resumed_at"] = checkpointer.load(*again.parts())
    found["as_staged"] = again.words() == wanted

    # The one after it works, with new processes. A process that ends between two saves loses nothing.
    checkpointer.save(*trainer.parts(), iteration=4)
    wait_protected(session, 4)
    if rank == 0:
        assert checkpointer.background_pid is not None
        os.kill(checkpointer.background_pid, signal.SIGKILL)
        os.waitid(os.P_PID, checkpointer.background_pid, os.WEXITED | os.WNOWAIT)
    trainer.step()
    checkpointer.save(*trainer.parts(), iteration=SAVED)
    wait_protected(session, SAVED)
    found["orphan"] = checkpointer.background_pid
    found["words"] = trainer.words()
    return found


def train(base: Path, again: bool) -> None:
    """One incarnation; the first one does not return on rank 1."""
    rank = dist.get_rank()
    session = replicator.init()
    trainer = Trainer(rank)
    told: list[int] = []
    callbacks = SimpleNamespace(on_save_checkpoint_success=lambda iteration, elapsed_time: told.append(iteration))
    checkpointer = DistributedCheckpointer(
        CheckpointConfig(dcp_async_mode_enabled=True),
        SimpleNamespace(path_local=str(base / "job")),
        callbacks,
        session=session,
        dataloader=trainer.loader,
        wait_deadline_s=60,
    )
    if not again:
        found = first(base, trainer, checkpointer, told)
        (base / f"first-{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(BaseException):
            dist.barrier()
        return
    found = {"started_at": checkpointer.load(*trainer.parts()), "words": trainer.words()}
    checkpointer.save(*trainer.parts(), iteration=SAVED + 1)
    pid = checkpointer.background_pid
    checkpointer.finalize()
    found["told"] = told
    found["ended"] = not Path(f"/proc/{pid}").exists()
    (base / f"second-{rank}.json").write_text(json.dumps(found))
    session.close()
