"""The demo's options, and what follows from them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from replicator.errors import ConfigError

MAX_NODES = 16


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to play. Steps count from 1; a save happens after every step that `save_every` divides."""

    nodes: int = 3
    replicas: int = 1
    lose: int | None = None
    lose_at_step: int | None = None
    steps: int = 24
    save_every: int = 4
    seed: int = 1
    keep: bool = False
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        _within("--nodes", self.nodes, 2, MAX_NODES)
        _within("--replicas", self.replicas, 1, self.nodes - 1)
        _within("--save-every", self.save_every, 1, 1000)
        _within("--steps", self.steps, self.save_every + 2, 100_000)
        _within("--seed", self.seed, 0, 2**31 - 1)
        if self.lose is not None:
            _within("--lose", self.lose, 0, self.nodes - 1)
        if self.lose_at_step is not None:
            _within("--lose-at-step", self.lose_at_step, self.save_every + 1, self.steps - 1)
        if not 10 <= self.deadline_s <= 86400:
            raise ConfigError(f"--deadline-s: expected 10..86400 seconds, found {self.deadline_s}")

    @property
    def lost_node(self) -> int:
        """The node that is lost: as given, else drawn from the seed."""
        return self.lose if self.lose is not None else random.Random(self.seed).randrange(self.nodes)

    @property
    def lost_at_step(self) -> int:
        """The step after which it is lost: as given, else one without a save, drawn from the seed."""
        if self.lose_at_step is not None:
            return self.lose_at_step
        candidates = [step for step in range(self.save_every + 1, self.steps) if step % self.save_every]
        middle = [step for step in candidates if self.steps // 3 <= step <= 2 * self.steps // 3]
        return random.Random(self.seed + 1).choice(middle or candidates or [self.save_every + 1])


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name}: expected {least}..{most}, found {value}")
