"""A container that this node coordinates and that is not protected yet: what is known of it, and who waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from replicator.agent.logs import fields
from replicator.decide.types import Manifest, listed
from replicator.errors import CommitError, ReplicationError, ReplicatorError, StaleEpochError
from replicator.v1 import local_pb2
from replicator.wire import version_to_pb

MAX_REPORTS = 8

Report = Callable[[local_pb2.CommitEvent], None]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenContainer:
    """Used in the event loop only. `needed` is how many nodes must have the manifest."""

    manifest: Manifest
    epoch: int
    needed: int
    reports: list[Report] = field(default_factory=list)
    stored_on: set[str] = field(default_factory=set)
    refused_by: set[str] = field(default_factory=set)  # for good
    committed: bool = False
    acknowledged: dict[str, set[str]] = field(default_factory=dict)  # owner -> names of its objects
    distribution: asyncio.Task[None] | None = None
    progressed_at: float = 0.0
    stalled: bool = False  # nothing of it got any further for long

    def missing_owners(self) -> list[str]:
        """Owners who have not reported all their objects."""
        wanted: dict[str, set[str]] = {}
        for entry in self.manifest.entries:
            wanted.setdefault(entry.owner_node_id, set()).add(entry.name)
        return [owner for owner, names in wanted.items() if not names <= self.acknowledged.get(owner, set())]

    def add(self, report: Report) -> None:
        """One more who waits; the first ones are forgotten when they are too many."""
        self.reports = [*self.reports[-MAX_REPORTS + 1 :], report]

    def event(self) -> local_pb2.CommitEvent:
        """That all is well, and where the manifest is."""
        return local_pb2.CommitEvent(
            container=version_to_pb(self.manifest.version), ok=True, stored_on=sorted(self.stored_on)
        )

    def failure(self, error: ReplicatorError) -> local_pb2.CommitEvent:
        """That it is not committed, or not protected."""
        event = self.event()
        event.ok, event.error_kind, event.error_message = False, error.kind, str(error)
        return event

    def tell(self, event: local_pb2.CommitEvent) -> None:
        """All who wait hear it."""
        for report in self.reports:
            try:
                report(event)
            except Exception:
                log.exception("the outcome of a commit could not be told", extra=fields(self.manifest.version))

    def tell_protected(self) -> None:
        event = self.event()
        event.is_protected = True
        self.tell(event)

    def why_not_committed(self, refusals: Mapping[str, ReplicatorError]) -> ReplicatorError:
        """
        Args:
            refusals: of the nodes that did not store the manifest, by node id.
        """
        for error in refusals.values():
            if isinstance(error, StaleEpochError):
                return error
        reasons = [f"{node}: {error}" for node, error in sorted(refusals.items())]
        return CommitError(
            f"{self.manifest.version} needs its manifest on {self.needed} nodes, found it on {len(self.stored_on)} "
            f"({listed(sorted(self.stored_on))}); {listed(reasons)}. It may still become visible later, complete"
        )

    def why_not_protected(self, limit_s: float, awaited: Callable[[str], Sequence[str]]) -> ReplicationError:
        """
        Args:
            limit_s: for so long nothing of it was acknowledged.
            awaited: of an owner: the buddies that are to have its objects.
        """
        lacking = ((owner, listed(list(awaited(owner)))) for owner in self.missing_owners())
        reasons = [f"objects of {owner} by {whom or 'its buddies'}" for owner, whom in lacking]
        return ReplicationError(
            f"{self.manifest.version} is committed and not protected: for {limit_s:.1f} s nothing of it was "
            f"acknowledged, and still awaited are {listed(reasons)}. Its objects are intact on their owners; it is "
            "protected later when the buddies come back before a newer one of its kind is protected"
        )
