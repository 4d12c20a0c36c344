"""Real agents and real trainer processes for tests; every one is ended by its pid when its `with` block ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forked import AGENT, Forked

HERE = Path(__file__).parent
DEADLINE_S = 20.0


def environment(**more: str) -> dict[str, str]:
    """Without settings of whoever runs the tests. Nothing is scrubbed, so that a test decides who finds a bad copy."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("REPLICATOR_", "GRPC_"))}
    return {**clean, "REPLICATOR_SCRUB_BYTES_PER_S": "0", **more}


class AgentProcess:
    """`python -m replicator.agent`, with its log lines read as they come.

    Args:
        forked: the same without a new interpreter, which is much quicker.
        prefix: a command that becomes the agent's. (preexec_fn would be a fork of this process, where gRPC runs.)
    """

    def __init__(
        self,
        root: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        forked: bool = False,
        prefix: Sequence[str] = (),
    ) -> None:
        self.root = root
        arguments = ["--root", str(root), "--log-format", "json", *flags]
        self.process: Forked | subprocess.Popen[str]
        if forked:
            self.process = Forked(AGENT, arguments, env or environment())
        else:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "replicator.agent", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env or environment(),
            )
        self.lines: list[dict[str, Any]] = []
        self.output: list[str] = []
        self._news: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output.append(line)
            with contextlib.suppress(ValueError):
                self._news.put(json.loads(line))
        self._news.put(None)

    def wait_log(self, text: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The next log record whose message has `text`."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                line = self._news.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no log line with {text!r} within {deadline_s} s in:\n{''.join(self.output)}"
                ) from None
            if line is None:
                raise AssertionError(f"the agent ended without a log line {text!r}:\n{''.join(self.output)}")
            self.lines.append(line)
            if text in line["message"]:
                return line

    def wait_ready(self) -> AgentProcess:
        self.wait_log("agent ready")
        return self

    @property
    def record(self) -> dict[str, Any]:
        """agent.json"""
        content: dict[str, Any] = json.loads((self.root / "agent.json").read_text())
        return content

    @property
    def socket(self) -> str:
        return str(self.record["socket"])

    def signal(self, number: int) -> None:
        """With SIGSTOP: nothing in it runs any more when this returns."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_until(self._is_stopped, f"process {self.process.pid} to stop")

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        try:
            return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
        except FileNotFoundError:  # a thread ended before
            return False

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit status, once all its output is read."""
        status = self.process.wait(deadline_s)
        self._reader.join(deadline_s)
        return status

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def running_agent(
    root: Path, *flags: str, env: dict[str, str] | None = None, forked: bool = True
) -> Iterator[AgentProcess]:
    """An agent that is ready; killed at the end if it still runs."""
    agent = AgentProcess(root, *flags, env=env, forked=forked)
    try:
        yield agent.wait_ready()
    finally:
        agent.close()


class TrainerProcess:
    """A process of trainer_child.py."""

    def __init__(self, root: Path) -> None:
        self.client_id = uuid.uuid4().hex
        self.forked: list[int] = []
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "trainer_child.py"), str(root), self.client_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def do(self, name: str, **arguments: Any) -> Any:
        """Run a command there; its result, or AssertionError with the error it got."""
        answer = self.ask(name, **arguments)
        assert "error" not in answer, answer
        return answer["ok"]

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Run a command there; {"ok": result} or {"error": kind, "message": text}."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the trainer died in {name}"
        answer: dict[str, Any] = json.loads(line)
        if name == "fork":
            self.forked.append(answer["ok"])
        return answer

    def attach(self, agent: AgentProcess) -> Any:
        """Take the lock and attach."""
        self.do("hold")
        return self.do("attach", socket=agent.socket)

    def reserve(self, capacity: int = 1 << 20, job: str = "job", epoch: int = 1) -> Any:
        request = {"client_id": self.client_id, "capacity_bytes": capacity, "job": job, "epoch": epoch}
        return self.do("call", method="Reserve", request=request)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.kill()
        for pid in self.forked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@contextlib.contextmanager
def trainer(root: Path) -> Iterator[TrainerProcess]:
    process = TrainerProcess(root)
    try:
        yield process
    finally:
        process.close()


def wait_until(condition: Any, what: str, deadline_s: float = DEADLINE_S) -> None:
    """For what has no event: look again until it is so."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s in vain until {what}"
        time.sleep(0.02)
