"""Nodes of the fault tests: a real agent and a real trainer each, which may be killed, stopped, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc
from forked import AGENT, Forked

from replicator.client.launch import find_agent, read_record
from replicator.faultpoints import VARIABLE
from replicator.rpc_options import channel_options
from replicator.store.paths import StorePaths, open_root
from replicator.v1 import admin_pb2, admin_pb2_grpc

HERE = Path(__file__).parent
START_S = 40.0
ANSWER_S = 100.0


class CaseFailedError(AssertionError):
    """Something is not as promised."""


def environment(**more: str) -> dict[str, str]:
    """Without settings of whoever runs the tests."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("REPLICATOR_", "GRPC_"))}
    return {**clean, **more}


class Process:
    """A child whose stderr is read as it comes. The lines are kept, for a message about what went wrong."""

    default_point: ClassVar[str] = ""
    noted: ClassVar[set[str]] = set()  # by all processes
    complaints: ClassVar[list[str]] = []  # of all processes: what is never to be said

    def __init__(self, command: Sequence[str], point: str = "", forked: str = "") -> None:
        """`forked`: the function that is run with the command as arguments, without a new interpreter."""
        point = point or self.default_point
        variables = environment(**({VARIABLE: point} if point else {}))
        self._process: Forked | subprocess.Popen[str]
        if forked:
            self._process = Forked(forked, command, variables)
        else:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables,
            )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self.heard: list[tuple[float, str]] = []  # (monotonic seconds, line)
        self.points: queue.Queue[str] = queue.Queue()
        self._answers: queue.Queue[str] = queue.Queue()
        for stream, take in ((self._process.stderr, self._on_log), (self._process.stdout, self._answers.put)):
            threading.Thread(target=self._read, args=(stream, take), daemon=True).start()

    def _read(self, stream: Any, take: Any) -> None:
        for line in stream:
            take(line)
        take("")

    def _on_log(self, line: str) -> None:
        self.lines.append(line)
        self.heard.append((time.monotonic(), line))
        if "BlockingIOError" in line or "Traceback" in line:
            self.complaints.append(line)
        if line.startswith("faultpoint "):
            self.points.put(line.split()[1])
            self.noted.add(line.split()[1])

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def answer(self, timeout_s: float) -> str:
        """The next line of its stdout; empty when it ended. Raises queue.Empty."""
        return self._answers.get(timeout=timeout_s)

    def heard_after(self, since: float, text: str) -> float | None:
        """The seconds after `since` at which it first said something with `text`; None when it did not."""
        return next((at - since for at, line in list(self.heard) if at >= since and text in line), None)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_stopped(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except FileNotFoundError:
            return False

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        self._process.kill()
        self._process.wait(10)

    def wait_dead(self, deadline_s: float) -> int:
        return self._process.wait(deadline_s)

    def close(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


class Trainer(Process):
    """A process of fault_trainer.py."""

    def __init__(self, root: Path, deadline_s: float, point: str = "") -> None:
        super().__init__([sys.executable, str(HERE / "fault_trainer.py"), str(root), str(deadline_s)], point)

    def start(self, name: str, **arguments: Any) -> None:
        """Have it do something; `result` waits for the end of it."""
        self.send(json.dumps({"do": name, **arguments}))

    def ask(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer: {"ok": result} or {"error": kind, "message": text}; {"error": "dead"} when it died."""
        try:
            line = self.answer(timeout_s)
        except queue.Empty:
            raise CaseFailedError(f"a trainer did not answer for {timeout_s:.0f} s: {self.lines[-5:]}") from None
        found: dict[str, Any] = json.loads(line) if line else {"error": "dead", "message": "".join(self.lines[-5:])}
        return found

    def result(self, timeout_s: float = ANSWER_S) -> Any:
        """What it returned; raises CaseFailedError when it raised."""
        answer = self.ask(timeout_s)
        if "error" in answer:
            raise CaseFailedError(f"{answer['error']}: {answer['message']}")
        return answer["ok"]

    def do(self, name: str, **arguments: Any) -> Any:
        self.start(name, **arguments)
        return self.result(ANSWER_S)


class Node:
    """One node. `prefix` is put before the agent's command (to run it in a network namespace)."""

    def __init__(
        self, node_id: str, base: Path, deadline_s: float, flags: Sequence[str] = (), prefix: Sequence[str] = ()
    ) -> None:
        self.node_id = node_id
        self.deadline_s = deadline_s
        self.flags = tuple(flags)
        self.prefix = tuple(prefix)
        self._base = base
        self._lives = 0
        self.root = base / f"{node_id}-0"
        self.agent: Process | None = None
        self.trainer: Trainer | None = None

    # -- processes

    def launch_agent(self, point: str = "") -> None:
        """Start the agent; `wait_agent` waits for it."""
        settings = ["--root", str(self.root), "--node-id", self.node_id, "--deadline-s", str(self.deadline_s)]
        settings += ["--keep-last", "1", *self.flags]
        if self.prefix:
            self.agent = Process([*self.prefix, sys.executable, "-m", "replicator.agent", *settings], point)
        else:
            self.agent = Process(settings, point, forked=AGENT)

    def wait_agent(self) -> None:
        """Until it is published and serves. Raises CaseFailedError when it is not in time, or ended."""
        assert self.agent is not None
        end = time.monotonic() + START_S
        while True:
            found = find_agent(self.root)
            if found is not None and (found.pid == self.agent.pid):
                return
            if not self.agent.is_running:
                raise CaseFailedError(f"the agent of {self.node_id} ended: {''.join(self.agent.lines[-8:])}")
            if time.monotonic() > end:
                raise CaseFailedError(f"the agent of {self.node_id} did not start: {''.join(self.agent.lines[-8:])}")
            time.sleep(0.01)

    def launch_trainer(self, point: str = "") -> None:
        self.trainer = Trainer(self.root, self.deadline_s, point)

    def kill_agent(self) -> None:
        if self.agent is not None:
            self.agent.close()
            self.agent = None

    def kill_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None

    def lose(self) -> None:
        """The node dies with its memory. What is started under its name next is empty."""
        self.kill_agent()
        self.kill_trainer()
        shutil.rmtree(self.root, ignore_errors=True)
        self._lives += 1
        self.root = self._base / f"{self.node_id}-{self._lives}"

    # -- what it knows

    @property
    def paths(self) -> StorePaths:
        return open_root(self.root, create=False)

    def status(self) -> admin_pb2.StatusReply:
        record = read_record(self.root)
        assert record is not None
        with grpc.insecure_channel(f"unix:{record.socket}", options=channel_options()) as channel:
            reply: admin_pb2.StatusReply = admin_pb2_grpc.AdminServiceStub(channel).Status(
                admin_pb2.StatusRequest(), timeout=10
            )
            return reply

    def touched_bytes(self) -> int:
        """Bytes of shared memory (a store's files) that the agent's process has mapped and touched."""
        assert self.agent is not None
        status = Path(f"/proc/{self.agent.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("RssShmem:")]
        return int(line.split()[1]) << 10


class Cluster:
    """Nodes n0, n1, ... and the job that runs on them."""

    def __init__(
        self,
        count: int,
        deadline_s: float = 6.0,
        flags: Callable[[int], Sequence[str]] = lambda index: (),
        prefix: Callable[[int], Sequence[str]] = lambda index: (),
        job: str = "job",
        replicas: int = 1,
    ) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="replicator-faults-", dir="/dev/shm"))
        self.nodes = [Node(f"n{index}", self.base, deadline_s, flags(index), prefix(index)) for index in range(count)]
        self.replicas = replicas
        self.job = job
        self.epoch = 0
        self.step = 0

    def start(self) -> None:
        """All agents, then all trainers in a new epoch."""
        self.start_agents(self.nodes)
        self.enter()

    def start_agents(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.launch_agent()
        for node in nodes:
            node.wait_agent()

    def enter(self, points: dict[str, str] | None = None) -> None:
        """New trainers on all nodes, in a new epoch of the job, as a launcher starts them after a failure."""
        for node in self.nodes:
            node.kill_trainer()
            node.launch_trainer((points or {}).get(node.node_id, ""))
        for trainer in self.trainers:
            trainer.start("attach")
        members = [trainer.result() for trainer in self.trainers]
        self.epoch = self.trainers[0].do("open_job", job=self.job, members=members)
        self.all_do("join", job=self.job, epoch=self.epoch, members=members, replicas=self.replicas)

    @property
    def trainers(self) -> list[Trainer]:
        return [node.trainer for node in self.nodes if node.trainer is not None]

    def all_do(self, name: str, **arguments: Any) -> list[Any]:
        """All trainers do the same at the same time."""
        for trainer in self.trainers:
            trainer.start(name, **arguments)
        return [trainer.result() for trainer in self.trainers]

    def logs(self) -> str:
        """The last lines of all processes."""
        found = []
        for node in self.nodes:
            for process in (node.agent, node.trainer):
                if process is not None:
                    found.append(f"-- {node.node_id} {type(process).__name__}\n{''.join(process.lines[-12:])}")
        return "\n".join(found)

    def close(self) -> None:
        for node in self.nodes:
            node.kill_trainer()
            node.kill_agent()
        shutil.rmtree(self.base, ignore_errors=True)


@contextlib.contextmanager
def cluster(count: int = 3, **settings: Any) -> Iterator[Cluster]:
    made = Cluster(count, **settings)
    try:
        yield made
    finally:
        made.close()


def wait_until(condition: Any, what: str, deadline_s: float) -> float:
    """For what has no event: look again until it is so; the seconds that took. Raises CaseFailedError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > deadline_s:
            raise CaseFailedError(f"waited {deadline_s:.1f} s in vain until {what}")
        select.select([], [], [], 0.005)
    return time.monotonic() - began


def stop_reached(process: Process, point: str, deadline_s: float) -> bool:
    """Wait until the process stands still at the point; False when it does not get there in time, or died."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and process.is_running:
        with contextlib.suppress(queue.Empty):
            if process.points.get(timeout=0.05) == point:
                wait_until(lambda: process.is_stopped, f"{point} stops the process", 5)
                return True
    return False
