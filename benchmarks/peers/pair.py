"""Two processes of a peer that move bytes between them over loopback, as one contender."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Settings
from benchmarks.peers.environment import Environment
from benchmarks.peers.network import enter_own_network
from benchmarks.worker import Role, Worker

SLICES: Sequence[int] = (1, 2, 4)
"""Into how many transfers a peer may divide the bytes; the fastest is taken."""


class PairRole(Role):
    """In a process of its own: enters a network with the wanted congestion control, then starts both ends there."""

    def __init__(
        self,
        target: str,
        initiator: str,
        python: str,
        variables: Mapping[str, str],
        arguments: Mapping[str, Any],
        congestion: str,
        needs_interface: bool,
    ) -> None:
        self._congestion = enter_own_network(congestion, needs_interface)
        self._target = Worker(target, dict(arguments), python=python, environment=dict(variables))
        try:
            self._initiator = Worker(
                initiator,
                {**arguments, "target": self._target.call("describe")},
                python=python,
                environment=dict(variables),
            )
        except BaseException:
            self._target.close()
            raise

    def start(self) -> dict[str, Any]:
        """Prove that the bytes arrive, choose the best number of slices; pids and what was chosen."""
        self._initiator.call("run", slices=1)
        sent, received = self._target.call("fingerprint"), self._initiator.call("fingerprint")
        if sent != received:
            raise RuntimeError(f"expected the bytes with CRC-32 {sent:08x} to arrive, found {received:08x}")
        times = {slices: min(self._initiator.call("run", slices=slices) for _ in range(3)) for slices in SLICES}
        self._slices = min(times, key=lambda slices: times[slices])
        self._signal(signal.SIGSTOP)
        return {
            "pids": {"target": self._target.pid, "initiator": self._initiator.pid},
            "details": {"congestion": self._congestion, "slices": self._slices},
        }

    def run(self) -> float:
        """Both ends run for this time only: NIXL's threads spin, and would disturb whoever has the next turn."""
        self._signal(signal.SIGCONT)
        try:
            return float(self._initiator.call("run", slices=self._slices))
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for end in (self._target, self._initiator):
            os.kill(end.pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._initiator.close()
        self._target.close()


class Pair:
    """Contender: a peer's transfer of `size` bytes from one process's tmpfs memory into the other's."""

    def __init__(
        self, name: str, module: str, environment: Environment, settings: Settings, needs_interface: bool = False
    ) -> None:
        self.name = name
        self._worker = Worker(
            "benchmarks.peers.pair:PairRole",
            {
                "target": f"{module}:Target",
                "initiator": f"{module}:Initiator",
                "python": str(environment.python),
                "variables": dict(environment.variables),
                "arguments": {"size": settings.size, "directory": str(settings.directory)},
                "congestion": settings.congestion,
                "needs_interface": needs_interface,
            },
        )
        try:
            started = self._worker.call("start")
        except BaseException:
            self._worker.close()
            raise
        self.processes: Mapping[str, int] = started["pids"]
        self.details: Mapping[str, Any] = {**started["details"], "versions": dict(environment.versions)}

    def prepare(self) -> None:
        return

    def run(self) -> float:
        return float(self._worker.call("run"))

    def close(self) -> None:
        self._worker.close()
