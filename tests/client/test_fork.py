"""F32: a trainer may fork at any time, as data loaders do, without a hang or a crash in parent or child."""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any

from job_support import nodes, run_alone, run_job

import replicator
from replicator.errors import ForkedClientError
from replicator.ids import CheckpointContainerId

FORKS = 200


def ended_in_time(pid: int, seconds: float = 20.0) -> int:
    """The child's wait status; a child that hangs is killed and fails the test."""
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], seconds)[0]:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise TimeoutError(f"the forked child {pid} hung")
        return os.waitpid(pid, 0)[1]
    finally:
        os.close(descriptor)


def in_child(session: Any, number: int) -> None:
    """Use the handle, drop it, and end in one of the ways in which a child ends. 0: as expected."""
    refused = 0
    for use in (session.lookup, lambda: session.begin(CheckpointContainerId("job", 1)), session.agent.check):
        try:
            use()
        except ForkedClientError:
            refused += 1
    session.close()
    gc.collect()
    status = 0 if refused == 3 else 1
    if number % 2:
        os._exit(status)
    sys.exit(status)


def fork_while_replicating() -> tuple[int, int]:
    """(children that ended as expected, copies acknowledged). Every fork happens while objects are written and copied."""
    session = replicator.init()
    stop = threading.Event()
    futures: list[Any] = []
    failures: list[BaseException] = []

    def work() -> None:
        version = session.begin(CheckpointContainerId("job", 1))
        number = 0
        try:
            while not stop.is_set():
                with session.create(version.object(f"object-{number}"), 100_000) as sink:
                    sink.write(os.urandom(100_000))
                futures.extend(session.replication.async_replicate(sink.info.object))
                number += 1
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    good = 0
    for number in range(FORKS):
        pid = os.fork()
        if pid == 0:
            in_child(session, number)
        good += ended_in_time(pid) == 0
    stop.set()
    worker.join(20)
    assert not worker.is_alive()
    assert not failures, failures
    copies = [future.result(20) for future in futures]
    session.close()
    return good, len(copies)


def only_joins() -> None:
    import torch.distributed as dist

    with replicator.init():
        dist.barrier()


def fork_on_rank_0() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        only_joins()
        return FORKS, 1
    result = fork_while_replicating()
    dist.barrier()
    return result


def test_bare_forks_while_replicating(shm_root: Path) -> None:
    with nodes(shm_root, 2) as two:
        for good, copies in run_job(two, fork_on_rank_0):
            assert good == FORKS
            assert copies > 0


def load_with_workers() -> int:
    import torch

    class Numbers(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> int:
            return index

    session = replicator.init()
    version = session.begin(CheckpointContainerId("job", 1))
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
