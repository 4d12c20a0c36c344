"""Recovery lookup: everybody is asked what they hold, with one deadline, and the pure decision is made here."""

from __future__ import annotations

from replicator.decide.types import Manifest, NodeInventory, Unanswered
from replicator.ids import ContainerVersion
from replicator.v1 import types_pb2


class Lookup:
    """Used in the event loop only."""

    async def run(self, job: str, epoch: int, deadline_s: float, step: int | None) -> types_pb2.Plan:
        """The newest recoverable container, or the one of `step`; why not, when there is none.

        Args:
            epoch: of the job that asks; 0 for an observer, who changes nothing.
            deadline_s: for all answers; who is silent is named in the plan.

        Raises:
            StaleEpochError: a newer incarnation of the job is known, here or by a peer.
            InvalidIdError: a job or step that cannot be one.
        """
        raise NotImplementedError

    async def inventories(
        self, job: str, deadline_s: float
    ) -> tuple[list[NodeInventory], dict[ContainerVersion, Manifest], list[Unanswered]]:
        """What every node holds of the job (of all jobs, when empty), this node included, and all manifests."""
        raise NotImplementedError
