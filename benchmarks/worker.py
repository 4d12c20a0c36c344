"""A process of its own for everything that is measured: `python -m benchmarks.worker module:Class`.

The class is a role: its constructor takes the arguments that the first line of stdin gives as JSON, each further
line names one of its methods. Timing is done inside the role, next to what is timed. Stdout carries one
JSON line per answer; whatever else a library prints goes to stderr. Only the standard library is
imported here, so that a role can run under another project's interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 300.0


class WorkerError(RuntimeError):
    """A worker failed, ended or did not answer in time; the message has its last words."""


class Role:
    """What a role may have beside its own methods; most have `run`, which returns seconds."""

    def prepare(self) -> None:
        """What each run needs before it and is not timed."""

    def close(self) -> None:
        """Called at the end of the process."""


class Worker:
    """The parent's side: starts a role and calls its methods.

    Args:
        role: `package.module:Class`.
        arguments: for the class; JSON.
        python: interpreter to run under; default this one.
        environment: added to this process's.
    """

    def __init__(
        self,
        role: str,
        arguments: dict[str, Any] | None = None,
        *,
        python: str | Path | None = None,
        environment: dict[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.role = role
        self._stderr = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python or sys.executable), "-m", "benchmarks.worker", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        )
        self._pending = b""
        try:
            self._request({"arguments": arguments or {}}, deadline_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, /, deadline_s: float = DEADLINE_S, **arguments: Any) -> Any:
        """Call a method of the role; its JSON answer. WorkerError when it raises or is late."""
        return self._request({"method": method, "arguments": arguments}, deadline_s)

    def _request(self, message: dict[str, Any], deadline_s: float) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line(time.monotonic() + deadline_s, deadline_s))
        except (BrokenPipeError, EOFError):
            raise WorkerError(f"{self.role} ended with status {self._process.wait(10)}: {self._last_words()}") from None
        if "error" in answer:
            raise WorkerError(f"{self.role}: {answer['error']}")
        return answer["result"]

    def _line(self, end: float, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(end - time.monotonic(), 0)):
                    raise WorkerError(f"{self.role} did not answer within {deadline_s:.0f} s: {self._last_words()}")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise EOFError
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-800:].strip() or "nothing on stderr"

    def close(self) -> None:
        """End the process: by the end of its input, else by a signal."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()


def main() -> None:
    """Serve one role until the end of stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    role: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if role is None:
                role = getattr(importlib.import_module(module), name)(**message["arguments"])
                result = None
            else:
                result = getattr(role, message["method"])(**message["arguments"])
            answer: dict[str, Any] = {"result": result}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if role is not None:
        role.close()
    # Other projects' libraries may hang or crash in their own cleanup; nothing here needs it.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
