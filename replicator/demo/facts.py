"""What the driver knows of the job, from its ranks' reports, and what it concludes from that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replicator.demo.events import Event


@dataclass(slots=True)
class Facts:
    """Of one run of the job, restarts included."""

    losses: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    reached: dict[str, int] = field(default_factory=dict)
    rank_of: dict[str, int] = field(default_factory=dict)
    started: list[Event] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    protected: list[int] = field(default_factory=list)
    plans: list[Event] = field(default_factory=list)
    restored: list[Event] = field(default_factory=list)
    finished: dict[int, Event] = field(default_factory=dict)
    last_step_at: float = 0.0

    def apply(self, event: Event) -> None:
        """Take over one report."""
        fields = event.fields
        if event.kind == "step":
            # As hexadecimal floating point: equal text is equal bits.
            self.losses[event.rank, fields["step"]].append(fields["loss"])
            self.reached[event.node] = fields["step"]
            self.last_step_at = event.at
        elif event.kind == "started":
            self.started.append(event)
            self.rank_of[event.node] = event.rank
        elif event.kind == "committed":
            self.committed.append(fields["step"])
        elif event.kind == "protected":
            self.protected.append(fields["step"])
        elif event.kind == "plan":
            self.plans.append(event)
        elif event.kind == "restored":
            self.restored.append(event)
        elif event.kind == "finished":
            self.finished[event.rank] = event

    @property
    def newest_committed(self) -> int | None:
        return max(self.committed, default=None)

    @property
    def newest_protected(self) -> int | None:
        return max(self.protected, default=None)

    def first_recovery(self, world_size: int) -> list[Event]:
        """The `restored` reports of the first epoch in which every rank restored something; empty: none yet."""
        by_epoch: dict[int, dict[int, Event]] = defaultdict(dict)
        for event in self.restored:
            by_epoch[event.fields["epoch"]][event.rank] = event
        for epoch in sorted(by_epoch):
            if len(by_epoch[epoch]) == world_size:
                return [by_epoch[epoch][rank] for rank in range(world_size)]
        return []


def differing_losses(job: Facts, reference: Facts) -> list[str]:
    """Every (step, rank) whose loss was ever another than the reference's, in words; empty: all bits equal."""
    found = []
    for (rank, step), values in sorted(job.losses.items(), key=lambda item: (item[0][1], item[0][0])):
        expected = reference.losses.get((rank, step), ["nothing"])[-1]
        found += [f"step {step}, rank {rank}: {value}, expected {expected}" for value in values if value != expected]
    missing = reference.losses.keys() - job.losses.keys()
    found += [f"step {step}, rank {rank}: never reported" for rank, step in sorted(missing)]
    return found


def mean_loss(losses: Mapping[tuple[int, int], list[str]], step: int, world_size: int) -> float | None:
    """The mean over the ranks of a step's loss; None while one of them has not reported it."""
    values = [losses[rank, step][-1] for rank in range(world_size) if losses.get((rank, step))]
    return sum(float.fromhex(value) for value in values) / world_size if len(values) == world_size else None


def pulled(recovery: list[Event]) -> list[dict[str, Any]]:
    """What had to come from another node: per node, whole objects once each, and every read of parts."""
    items = [{**item, "node": event.node} for event in recovery for item in event.fields["pulled"]]
    whole = {(item["node"], item["name"]): item for item in items if item["whole"]}
    return [*whole.values(), *(item for item in items if not item["whole"])]
