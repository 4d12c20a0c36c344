"""F32: a trainer may fork at any time, as data loaders do, without a hang or a crash in parent or child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from job_support import nodes, run_alone

import replicator

FORKS = 200


def test_bare_forks_while_replicating(shm_root: Path) -> None:
    """Objects are written and copied to a buddy all the while. Every eighth child ends the interpreter in full."""
    program = Path(__file__).with_name("fork_program.py")
    with nodes(shm_root, 2) as two:
        done = subprocess.run(
            [sys.executable, str(program), str(FORKS), *(str(node.root) for node in two)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) > 0
        assert "fork_posix" not in done.stderr, "gRPC's own fork handlers ran"


def load_with_workers() -> int:
    import torch

    class Numbers(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            return index

    session = replicator.init()
    version = session.begin(replicator.CheckpointContainerId("job", 1))
    total = 0
    for epoch in range(3):
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=4, multiprocessing_context="fork")
        for batch in loader:
            total += int(batch.sum())
        with session.create(version.object(f"object-{epoch}"), 1000) as sink:
            sink.write(b"x" * 1000)
        session.replication.async_replicate(sink.info.object)
    session.lookup()
    session.close()
    return total


def test_data_loader_workers(shm_root: Path) -> None:
    with nodes(shm_root, 1) as (node,):
        assert run_alone(node, load_with_workers) == 3 * sum(range(64))
