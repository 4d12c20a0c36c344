"""Training loops that save faster than copies are made: what the trainer sees, with each policy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import nodes, run_job

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter
from replicator.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _outcome(error: BaseException | None) -> str:
    return type(error).__name__ if error is not None else "protected"


def save_fast() -> tuple[list[str], list[str], bool, float]:
    """Outcomes with skip; with block; whether a wait with no time at all ended well; the steps' last value."""
    session = replicator.init()
    state = {f"w{dist.get_rank()}": torch.full((1 << 18,), 0.0)}

    def save(writer: ReplicatedStorageWriter, first: int) -> list[str]:
        futures = []
        for step in range(first, first + 4):
            next(iter(state.values())).fill_(step)
            dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            futures.append(writer.protected_future)
        return [_outcome(future.exception(60)) for future in futures if future is not None]

    skipping = save(ReplicatedStorageWriter(session), 1)
    dist.barrier()
    in_time = session.keep_pace(0.0)
    blocking = save(ReplicatedStorageWriter(session, backpressure="block"), 11)
    dist.barrier()
    plan = session.lookup()
    dcp.load(state, storage_reader=ReplicatedStorageReader(session, plan=plan))
    return skipping, blocking, in_time, float(next(iter(state.values()))[0])


def test_skip_names_what_superseded_it_and_block_waits(shm_root: Path) -> None:
    with nodes(shm_root, 2, start=False) as placement:
        for node in placement:
            node.start("--serve-limit-bytes-per-s", "2Mi")
        coordinator, other = run_job(placement, save_fast)
    skipping, blocking, in_time, last = coordinator
    assert skipping == ["protected", "SaveSkippedError", "SaveSkippedError", "protected"]
    # Nothing is skipped. One whose copies are overtaken by those of the next needs none any more.
    assert set(blocking[:-1]) <= {"protected", "CommitError"}
    assert blocking[-1] == "protected"
    assert in_time
    assert last == 14
    assert other == ([], [], True, 14)


def save_model_last() -> tuple[int | None, int | None, str]:
    session = replicator.init()
    state = {"w": torch.ones(10)}
    dcp.save(state, checkpoint_id="step-1", storage_writer=ReplicatedStorageWriter(session))
    writer = ReplicatedStorageWriter(session, resumable=False, wait_for="protected")
    for step in (2, 3, 4):
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    found, asked = session.lookup(), session.lookup(step=4)
    return (found.step, asked.step, " ".join(one.reason for one in found.rejected))


def test_a_model_only_save_is_not_what_a_restart_loads(shm_root: Path) -> None:
    """F43: nor does it evict what is."""
    with nodes(shm_root, 2) as placement:
        for found, asked, reason in run_job(placement, save_model_last):
            assert (found, asked) == (1, 4)
            assert "It was saved as not resumable" in reason


def test_a_wait_for_copies_has_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """F15: it says what was awaited, and the save goes on."""
    import threading
    from concurrent.futures import Future

    from replicator.client.session import Session
    from replicator.ids import CheckpointContainerId, ContainerVersion

    session = Session.__new__(Session)
    session._lock = threading.Lock()
    futures = [Future() for _ in range(3)]  # type: ignore[var-annotated]
    session._unprotected = {
        ContainerVersion(CheckpointContainerId("job", step), 1 << 20): future for step, future in enumerate(futures)
    }
    began = time.monotonic()
    assert not session.keep_pace(0.1)
    assert 0.1 <= time.monotonic() - began < 10
    assert "waited 0.1 s for the copies of job/step-0_ckpt" in caplog.text
    for future in futures[:2]:
        threading.Timer(0.05, future.set_result, (None,)).start()
    assert session.keep_pace(60)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected skip or block, found 'drop'"):
        ReplicatedStorageWriter(backpressure="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"wait_for": "copies"}, {"wait_deadline_s": 0}, {"wait_deadline_s": -1.0}, {"thread_count": 0}], ids=str
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    """Where they are given, and not in the middle of the first save; no session is needed for that."""
    from replicator.integrations.cosmos import CheckpointConfig, DistributedCheckpointer

    for make in (ReplicatedStorageWriter, lambda **given: DistributedCheckpointer(CheckpointConfig(), **given)):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected"):
            make(**wrong)
