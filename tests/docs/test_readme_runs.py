"""The README's loop is run under torchrun as it stands, and its commands look at what it saved."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from replicator.client.launch import find_agent

README = Path(__file__).parents[2] / "README.md"
# What the README leaves to the reader: a state, and from where to where to train.
BEFORE = """
import torch
state = {"weights": torch.arange(1000.0), "step": 0}
first_step, last_step = 1, 101
"""
AFTER = """
writer.protected_future is None or writer.protected_future.result(30)
import os
os.write(1, f"loaded {plan.step}\\n".encode())  # in one piece, between those of the other rank
dist.barrier()
dist.destroy_process_group()
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def environ(shm_root: Path) -> Iterator[dict[str, str]]:
    """For a job on a store of its own; the agent that the job starts is ended afterwards."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("REPLICATOR_")}
    yield kept | {"REPLICATOR_ROOT": str(shm_root), "OMP_NUM_THREADS": "1"}
    record = find_agent(shm_root)
    if record is not None:
        os.kill(record.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while find_agent(shm_root) is not None and time.monotonic() < deadline:
            time.sleep(0.05)


@pytest.mark.timeout(240)
def test_the_loop_and_the_commands(environ: dict[str, str], tmp_path: Path) -> None:
    (loop,) = blocks("python")
    script = tmp_path / "train.py"
    script.write_text(BEFORE + loop + AFTER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    assert "`REPLICATOR_JOB=my-job torchrun ...`" in README.read_text()
    named = environ | {"REPLICATOR_JOB": "my-job"}

    def train() -> str:
        ran = subprocess.run(torchrun, env=named, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert train().count("loaded None") == 2
    assert train().count("loaded 100") == 2, "a new launch of the same name finds what the first one saved"

    lines = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    commands = [line for line in lines if line and line[0] == "replicator-admin"]
    assert [command[1] for command in commands] == ["status", "nodes", "ls", "recover", "pull"]
    told = {}
    for command in commands:
        program = [sys.executable, "-m", "replicator.admin", *command[1:], "--json"]
        ran = subprocess.run(program, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, (command, ran.stderr)
        told[command[1]] = json.loads(ran.stdout)
    assert told["status"]["filesystem"] == "tmpfs"
    assert [one["step"] for one in told["ls"]["containers"] if one["recoverable"]][:1] == [100]
    assert told["recover"]["chosen"]["step"] == 100
    state = {"weights": torch.zeros(1000), "step": -1}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "ckpt"), no_dist=True)
    assert torch.equal(state["weights"], torch.arange(1000.0))
