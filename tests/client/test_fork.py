"""F32: a trainer may fork at any time, as data loaders do, without a hang or a crash in parent or child."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from job_support import nodes, run_job

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


def load_with_workers() -> tuple[int, bool]:
    """(the sum of what the workers gave, whether all that was written meanwhile was copied)."""
    import torch

    class Numbers(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            return index

    session = replicator.init()
    version = session.begin(replicator.CheckpointContainerId("job", 1))
    me = session.agent.node.node_id
    total, over = 0, threading.Event()

    def replicate() -> list[Any]:
        copies = []
        while not over.is_set() and len(copies) < 10_000:
            with session.create(version.object(f"object-{me}-{len(copies)}"), 20_000) as sink:
                sink.write(os.urandom(20_000))
            (copy,) = session.replication.async_replicate(sink.info.object)
            copies.append(copy)
            if len(copies) % 8 == 0:
                copy.result(20)
        return copies

    with ThreadPoolExecutor(1) as pool:
        replicating = pool.submit(replicate)
        for _ in range(3):
            loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=4, multiprocessing_context="fork")
            for batch in loader:
                total += int(batch.sum())
        over.set()
        copies = replicating.result(30)
    good = bool(copies) and all(copy.result(20).buddy_node_id != me for copy in copies)
    session.lookup()
    session.close()
    return total, good


def test_data_loader_workers(shm_root: Path) -> None:
    """They are forked, used and ended while another thread writes and a buddy copies."""
    with nodes(shm_root, 2) as two:
        assert run_job(two, load_with_workers) == [(3 * sum(range(64)), True)] * 2
