"""What goes wrong, and when. Each run has its own choice of kinds, so that no combination stays rare."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from replicator.store.trailer import ObjectInfo

from .loop import Handle
from .network import Weather
from .node import SimNode

if TYPE_CHECKING:
    from .world import World


class Faults:
    """Injects faults until it is cancelled."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._kinds: list[Callable[[], None]] = []
        kinds: tuple[Callable[[], None], ...] = (
            self._storm,
            self._partition,
            self._crash_agent,
            self._kill_rank,
            self._lose_node,
            self._flip,
            self._fill_disk,
        )
        for kind in kinds:
            if world.rng.random() < 0.5:
                self._kinds.append(kind)
        self._mean_s = world.rng.choice((0.3, 1.0, 4.0))
        self._ends: dict[str, Handle] = {}

    async def run(self) -> None:
        """For ever; at once when this run has no faults."""
        rng = self.world.rng
        while self._kinds:
            await asyncio.sleep(rng.expovariate(1 / self._mean_s))
            rng.choice(self._kinds)()

    def end_all(self) -> None:
        """Whatever is wrong is mended; what is lost stays lost."""
        for timer in self._ends.values():
            timer.cancel()
        self.world.network.heal()
        for node in self.world.nodes:
            node.full = False
            if node.agent is None or not node.agent.process.alive:
                node.start()
        self.world.disturb("healed")

    def _later(self, name: str, delay_s: float, what: Callable[[], None]) -> None:
        timer = self._ends.pop(name, None)
        if timer is not None:
            timer.cancel()
        self._ends[name] = self.world.loop.call_later(delay_s, what)

    def _count(self, kind: str) -> None:
        self.world.faults[kind] += 1

    # -- kinds

    def _storm(self) -> None:
        rng = self.world.rng
        self.world.network.weather = Weather.bad(rng)
        self.world.disturb("storm", weather=self.world.network.weather)

        def over() -> None:
            self.world.network.weather = Weather()
            self.world.disturb("storm is over")

        self._later("storm", rng.choice((1.0, 5.0, 20.0)) * rng.random(), over)

    def _partition(self) -> None:
        rng, nodes = self.world.rng, self.world.nodes
        side = {node.name for node in rng.sample(nodes, rng.randrange(1, max(2, len(nodes) // 2 + 1)))}
        both = rng.random() < 0.7
        self.world.network.partition(side, {node.name for node in nodes}, both)
        self._count("partition")
        self.world.disturb("partition", side=sorted(side), both_ways=both)

        def over() -> None:
            self.world.network._cut.clear()
            self.world.disturb("partition is over")

        self._later("partition", rng.choice((0.5, 4.0, 15.0)) * (0.2 + rng.random()), over)

    def _crash_agent(self) -> None:
        node = self._pick(lambda node: node.is_up)
        if node is None:
            return
        node.crash()
        self._count("agent crash")
        self.world.disturb("agent crashes", node=node.name)
        other_port = self.world.rng.random() < 0.3
        self._later(
            f"start {node.name}",
            self.world.rng.choice((0.05, 1.0, 6.0)) * self.world.rng.random(),
            lambda: self._start(node, other_port),
        )

    def _kill_rank(self) -> None:
        job = self.world.rng.choice(self.world.jobs)
        if job.current is None:
            return
        rank = self.world.rng.choice(job.current.ranks)
        if rank.process.alive:
            self._count("trainer crash")
            self.world.disturb("trainer crashes", job=job.name, rank=rank.rank)
            rank.leave()

    def _lose_node(self) -> None:
        node = self._pick(lambda node: node.present)
        if node is None or sum(one.present for one in self.world.nodes) <= 1:
            return
        self._count("node loss")
        self.world.disturb("node lost", node=node.name)
        for job in self.world.jobs:
            for rank in job.current.ranks if job.current is not None else ():
                if rank.node is node:
                    rank.leave()
        node.lose()
        self._later(f"start {node.name}", 8.0 * self.world.rng.random(), lambda: self._start(node, False))

    def _start(self, node: SimNode, other_port: bool) -> None:
        if node.agent is None or not node.agent.process.alive:
            node.start(other_port)
            self.world.disturb("agent starts", node=node.name, other_port=other_port)

    def _flip(self) -> None:
        rng = self.world.rng
        node = self._pick(lambda node: node.store is not None)
        if node is None or node.store is None:
            return
        held = [info for version in node.store.versions() for info in node.store.objects(version).values() if info.size]
        if not held:
            return
        self.flip(node, rng.choice(held))

    def flip(self, node: SimNode, info: ObjectInfo) -> None:
        """One bit of a sealed object of a node turns."""
        rng = self.world.rng
        assert node.store is not None
        path = node.store.paths.object(info.object)
        if not path.exists():
            return
        at = rng.randrange(info.size)
        fd = os.open(path, os.O_RDWR)
        try:
            byte = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([byte[0] ^ 1 << rng.randrange(8)]), at)
        finally:
            os.close(fd)
        self._count("bit flip at rest")
        self.world.flipped.add((node.name, info.object))
        self.world.oracle.damaged(node.name, info.object.version)
        self.world.disturb("bit flips", node=node.name, object=info.object)

    def _fill_disk(self) -> None:
        node = self._pick(lambda node: node.is_up and not node.full)
        if node is None:
            return
        node.full = True
        self.world.disturb("disk full", node=node.name)

        def over() -> None:
            node.full = False
            self.world.disturb("disk has room", node=node.name)

        self._later(f"full {node.name}", self.world.rng.choice((0.2, 3.0, 10.0)) * self.world.rng.random(), over)

    def _pick(self, fits: Callable[[SimNode], bool]) -> SimNode | None:
        nodes = [node for node in self.world.nodes if fits(node)]
        return self.world.rng.choice(nodes) if nodes else None
