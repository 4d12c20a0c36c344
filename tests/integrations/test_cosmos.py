"""The Cosmos-style checkpointer in the trainer: what is saved, the rules of a resume, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cosmos_program import Trainer, wait_protected
from job_support import nodes, run_job

import replicator
from replicator.checkpoint import ReplicatedStorageWriter
from replicator.errors import (
    ConfigError,
    ReplicatorError,
    SaveFailedError,
    StaleEpochError,
    UnsupportedError,
)
from replicator.integrations._cosmos_agreement import all_succeeded
from replicator.integrations._cosmos_config import checked_config
from replicator.integrations._cosmos_source import parse_job_path
from replicator.integrations.cosmos import CheckpointConfig, DistributedCheckpointer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def raised(what: Any) -> str:
    """The class and message of what a call raises."""
    try:
        what()
    except ReplicatorError as error:
        return f"{error.kind}: {error}"
    return "nothing"


def save_all(base: str) -> dict[str, Any]:
    """Iterations 3 and 5; between them saves that fail."""
    rank = dist.get_rank()
    with replicator.init() as session:
        trainer = Trainer(rank)
        told: list[Any] = []
        group = SimpleNamespace(
            on_save_checkpoint_start=lambda model, iteration: told.append(("start", iteration)),
            on_save_checkpoint=lambda model, state_dict: told.append(sorted(state_dict)),
            on_save_checkpoint_success=lambda iteration, elapsed_time: told.append(("success", iteration)),
            on_save_checkpoint_end=lambda model, iteration: told.append(("end", iteration)),
        )
        job = SimpleNamespace(path_local=base)
        checkpointer = DistributedCheckpointer(CheckpointConfig(), job, group, dataloader=trainer.loader)
        model, optimizer, scheduler, scaler = trainer.parts()
        trainer.step()
        checkpointer.save(model, optimizer, scheduler, scaler, 3)
        found: dict[str, Any] = {"told": told[:], "before": trainer.words()}
        checkpointer.finalize()
        found["pointer"] = (Path(base) / "checkpoints" / "latest_checkpoint.txt").exists() or rank
        found["after_finalize"] = raised(lambda: checkpointer.save(model, optimizer, scheduler, scaler, 4))

        checkpointer = DistributedCheckpointer(CheckpointConfig(), job, group, dataloader=trainer.loader)
        save = checkpointer.save
        found["keys"] = raised(lambda: save(model, optimizer, scheduler if rank == 0 else None, scaler, 4))
        found["iteration"] = raised(lambda: save(model, optimizer, scheduler, scaler, 4 + rank))
        found["negative"] = raised(lambda: save(model, optimizer, scheduler, scaler, -1))
        bad = SimpleNamespace(state_dict=lambda: {"a": 1} if rank == 0 else [][1])
        found["state"] = raised(lambda: save(model, optimizer, bad, scaler, 4))
        unsaved = SimpleNamespace(state_dict=lambda: {"a": Unsaved() if rank == 0 else 1})
        found["value"] = raised(lambda: save(model, optimizer, unsaved, scaler, 4))
        group.on_save_checkpoint = lambda model, state_dict: state_dict.update(ema={})
        found["added"] = raised(lambda: save(model, optimizer, scheduler, scaler, 4))
        group.on_save_checkpoint = None
        wait_protected(session, 3)

        trainer.step()
        save(model, optimizer, scheduler, scaler, 5)
        wait_protected(session, 5)
        plan = session.lookup()
        found["objects"] = [source.name for source in plan.sources]
        found["words"] = trainer.words()
        checkpointer.finalize()
        # As a directory it is what the original writes.
        durable = Path(base) / "durable"
        durable.mkdir(exist_ok=True)
        replicator.restore_dir(durable / "iter_000000005", step=5, session=session)
        (durable / "latest_checkpoint.txt").write_text("iter_000000005\n")
        dist.barrier()
        return found


class Unsaved:
    """Something that cannot be saved."""

    def __reduce__(self) -> Any:
        raise OSError("no such luck")


def resume(base: str) -> dict[str, Any]:
    """One rank's node has lost its memory. Then all that may be asked for and not be there."""
    rank = dist.get_rank()
    with replicator.init() as session:
        job = SimpleNamespace(path_local=base)

        def load(trainer: Any, config: CheckpointConfig | None = None, **given: Any) -> int:
            made = DistributedCheckpointer(
                config or CheckpointConfig(), job, dataloader=trainer.loader, session=session
            )
            parts = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.scheduler}
            return made.load(**{**parts, "grad_scaler": trainer.grad_scaler, **given})

        trainer = Trainer(rank)
        found: dict[str, Any] = {"at": load(trainer), "words": trainer.words()}
        again = Trainer(rank)
        strict = CheckpointConfig()
        partial = CheckpointConfig(strict_resume=False)
        larger = torch.nn.ModuleDict({"0": torch.nn.Linear(512, 512), "9": torch.nn.Linear(2, 2)})
        only_model = replace(strict, keys_not_to_resume=["optim", "scheduler", "trainer", "dataloader"])
        found["missing"] = raised(lambda: load(again, only_model, model=larger))
        before = larger["9"].weight.clone()
        found["partial"] = load(again, replace(only_model, strict_resume=False), model=larger)
        found["kept"] = torch.equal(larger["9"].weight, before) and bool(larger["0"].weight.norm() > 0)
        found["shape"] = raised(
            lambda: load(again, only_model, model=torch.nn.ModuleDict({"0": torch.nn.Linear(3, 3)}))
        )
        found["not_given"] = raised(lambda: load(again, optimizer=None))
        found["no_trainer"] = load(again, replace(partial, keys_not_to_resume=["trainer"]))

        # A committed iteration that nobody has any more, and one on disk that is newer than what is in memory.
        pointer = Path(base) / "checkpoints" / "latest_checkpoint.txt"
        dist.barrier()
        if rank == 0:
            pointer.write_text("iter_000000008\n")
        dist.barrier()
        found["lost"] = load(again)
        dist.barrier()
        if rank == 0:
            shutil.copytree(Path(base) / "durable" / "iter_000000005", pointer.parent / "iter_000000008")
        dist.barrier()
        fresh = Trainer(rank)
        found["on_disk"] = load(fresh, replace(strict, keys_not_to_resume=["dataloader"])), len(fresh.words())
        return found


def start_from(base: str, path: str, training: bool) -> tuple[int, str, bool, str]:
    """Another job, that has saved nothing, begins from what `load_path` names."""
    rank = dist.get_rank()
    with replicator.init() as session:
        trainer = Trainer(rank)
        fresh = trainer.model.state_dict()["0.weight"].to_local().clone()
        config = CheckpointConfig(load_path=path, load_training_state=training)
        checkpointer = DistributedCheckpointer(config, dataloader=trainer.loader, session=session)
        keys, _ = checkpointer.keys_to_resume_during_load()
        at = checkpointer.load(*trainer.parts())
        changed = not torch.equal(trainer.model.state_dict()["0.weight"].to_local(), fresh)
        return at, ",".join(sorted(keys)), changed, trainer.words()


def refusals(base: str) -> dict[str, str]:
    """What there is nothing to start from; then a save without keys, and a job whose checkpoints are all lost."""
    rank = dist.get_rank()
    with replicator.init() as session:
        trainer = Trainer(rank)

        def load(config: CheckpointConfig, job: Any = None) -> str:
            made = DistributedCheckpointer(config, job, session=session)
            return raised(lambda: made.load(*trainer.parts()))

        found = {
            "scratch": load(CheckpointConfig()),
            "no_job": load(CheckpointConfig(load_path="replicator://nobody")),
            "no_step": load(CheckpointConfig(load_path="replicator://job/step-77")),
            "no_directory": load(CheckpointConfig(load_path=f"{base}/nowhere")),
            "file": load(CheckpointConfig(load_path=f"{base}/model.pt")),
            "cloud": load(CheckpointConfig(load_path="s3://bucket/iter_000000005")),
            "not_shared": load(CheckpointConfig(load_path=f"{base}/durable" if rank == 0 else f"{base}/other")),
            "lost": load(CheckpointConfig(), SimpleNamespace(path_local=f"{base}/lost")),
            "lost_partial": load(CheckpointConfig(strict_resume=False), SimpleNamespace(path_local=f"{base}/lost")),
        }
        writer = ReplicatedStorageWriter(session, wait_for="commit")
        dcp.save({"model": trainer.model.state_dict(), "n": 1}, checkpoint_id="step-1", storage_writer=writer)
        found["no_keys"] = load(CheckpointConfig())
        # A trainer without a scheduler saves none, and asks for none.
        model, optimizer, _, _ = trainer.parts()
        made = DistributedCheckpointer(CheckpointConfig(), session=session, wait_for="commit")
        made.save(model, optimizer, None, None, 2)
        found["no_scheduler"] = raised(lambda: made.load(model, optimizer))
        found["scheduler"] = raised(lambda: made.load(*trainer.parts()))
        return found


def warm_model(source: str) -> bool:
    """The model out of a checkpoint that has other things beside it, and no keys."""
    with replicator.init() as session:
        trainer = Trainer(5)
        wanted = Trainer(5)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()
        made = DistributedCheckpointer(CheckpointConfig(load_path=source), session=session)
        made.load(*trainer.parts())
        pairs = zip(trainer.model.parameters(), wanted.model.parameters(), strict=True)
        return all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)


def test_save_lose_a_node_and_resume(shm_root: Path, tmp_path: Path) -> None:
    """F05, F06, F07, F09, F12: an iteration is all of its keys; failed saves leave the one before; every rule of a
    resume, from memory, from another job, and from a directory."""
    base = str(tmp_path)
    with nodes(shm_root, 2, deadline_s=10.0) as two:
        saved = run_job(two, save_all, base)
        keys = ["dataloader", "model", "optim", "scheduler", "trainer"]
        for rank, found in enumerate(saved):
            assert found["told"] == [("start", 3), keys, ("success", 3), ("end", 3)]
            assert found["pointer"]
            assert "after finalize()" in found["after_finalize"]
            assert "rank 1 iter_000000004 with model, optim, trainer" in found["keys"]
            assert "rank 1 iter_000000005" in found["iteration"]
            assert found["negative"].startswith("InvalidIdError")
            assert "rank 1: IndexError" in found["state"]
            assert "'scheduler' of job/step-4_ckpt: rank 0: key 'a'" in found["value"], rank
            assert "OSError: no such luck" in found["value"], rank
            assert "'ema'" in found["added"]
            parts = (".metadata", "__0_0.distcp", "__1_0.distcp")
            # The same on both ranks is written by the lower one.
            assert [name for name in found["objects"] if "scheduler" in name] == [
                f"scheduler/{one}" for one in parts[:2]
            ]
            assert [name for name in found["objects"] if "dataloader" in name] == [
                "dataloader/rank_0.pt",
                "dataloader/rank_1.pt",
            ]
            assert {f"{key}/{one}" for key in ("model", "optim", "trainer") for one in parts} <= set(found["objects"])

        two[1].kill()
        shutil.rmtree(two[1].root)
        two[1].start()
        for found, before in zip(run_job(two, resume, base), saved, strict=True):
            assert (found["at"], found["words"]) == (5, before["words"])
            assert found["missing"].startswith("ConfigError: cannot resume 'model' from job/step-5_ckpt")
            assert "9." in found["missing"]
            assert "strict_resume=False" in found["missing"]
            assert (found["partial"], found["kept"]) == (0, True)
            assert "Size mismatch" in found["shape"]
            assert "0.weight" in found["shape"] or "0.bias" in found["shape"]
            assert "'optim'" in found["not_given"]
            assert (found["no_trainer"], found["lost"], found["on_disk"][0]) == (0, 5, 5)

        for path, training in (("replicator://job/iter_000000005", True), (f"{base}/durable", True)):
            for one, before in zip(run_job(two, start_from, base, path, training, job="next"), saved, strict=True):
                assert one == (5, ",".join(keys), True, before["words"])
        for one in run_job(two, start_from, base, "replicator://job", False, job="next"):
            assert one[:3] == (0, "model", True)

        (tmp_path / "lost" / "checkpoints").mkdir(parents=True)
        (tmp_path / "lost" / "checkpoints" / "latest_checkpoint.txt").write_text("iter_000000004\n")
        for found in run_job(two, refusals, base, job="other"):
            assert found["scratch"] == found["lost_partial"] == "nothing"
            assert found["no_job"].startswith("NoRecoverableCheckpointError")
            assert found["no_step"].startswith("NoRecoverableCheckpointError")
            assert found["no_directory"].startswith("NotFoundError")
            assert found["file"].startswith("ConfigError")
            assert found["cloud"].startswith("UnsupportedError")
            assert "rank 1" in found["not_shared"]
            assert found["lost"].startswith("NoRecoverableCheckpointError")
            assert "iter_000000004" in found["lost"]
            assert "has no key 'model'" in found["no_keys"]
            assert found["no_scheduler"] == "nothing"
            assert "has no key 'scheduler'" in found["scheduler"]
        assert run_job(two, warm_model, "replicator://other/step-1", job="next") == [True, True]


def test_settings_that_cannot_be_are_refused() -> None:
    keys = DistributedCheckpointer.CHECKPOINT_KEYS
    with pytest.raises(ConfigError, match="ema"):
        checked_config(CheckpointConfig(keys_not_to_resume=["ema"]), keys)
    with pytest.raises(UnsupportedError, match="load_ema_to_reg"):
        checked_config(SimpleNamespace(load_ema_to_reg=True), keys)
    with pytest.raises(UnsupportedError, match="save_to_object_store"):
        checked_config(SimpleNamespace(save_to_object_store=SimpleNamespace(enabled=True)), keys)
    assert checked_config(SimpleNamespace(load_path=None, save_iter=7), keys) == CheckpointConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replicator://job", ("job", None)),
        ("replicator://job/", ("job", None)),
        ("replicator://job/step-5", ("job", 5)),
        ("replicator://job/step-5_ckpt", ("job", 5)),
        ("replicator://job/iter_000000005", ("job", 5)),
        ("replicator://", None),
        ("replicator://job/iter_5", None),
        ("replicator://job/../other", None),
    ],
)
def test_paths_of_jobs(text: str, expected: Any) -> None:
    if expected is not None:
        assert parse_job_path(text) == expected
        return
    with pytest.raises(ConfigError, match="load_path"):
        parse_job_path(text)


def test_the_process_that_ended_is_named_first() -> None:
    fine, ended = b"[true, null]", b'[false, ["SaveFailedError", "rank 2 was killed"]]'
    followed = b'[true, ["SaveFailedError", "rank 1 lost its peer"]]'
    assert all_succeeded([fine, fine]) == b"true"
    assert all_succeeded([fine, b"[false, null]"]) == b"false"
    with pytest.raises(SaveFailedError, match=r"^rank 2 was killed; rank 1 lost its peer$"):
        all_succeeded([fine, followed, ended])
    with pytest.raises(StaleEpochError):
        all_succeeded([followed, b'[true, ["StaleEpochError", "superseded"]]'])
