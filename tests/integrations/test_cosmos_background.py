"""Cosmos-style saves in background processes, two ranks on two nodes; kills of processes and ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cosmos_program import train
from job_support import Job, Node, wait_until

PATIENCE_S = 140.0


@pytest.mark.timeout(300)  # eight interpreters start
def test_background_saves_kills_and_a_restart(shm_root: Path) -> None:
    """F02, F03, F05, F07, F40: see the program. What each rank found is looked at here."""
    two = [Node(f"n{rank}", shm_root / f"n{rank}", deadline_s=10.0) for rank in range(2)]
    try:
        for node in two:
            node.start()
        first = Job(two, train, shm_root, False)
        try:
            with pytest.raises(RuntimeError, match="rank 1 ended with status -9"):
                first.ranks[1].result(time.monotonic() + PATIENCE_S)
        finally:
            first.end()
        Job(two, train, shm_root, True).results(PATIENCE_S)
        for rank in range(2):
            one = json.loads((shm_root / f"first-{rank}.json").read_text())
            second = json.loads((shm_root / f"second-{rank}.json").read_text())
            assert one["started_at"] == 0
            assert one["told_after_2"] == [1]
            assert "rank 1: key 'scheduler': the background process cannot be given" in one["cannot_go"]
            assert "iteration 3" in one["failed"]
            assert "rank 1" in one["failed"]
            assert "SIGKILL" in one["failed"]
            assert one["told_after_4"] == [1, 2]
            assert (one["resumed_at"], one["as_staged"]) == (2, True)
            assert (second["started_at"], second["told"], second["ended"]) == (5, [6], True)
            assert second["words"] == one["words"]
            orphan = one["orphan"]
            wait_until(lambda pid=orphan: not Path(f"/proc/{pid}").exists(), 10)
        assert (shm_root / "job" / "checkpoints" / "latest_checkpoint.txt").read_text() == "iter_000000006\n"
    finally:
        for node in two:
            node.stop()
