"""The owner's side of replication: offers to buddies, retries with back-off, and who acknowledged what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replicator.ids import ObjectVersion
from replicator.v1 import local_pb2


class Replicator:
    """Used in the event loop only."""

    def replicate(
        self,
        objects: Sequence[ObjectVersion],
        epoch: int,
        deadline_s: float,
        report: Callable[[local_pb2.ReplicationEvent], None],
    ) -> tuple[str, ...]:
        """Start copying sealed objects of this node (all of one job) to its buddies; returns their ids at once.

        `report` is called in the loop, later, once per object and buddy. An object that a buddy holds
        already is acknowledged by one round trip.

        Args:
            deadline_s: without progress for this long, a buddy is given up with ReplicationError.

        Raises:
            StaleEpochError: a newer incarnation of the job is known.
            ObjectNotFoundError: an object is not sealed here.
            InvalidIdError: objects of several jobs.
        """
        raise NotImplementedError
