"""Contenders made of the product: a trainer process and the agents behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cluster import Agent, start_agents, stop_agents
from benchmarks.harness import Settings
from benchmarks.worker import Worker

WARM_STEPS = 4
"""Two checkpoints are kept and a third is being written: from the fourth save on, segments come back."""


def budget_for_two(size: int) -> tuple[str, ...]:
    """Flags of an agent that has room for the two checkpoints that it keeps, of `size` bytes each, and no third one."""
    return ("--budget-bytes", str(int(2.1 * size)))


def start_trainer(role: str, agents: Sequence[Agent], node: int = 0, **arguments: Any) -> Worker:
    """A trainer on one node of the job whose nodes are `agents`; `role` is `module:Class` below `benchmarks`."""
    common = {"root": str(agents[node].root), "members": [agent.record for agent in agents]}
    return Worker(f"benchmarks.{role}", {**common, **arguments})


class Trainer:
    """Contender: a trainer whose role has `prepare` and `run`, with agents of its own.

    Args:
        nodes: how many agents; the trainer is on the first.
        warm_steps: runs before all others, until what superseded checkpoints leave is enough for the next one.
        flags: of the agents.
        arguments: of the role.
    """

    def __init__(
        self,
        name: str,
        role: str,
        settings: Settings,
        nodes: int = 1,
        warm_steps: int = WARM_STEPS,
        flags: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        self.name = name
        self.agents = start_agents(nodes, settings, flags)
        try:
            self.worker = start_trainer(role, self.agents, **arguments)
        except BaseException:
            stop_agents(self.agents)
            raise
        try:
            for _ in range(warm_steps):
                self.prepare()
                self.run()
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> Mapping[str, int]:
        return {"trainer": self.worker.pid, **{f"agent {i}": agent.pid for i, agent in enumerate(self.agents)}}

    def prepare(self) -> None:
        self.worker.call("prepare")

    def run(self) -> float | Mapping[str, float]:
        result: float | Mapping[str, float] = self.worker.call("run")
        return result

    def close(self) -> None:
        self.worker.close()
        stop_agents(self.agents)


class Fresh:
    """Contender: as `Trainer`, but new for each run: new stores, new agents, a new trainer. Nothing is warm."""

    def __init__(self, name: str, role: str, settings: Settings, nodes: int = 1, **arguments: Any) -> None:
        self.name = name
        self._role, self._settings, self._nodes, self._arguments = role, settings, nodes, arguments
        self._trainer: Trainer | None = None

    @property
    def processes(self) -> Mapping[str, int]:
        return self._trainer.processes if self._trainer else {}

    def prepare(self) -> None:
        self.close()
        self._trainer = Trainer(self.name, self._role, self._settings, self._nodes, 0, **self._arguments)
        self._trainer.prepare()

    def run(self) -> float | Mapping[str, float]:
        assert self._trainer is not None
        return self._trainer.run()

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


class Pull:
    """Contender: an agent without the objects, whose pool is warm, pulls a checkpoint that another one holds."""

    def __init__(self, name: str, settings: Settings, size: int) -> None:
        self.name = name
        self.agents = start_agents(2, settings)
        self._workers: list[Worker] = []
        self.lookup_s: list[float] = []
        try:
            self._owner = self._start("trainer:ObjectsRole", 0, size=size)
            self._puller = self._start("trainer:PullRole", 1, epoch=self._owner.call("epoch"))
            for _ in range(WARM_STEPS):
                self.prepare()
                self.run()
        except BaseException:
            self.close()
            raise

    def _start(self, role: str, node: int, **arguments: Any) -> Worker:
        worker = start_trainer(role, self.agents, node, replicas=0, **arguments)
        self._workers.append(worker)
        return worker

    @property
    def processes(self) -> Mapping[str, int]:
        return {"trainer": self._puller.pid, "holder": self.agents[0].pid, "puller": self.agents[1].pid}

    def prepare(self) -> None:
        self._owner.call("prepare")
        self._owner.call("finish")
        self.lookup_s.append(self._puller.call("plan"))

    def run(self) -> float:
        return float(self._puller.call("run"))

    def close(self) -> None:
        for worker in reversed(self._workers):
            worker.close()
        stop_agents(self.agents)


class Commit:
    """Contender: a commit in a job of `nodes` nodes."""

    def __init__(self, name: str, settings: Settings, nodes: int) -> None:
        self.name = name
        self._trainer = Trainer(name, "trainer:ObjectsRole", settings, nodes=nodes, size=1 << 16, replicas=1)

    @property
    def processes(self) -> Mapping[str, int]:
        return self._trainer.processes

    def prepare(self) -> None:
        self._trainer.prepare()

    def run(self) -> float:
        return float(self._trainer.worker.call("run_commit"))

    def lookup(self) -> float:
        """Seconds of a recovery lookup that asks all nodes."""
        return float(self._trainer.worker.call("lookup"))

    def close(self) -> None:
        self._trainer.close()


class Lookup:
    """Contender: the recovery lookup in the same job."""

    def __init__(self, name: str, commit: Commit) -> None:
        self.name = name
        self._commit = commit

    @property
    def processes(self) -> Mapping[str, int]:
        return self._commit.processes

    def prepare(self) -> None:
        return

    def run(self) -> float:
        return self._commit.lookup()

    def close(self) -> None:
        return
