"""Cosmos-style saves in background processes, two ranks on two nodes under torchrun; kills of processes and ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_support import Node, wait_until


@pytest.mark.timeout(300)  # a dozen interpreters start
def test_background_saves_kills_and_a_restart(shm_root: Path) -> None:
    """F02, F03, F05, F07, F40: see the program. What each rank found is looked at here."""
    two = [Node(f"n{rank}", shm_root / f"n{rank}", deadline_s=10.0) for rank in range(2)]
    program = Path(__file__).with_name("cosmos_program.py")
    environment = two[0].environment()
    try:
        for node in two:
            node.start()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=cosmos", "--monitor-interval=0.1"),
                *(str(program), str(shm_root)),
            ],
            env={
                **os.environ,
                **environment,
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            capture_output=True,
            text=True,
            timeout=270,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        for rank in range(2):
            assert (shm_root / f"first-{rank}.json").exists(), done.stderr[-8000:]
            first = json.loads((shm_root / f"first-{rank}.json").read_text())
            second = json.loads((shm_root / f"second-{rank}.json").read_text())
            assert first["started_at"] == 0
            assert first["told_after_2"] == [1]
            assert "iteration 3" in first["failed"]
            assert "rank 1" in first["failed"]
            assert "SIGKILL" in first["failed"]
            assert first["told_after_4"] == [1, 2]
            assert (first["resumed_at"], first["as_staged"]) == (2, True)
            assert (second["started_at"], second["told"], second["ended"]) == (5, [6], True)
            assert second["words"] == first["words"]
            orphan = first["orphan"]
            wait_until(lambda pid=orphan: not Path(f"/proc/{pid}").exists(), 10)
        assert (shm_root / "job" / "checkpoints" / "latest_checkpoint.txt").read_text() == "iter_000000006\n"
    finally:
        for node in two:
            node.stop()
