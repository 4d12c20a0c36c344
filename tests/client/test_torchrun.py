"""Zero configuration under a real torchrun, over an elastic restart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from job_support import Node


def test_elastic_restart(shm_root: Path) -> None:
    """F11: one rank dies, torchrun starts all again: same agent, same job, next epoch, newest committed step."""
    node = Node("n0", shm_root / "n0")
    log = shm_root / "log"
    program = Path(__file__).with_name("torchrun_program.py")
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=lasting-name"),
                *("--monitor-interval=0.1", str(program), str(log)),
            ],
            # torchrun's store outlives the ranks, and gloo then finds the addresses of the dead ones in it.
            env={**os.environ, **node.environment(), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert log.read_text() == "lasting-name 2 2 10.0\n"
        assert (node.root / "agent.log").read_text().count("agent ready") == 1
    finally:
        node.stop()
