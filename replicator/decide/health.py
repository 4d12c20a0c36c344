"""Whether a node is alive, from what asking it gave: one rule, without a clock of its own.

    alive --no answer in time--> suspect --silent for long enough--> dead --an answer--> alive

A node that is there in another incarnation has lost what its old one held in its process, so the old one is dead at
once (F19). Nothing follows from a state here: a partition looks the same from both of its sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from replicator.ids import NodeAddress, NodeIdentity


class NodeState(Enum):
    """What is believed of a node."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True)
class NodeHealth:
    """What is believed of one incarnation of a node, why, and since when (seconds since 1970)."""

    node: NodeAddress
    state: NodeState
    reason: str
    since_unix_s: float


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Seconds a suspect node may stay silent, and how often it must have been asked in vain, before it is dead.

    The second is for an agent that was stopped itself: time that passed meanwhile says nothing about others.
    """

    dead_after_s: float
    min_misses: int = 3


@dataclass(frozen=True, slots=True)
class Standing:
    """What is believed of a node so far. `since_s` is of the clock that `next_state` gets; `misses` are in a row."""

    identity: NodeIdentity
    state: NodeState
    reason: str
    since_s: float
    misses: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """What asking once gave: who answered, or (`identity` is None) what was wrong."""

    identity: NodeIdentity | None
    problem: str = ""


def next_state(
    previous: Standing | None, seen: Observation, now_s: float, settings: HealthSettings
) -> tuple[NodeState, str]:
    """The state of the incarnation in `previous` (of the one that answered, when there is none), and why."""
    if seen.identity is not None:
        if previous is None or previous.identity == seen.identity:
            return NodeState.ALIVE, "it answers"
        return NodeState.DEAD, f"it is there in another incarnation, {seen.identity}"
    if previous is None or previous.state is NodeState.ALIVE:
        return NodeState.SUSPECT, seen.problem
    if previous.state is NodeState.DEAD:
        return NodeState.DEAD, previous.reason
    silent_s = now_s - previous.since_s
    if silent_s >= settings.dead_after_s and previous.misses + 1 >= settings.min_misses:
        return NodeState.DEAD, f"suspect for {silent_s:.1f} s, asked {previous.misses + 1} times: {seen.problem}"
    return NodeState.SUSPECT, seen.problem
