"""Restoring on a node that has nothing: straight into the tensors, against bringing it all into the store first."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cluster import start_agents, stop_agents
from benchmarks.harness import Settings, closing_all, measure, rate_result
from benchmarks.product import WARM_STEPS, start_trainer
from benchmarks.results import Result
from benchmarks.worker import Worker


class Restore:
    """Contender: a trainer on an empty node loads what another node holds, each time a new step."""

    def __init__(self, name: str, settings: Settings, size: int) -> None:
        self.name = name
        self.agents = start_agents(2, settings)
        self._workers: list[Worker] = []
        try:
            self._owner = start_trainer("checkpointing:SaveRole", self.agents, 0, size=size, replicas=0)
            self._workers.append(self._owner)
            epoch = self._owner.call("epoch")
            self._loader = start_trainer(
                "checkpointing:RestoreRole", self.agents, 1, size=size, replicas=0, epoch=epoch
            )
            self._workers.append(self._loader)
            for _ in range(WARM_STEPS):
                self.prepare()
                self.run()
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> Mapping[str, int]:
        return {"trainer": self._loader.pid, "holder": self.agents[0].pid, "agent": self.agents[1].pid}

    def prepare(self) -> None:
        self._owner.call("prepare")
        self._owner.call("run")
        self._owner.call("prepare")
        self._loader.call("plan")

    def run(self, retrieve: bool = False) -> float:
        return float(self._loader.call("run", retrieve=retrieve))

    def close(self) -> None:
        for worker in reversed(self._workers):
            worker.close()
        stop_agents(self.agents)


class RetrieveFirst:
    """Contender: the same trainer, which has all objects brought into its node's store before it loads."""

    def __init__(self, name: str, restore: Restore) -> None:
        self.name = name
        self._restore = restore

    @property
    def processes(self) -> Mapping[str, int]:
        return self._restore.processes

    def prepare(self) -> None:
        self._restore.prepare()

    def run(self) -> float:
        return self._restore.run(retrieve=True)

    def close(self) -> None:
        return


def measure_restore(settings: Settings) -> list[Result]:
    """`dcp.load` on an empty node. Its store is filled as well, in one case after the load and in the other before."""
    size = settings.size
    with closing_all() as contenders:
        straight = Restore("load through windows", settings, size)
        contenders += [straight, RetrieveFirst("retrieve into the store, then load", straight)]
        series = measure(contenders, settings)
    own, first = (series[contender.name] for contender in contenders)
    return [
        rate_result("restore_empty_node", "restore on an empty node, store to tensors, CRC included", size, own, first)
    ]
