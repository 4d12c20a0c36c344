"""A contender that is one role in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.worker import Worker


class Single:
    """Contender: prepares and runs a role.

    Args:
        role: `module:Class` below `benchmarks`.
        process: what the process is, in words.
        arguments: of the role.
    """

    def __init__(self, name: str, role: str, process: str = "trainer", **arguments: Any) -> None:
        self.name = name
        given = {key: str(value) if isinstance(value, Path) else value for key, value in arguments.items()}
        self.worker = Worker(f"benchmarks.{role}", given)
        self._process = process

    @property
    def processes(self) -> Mapping[str, int]:
        return {self._process: self.worker.pid}

    def prepare(self) -> None:
        self.worker.call("prepare")

    def run(self) -> float | Mapping[str, float]:
        result: float | Mapping[str, float] = self.worker.call("run")
        return result

    def close(self) -> None:
        self.worker.close()


class Sibling:
    """Contender: the process of another one, run with other arguments; so it shares that one's memory."""

    def __init__(self, name: str, other: Single, **arguments: Any) -> None:
        self.name = name
        self._other, self._arguments = other, arguments

    @property
    def processes(self) -> Mapping[str, int]:
        return self._other.processes

    def prepare(self) -> None:
        self._other.prepare()

    def run(self) -> float | Mapping[str, float]:
        result: float | Mapping[str, float] = self._other.worker.call("run", **self._arguments)
        return result

    def close(self) -> None:
        return
