"""Commit and protection: the manifest on enough nodes, then every object acknowledged by every buddy."""

from __future__ import annotations

from collections.abc import Callable

from replicator.decide.types import Manifest
from replicator.v1 import local_pb2


class Committer:
    """Used in the event loop only."""

    async def commit(
        self, manifest: Manifest, deadline_s: float, report: Callable[[local_pb2.CommitEvent], None]
    ) -> tuple[str, ...]:
        """Store the manifest here, then start sending it to all members; returns the ids of those asked.

        Its file is in the store when this returns; peers are not waited for. `report` is called in the loop,
        later: with `ok` and not `is_protected` when enough nodes have it, with `is_protected` when it is
        protected, or once with an error. Idempotent for an identical manifest.

        Raises:
            StaleEpochError: a newer incarnation of the job is known.
            CommitError: another manifest of this version is stored here, or an object of this node is missing.
            StoreFullError: no room for it.
        """
        raise NotImplementedError
