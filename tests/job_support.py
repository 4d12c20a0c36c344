"""Jobs of several ranks on several nodes of one machine: a real agent and a root of its own for each node."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import AGENT, Forked

from replicator.client.launch import LOG_FILE, AgentRecord, ensure_agent, find_agent, read_record

# Ranks are forked from a server that has torch loaded and nothing running, so a job starts in milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "grpc",
        "grpc.experimental",
        "pytest",
        "replicator.checkpoint.reader",
        "replicator.checkpoint.writer",
        "replicator.client.session",
    ]
)


@dataclass(frozen=True)
class Node:
    """One node: `root` is its store's, and it shares nothing with other nodes."""

    node_id: str
    root: Path
    deadline_s: float = 5.0

    def environment(self) -> dict[str, str]:
        return {
            "REPLICATOR_ROOT": str(self.root),
            "REPLICATOR_NODE_ID": self.node_id,
            "REPLICATOR_DEADLINE_S": str(self.deadline_s),
            "REPLICATOR_IDLE_EXIT_S": "60",
            "REPLICATOR_SCRUB_BYTES_PER_S": "0",
        }

    @property
    def _settings(self) -> tuple[str, ...]:
        return (
            *("--node-id", self.node_id, "--deadline-s", str(self.deadline_s)),
            *("--idle-exit-s", "60", "--scrub-bytes-per-s", "0"),
        )

    def start(self, *flags: str) -> AgentRecord:
        """Its agent, forked and ready."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.root / LOG_FILE, "ab") as log:
            agent = Forked(AGENT, ["--root", str(self.root), *self._settings, *flags], os.environ, log)
        deadline = time.monotonic() + 30
        while (record := find_agent(self.root)) is None:
            assert agent.poll() is None, (self.root / LOG_FILE).read_text()
            assert time.monotonic() < deadline, "no agent in 30 s"
            time.sleep(0.01)
        return record

    def start_detached(self, *flags: str) -> AgentRecord:
        """Its agent as the library starts one."""
        return ensure_agent(self.root, flags=(*self._settings, *flags))

    def status(self) -> Any:
        """The agent's StatusReply."""
        import grpc

        from replicator.v1 import admin_pb2

        with grpc.insecure_channel(f"unix:{self.root}/agent.sock") as channel:
            status = channel.unary_unary(
                "/replicator.v1.AdminService/Status",
                request_serializer=admin_pb2.StatusRequest.SerializeToString,
                response_deserializer=admin_pb2.StatusReply.FromString,
            )
            return status(admin_pb2.StatusRequest(), timeout=10)

    def counter(self, name: str) -> int:
        """One of the agent's counts."""
        return int(self.status().counters.get(name, 0))

    def kill(self) -> None:
        """SIGKILL its agent, and wait until it is gone."""
        record = find_agent(self.root)
        if record is not None:
            kill(record.pid)

    def stop(self) -> None:
        record = read_record(self.root)
        if record is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGTERM)


def kill(pid: int) -> None:
    """SIGKILL a process that is not a child of this one, and wait until it is gone."""
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        assert ended.poll(10_000), f"process {pid} did not end"
    finally:
        os.close(descriptor)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """For what has no event to wait for: files and states of other processes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.02)


@contextlib.contextmanager
def nodes(base: Path, count: int, *, deadline_s: float = 5.0, start: bool = True) -> Iterator[list[Node]]:
    """Nodes n0, n1, ...; their agents end with the block."""
    made = [Node(f"n{index}", base / f"n{index}", deadline_s) for index in range(count)]
    try:
        if start:
            for node in made:
                node.start()
        yield made
    finally:
        for node in made:
            node.stop()


@dataclass
class RankProcess:
    """One running rank."""

    rank: int
    process: Any
    pipe: Any

    def result(self, deadline: float) -> Any:
        """What the body returned; what it raised is raised here with its traceback as text."""
        if not self.pipe.poll(max(deadline - time.monotonic(), 0)):
            raise TimeoutError(f"rank {self.rank} (pid {self.process.pid}) did not finish")
        try:
            ok, value = self.pipe.recv()
        except EOFError:
            self.process.join(5)
            raise RuntimeError(f"rank {self.rank} ended with status {self.process.exitcode} and no result") from None
        if not ok:
            raise RankError(self.rank, *value)
        return value


class RankError(Exception):
    """What a rank raised: the class's name, the message, and the traceback."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


class Job:
    """Ranks under torch.distributed (gloo); rank `i` runs on `placement[i]`."""

    def __init__(self, placement: Sequence[Node], body: Callable[..., Any], *args: Any, job: str = "job") -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.ranks: list[RankProcess] = []
        for rank, node in enumerate(placement):
            mine, theirs = _context.Pipe()
            environment = {
                **node.environment(),
                "REPLICATOR_JOB": job,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(placement)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "LOCAL_RANK": "0",
            }
            process = _context.Process(
                target=_main, args=(rank, len(placement), self._store.port, environment, theirs, body, args)
            )
            process.start()
            theirs.close()
            self.ranks.append(RankProcess(rank, process, mine))

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        """What each rank returned. Raises RankError of the first that raised."""
        deadline = time.monotonic() + timeout_s
        try:
            return [rank.result(deadline) for rank in self.ranks]
        finally:
            self.end()

    def kill(self) -> None:
        """SIGKILL all ranks."""
        for rank in self.ranks:
            rank.process.kill()
        self.end()

    def end(self) -> None:
        for rank in self.ranks:
            rank.process.join(10)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join(10)


def run_job(placement: Sequence[Node], body: Callable[..., Any], *args: Any, job: str = "job") -> list[Any]:
    """Run `body(*args)` on every rank; what each returned."""
    return Job(placement, body, *args, job=job).results()


def run_alone(node: Node, body: Callable[..., Any], *args: Any, job: str = "job") -> Any:
    """Run `body(*args)` in one process without torch.distributed."""
    mine, theirs = _context.Pipe()
    environment = {**node.environment(), "REPLICATOR_JOB": job}
    process = _context.Process(target=_main, args=(0, 0, 0, environment, theirs, body, args))
    process.start()
    theirs.close()
    one = RankProcess(0, process, mine)
    try:
        return one.result(time.monotonic() + 60)
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


def _main(
    rank: int, world: int, port: int, environment: dict[str, str], pipe: Any, body: Callable[..., Any], args: Any
) -> None:
    os.environ.update(environment)
    import logging

    import torch
    import torch.distributed as dist

    logging.basicConfig(level=logging.INFO, format=f"[rank {rank}] %(name)s: %(message)s")
    torch.set_num_threads(1)
    try:
        if world:
            store = dist.TCPStore("127.0.0.1", port, None, False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        pipe.send((True, body(*args)))
        if world:
            dist.destroy_process_group()
    except BaseException as error:
        pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
