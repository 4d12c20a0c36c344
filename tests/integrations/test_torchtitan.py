"""torchtitan's trainer, on a CPU, with the checkpoint manager that `--module` gives it: two ranks on two nodes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import Job, Node, nodes, wait_until

import replicator
from replicator.client.session import open_session
from replicator.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

PATIENCE_S = 240.0  # for processes that import torch, and torchtitan, on a busy machine


def trainer_of(folder: Path, *options: str) -> Any:
    """As `torchtitan.train` makes it, from the command line."""
    from torchtitan.config import ConfigManager

    arguments = [
        *("--module", "replicator.integrations.torchtitan"),
        *("--config", "examples._torchtitan_on_cpu.debugmodel"),
        *("--dump-folder", str(folder)),
        *("--checkpoint.barrier-timeout-s", "60"),
        *options,
    ]
    return ConfigManager().parse_args(arguments).build()


def state_of(trainer: Any) -> dict[str, Any]:
    """A copy of everything that has to come back."""
    from torch.distributed.tensor import DTensor

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copy(one) for key, one in value.items()}
        if isinstance(value, DTensor):
            return value.to_local().clone()
        return value.clone() if isinstance(value, torch.Tensor) else value

    return {key: copy(state.state_dict()) for key, state in trainer.checkpointer.states.items()}


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(bits(one), bits(other))
    return bool(one == other)


def kill_writer(trainer: Any) -> None:
    """The process that writes the checkpoints of this rank."""
    (process,) = trainer.checkpointer._manager._saver._checkpoint_process.process.processes
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)


def train_lose_and_resume(folder: Path, lost: Node) -> dict[str, Any]:
    import examples._torchtitan_on_cpu  # noqa: F401  # before torchtitan

    seen: dict[str, Any] = {}
    seen["rejected"] = rejected(folder)

    # 1 is a step with no save, 2 and 4 are saved asynchronously, and of step 5, the last one, the model alone.
    trainer = trainer_of(
        folder,
        *("--training.steps", "5", "--checkpoint.interval", "2", "--checkpoint.keep-latest-k", "2"),
        "--checkpoint.last-save-model-only",
    )
    manager, states, warmed = trainer.checkpointer, {}, []
    seen["from a disk"] = begins_from_a_disk(trainer, folder / "initial")
    save, prewarm = manager.save, manager._manager.prewarm_staging
    manager._manager.prewarm_staging = lambda payload: (warmed.append(trainer.step), prewarm(payload))

    def save_and_note(step: int, last_step: bool = False) -> bool:
        states[step] = state_of(trainer)
        return bool(save(step, last_step=last_step))

    manager.save = save_and_note
    trainer.train()
    seen["warmed"] = warmed
    seen["cadence"] = [manager._should_save(step, step == 9) for step in (1, 2, 3, 4, 9)]
    seen["resumed from"] = manager.session.lookup().step
    seen["last"] = manager.session.lookup(5).step
    seen["last files"] = [source.name for source in manager.session.lookup(5).sources]

    # A writer that dies fails its save; that is told once, and the next save has a new one.
    kill_writer(trainer)
    trainer.step = 6
    save(6)
    with pytest.raises(RuntimeError):
        manager.maybe_wait_for_saving()
    states[8] = state_of(trainer)
    trainer.step = 8
    states[8]["train_state"]["step"] = 8
    save(8)
    manager.maybe_wait_for_saving()
    dist.barrier()
    seen["after failure"] = manager.session.lookup().step

    kill_writer(trainer)
    save(10)
    purger = manager._purger
    manager.close()
    seen["purged"] = purger is None or not purger._thread.is_alive()
    if purger is not None:
        seen["kept"] = purger._storage.ls(folder)
    seen["protected"] = until_protected(8)
    dist.barrier()
    session = open_session()
    assert session is not None
    session.close()

    # The memory of one node is lost.
    if dist.get_rank() == 1:
        lost.kill()
        shutil.rmtree(lost.root)
        lost.start()
    dist.barrier()
    trainer = trainer_of(folder, "--training.steps", "9", "--checkpoint.no-asynchronous", "--debug.seed", "7")
    manager = trainer.checkpointer
    seen["loaded"] = manager.load()
    seen["equal"] = same(state_of(trainer), states[8])
    for missing in (7, 3):
        with pytest.raises(FileNotFoundError, match=f"load_step={missing}"):
            manager.load(missing)
    trainer.config.checkpoint.last_save_model_only = manager._config.last_save_model_only = False
    trainer.train()
    trainer.close()
    seen["went on to"] = (trainer.step, manager.session.lookup().step)

    # Only to load: no process, no barrier, and no save.
    trainer = trainer_of(folder, "--training.steps", "9", "--checkpoint.load-only", "--checkpoint.barrier", "none")
    manager = trainer.checkpointer
    manager._config.enable_first_step_checkpoint = True
    assert not manager._should_save(1, False)
    manager._config.load_only = False
    assert manager._should_save(1, False)
    manager._config.load_only = True
    seen["load only"] = (manager.load(), trainer.step, manager.save(10, last_step=True), writes_how(manager))
    trainer.close()
    seen["at the end"] = manager.session.lookup().step
    return seen


def begins_from_a_disk(trainer: Any, path: Path) -> bool:
    """Where there is nothing to resume from: a checkpoint in a directory, of PyTorch's own storage."""
    manager = trainer.checkpointer
    model = manager.states["model"].state_dict()
    wanted = state_of(trainer)["model"]
    dcp.save(model, checkpoint_id=path)
    with torch.no_grad():
        for value in model.values():
            value.zero_()
    assert not same(state_of(trainer)["model"], wanted)
    manager._config.initial_load_path = str(path)
    loaded = manager.load()
    manager._config.initial_load_path = None
    return bool(loaded) and same(state_of(trainer)["model"], wanted)


def rejected(folder: Path) -> list[str]:
    """Configurations that cannot be had."""
    from replicator.integrations.torchtitan import ReplicatedCheckpointManager

    found = []
    with pytest.raises(ConfigError) as hugging_face:
        ReplicatedCheckpointManager.Config(last_save_in_hf=True)
    found.append(str(hugging_face.value))
    with pytest.raises(ConfigError) as no_barrier:
        trainer_of(folder, "--checkpoint.barrier", "none")
    found.append(str(no_barrier.value))
    return found


def writes_how(manager: Any) -> tuple[str, Any]:
    saver = manager._manager._saver
    return type(saver).__name__, saver._writer._barrier


def until_protected(step: int) -> bool:
    """Every rank waits for its own node."""
    node = Node("", Path(os.environ["REPLICATOR_ROOT"]))
    wait_until(lambda: any(job.newest_protected_step == step for job in node.status().jobs), 30)
    return True


@pytest.mark.timeout(2 * PATIENCE_S)
def test_trainer_saves_loses_a_node_and_resumes(shm_root: Path, tmp_path: Path) -> None:
    """F02, F04, F07, F40, F41, F43."""
    assert replicator.__version__
    with nodes(shm_root, 2) as two:
        for rank, seen in enumerate(Job(two, train_lose_and_resume, tmp_path, two[1]).results(PATIENCE_S)):
            assert "last_save_in_hf" in seen["rejected"][0]
            assert "2 ranks" in seen["rejected"][1]
            assert seen["from a disk"]
            assert seen["warmed"] == [1]
            assert seen["cadence"] == [False, True, False, True, True]
            assert seen["resumed from"] == 4
            assert seen["last"] == 5
            assert [name for name in seen["last files"] if name.endswith(".pt")] == ["model_0.pt", "model_1.pt"]
            assert seen["after failure"] == 8
            assert seen["purged"]
            if rank == 0:
                assert "step-8" in seen["kept"]
                assert len([name for name in seen["kept"] if name.startswith("step-")]) <= 3
            assert seen["loaded"]
            assert seen["equal"]
            assert seen["went on to"] == (9, 9)
            assert seen["load only"] == (True, 9, False, ("SyncCheckpointSaver", None))
            assert seen["at the end"] == 9
