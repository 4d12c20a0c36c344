"""What keeping checkpoints costs beyond their own bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks import machine
from benchmarks.cluster import Agent
from benchmarks.harness import Settings, closing_all
from benchmarks.product import Trainer, budget_for_two
from benchmarks.results import Result, ratio_at_most

STEPS = 4
SETTLE_S = 1.0
ALLOWED_SHARE = 0.05
ALLOWED_BYTES = 200_000_000


def measure_memory(settings: Settings) -> list[Result]:
    """At rest after some steps: bytes on tmpfs and of the agent, less the bytes of the objects that are held.

    Segments kept for recycling count as cost. Pages of tmpfs that the agent has mapped are counted once.
    """
    return [
        *_rows(settings, "", ""),
        *_rows(settings, "_tight", ", budget for two checkpoints", budget_for_two(settings.size)),
    ]


def _rows(settings: Settings, suffix: str, words: str, flags: Sequence[str] = ()) -> list[Result]:
    with closing_all() as contenders:
        trainer = Trainer(
            "memory", "trainer:ObjectsRole", settings, nodes=2, flags=flags, size=settings.size, replicas=1
        )
        contenders.append(trainer)
        for _ in range(STEPS):
            trainer.prepare()
            trainer.run()
        trainer.worker.call("finish")
        # Superseded containers are dropped after the commit was answered.
        time.sleep(SETTLE_S)
        sides = zip(trainer.agents, ("owner", "buddy"), strict=True)
        return [
            _row(
                f"memory_{side}{suffix}", f"memory beyond the objects held, {side}'s node{words}", agent, settings.size
            )
            for agent, side in sides
        ]


def _row(name: str, what: str, agent: Agent, size: int) -> Result:
    objects = sum(1 for path in (agent.root / "objects").rglob("*") if path.is_file())
    held = objects * size
    tmpfs = machine.tmpfs_bytes(agent.root)
    memory = machine.Memory.of(agent.pid)
    allowed = ALLOWED_SHARE * held + ALLOWED_BYTES
    return Result(
        name=name,
        what=what,
        unit="MB",
        value=(tmpfs + memory.private - held) / 1e6,
        limit_name="5% + 200 MB",
        limit=allowed / 1e6,
        bar=ratio_at_most(1.0),
        runs=1,
        details={
            "objects": objects,
            "held_mb": held / 1e6,
            "tmpfs_mb": tmpfs / 1e6,
            "agent_private_mb": memory.private / 1e6,
            "agent_mapped_tmpfs_mb": memory.shared / 1e6,
        },
    )
