"""Where the copies of a job go: what was agreed for its epoch, and what this node is configured with."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from replicator.decide.placement import DEFAULT_STRATEGY, Placement, restore, strategy
from replicator.errors import ConfigError
from replicator.ids import AgreedPlacement, Labels, NodeAddress
from replicator.store.records import JobState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """What the settings of this node say about placement: a strategy (empty: nothing), and the map of "explicit"."""

    strategy: str = ""
    buddies: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Placing:
    """Of one node.

    Args:
        replicas: wanted for a job that does not say.
    """

    def __init__(self, node_id: str, replicas: int, choice: PlacementChoice) -> None:
        self._node_id = node_id
        self._replicas = replicas
        self._choice = choice
        self._known: dict[str, tuple[JobState, Placement]] = {}

    def of(self, state: JobState) -> Placement:
        """What the job's members agreed on."""
        known = self._known.get(state.job)
        if known is not None:
            of, placement = known
            if of.members is state.members and of.placement is state.placement and of.replicas == state.replicas:
                return placement
        labels = labels_of(state.members)
        try:
            if state.placement is not None:
                placement = restore(state.placement, labels, state.replicas)
            else:
                placement = strategy(DEFAULT_STRATEGY).arrange(labels, state.replicas)
        except ConfigError as error:
            log.warning("what was agreed on placement is of no use", extra={"job": state.job, "reason": error})
            placement = strategy(DEFAULT_STRATEGY).arrange(dict.fromkeys(labels, ()), state.replicas)
        self._known[state.job] = state, placement
        return placement

    def arrange(
        self,
        members: Sequence[NodeAddress],
        replicas: int | None,
        wanted: AgreedPlacement | None = None,
        previous: AgreedPlacement | None = None,
    ) -> AgreedPlacement:
        """The placement of an epoch that is opened here, for all ranks to join it with. In any thread.

        Args:
            replicas: wanted by the job; None: the setting of this node.
            wanted: by the job: a strategy and, when it is "explicit", its map. None: the setting of this node.
            previous: of the last epoch that is known anywhere.

        Raises:
            ConfigError: the members' labels, or the map, cannot be used.
        """
        chosen = wanted or AgreedPlacement(self._choice.strategy or DEFAULT_STRATEGY, (), self._choice.buddies)
        copies = self._replicas if replicas is None else replicas
        return strategy(chosen.strategy, dict(chosen.buddies)).arrange(labels_of(members), copies, previous).agreed

    def check(self, job: str, agreed: AgreedPlacement, members: Mapping[str, Labels], replicas: int) -> None:
        """Raises ConfigError when it is not of these members, or not what this node is configured with."""
        mine = self._choice
        if mine.strategy and agreed.strategy != mine.strategy:
            raise ConfigError(
                f"job {job} was opened with placement {agreed.strategy!r}, and node {self._node_id} is configured with "
                f"{mine.strategy!r}; give all agents the same setting, or only the job"
            )
        placement = restore(agreed, members, replicas)
        if not mine.buddies:
            return
        wanted = strategy(mine.strategy, dict(mine.buddies)).arrange(members, replicas)
        for node, chosen in wanted.buddies.items():
            if placement.buddies[node] != chosen:
                raise ConfigError(
                    f"job {job} was opened with a placement_map that is not the one of node {self._node_id}: the "
                    f"buddies of {node} are {', '.join(placement.buddies[node])} there and {', '.join(chosen)} here; "
                    "give all agents the same map"
                )


def labels_of(nodes: Iterable[NodeAddress]) -> dict[str, Labels]:
    return {node.node_id: node.labels for node in nodes}
