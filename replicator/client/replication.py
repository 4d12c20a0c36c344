"""Copies of finished objects on buddy nodes, and whole objects back from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from replicator.client.local_agent import LocalAgent
from replicator.client.outstanding import ReplicaInfo
from replicator.client.plan import Plan, plan_from_pb
from replicator.client.retrieval import Retrieved, lookup, retrieve
from replicator.client.segments import SegmentObject
from replicator.decide.types import ObjectSource
from replicator.errors import ObjectNotFoundError
from replicator.ids import ContainerVersion, ObjectVersion


class ReplicationManager:
    """Of one session. Thread-safe.

    Futures are resolved in the thread that listens to the agent: callbacks on them must be short.
    """

    def __init__(self, agent: LocalAgent, job: str, epoch: int, deadline_s: float) -> None:
        self._agent = agent
        self._job = job
        self._epoch = epoch
        self._deadline_s = deadline_s

    def async_replicate(self, what: SegmentObject | ObjectVersion) -> list[Future[ReplicaInfo]]:
        """Have one object copied to every buddy of this node; one future per buddy, none where there is no buddy.

        Takes one call to the agent of this node (two, when `what` is still being written: it is sealed first) and
        never waits for a peer. Each future gives what the buddy verified, or raises why there is no copy.
        Asking again for an object that is replicated already costs nothing and gives the outcome again.

        Raises:
            ReplicatorError: the object cannot be sealed, or the agent refused (StaleEpochError, for instance).
        """
        one = what.seal().object if isinstance(what, SegmentObject) else what
        return self._agent.replicate([one], self._epoch)[one]

    def async_replicate_many(
        self, what: Sequence[SegmentObject | ObjectVersion]
    ) -> dict[ObjectVersion, list[Future[ReplicaInfo]]]:
        """Like `async_replicate` for many objects: one call to the agent for thousands, outcomes many at a time.

        Returns:
            For each object one future per buddy.

        Raises:
            ReplicatorError: an object cannot be sealed, or the agent refused; no copy is waited for then.
        """
        objects = [one.seal().object if isinstance(one, SegmentObject) else one for one in what]
        return self._agent.replicate(objects, self._epoch)

    def sync_bulk_retrieve(
        self,
        what: Plan | Sequence[ObjectVersion],
        *,
        deadline_s: float | None = None,
        on_progress: Callable[[str, int], None] | None = None,
    ) -> list[Retrieved]:
        """Bring whole objects (all of a plan, or those given) into this node's store, verified, and wait for them.

        Objects that are here already cost nothing. Many are pulled at once, from many nodes.

        Args:
            deadline_s: without progress for this long, a source is given up; default: the session's.
            on_progress: called with an object's name and how many of its bytes are here.

        Returns:
            One item per object, in their order.

        Raises:
            NoRecoverableCheckpointError: a plan that found nothing.
            ObjectNotFoundError: no node holds one of the objects given.
            ReplicatorError: an object that no source could give, with all of its reasons.
        """
        deadline_s = deadline_s or self._deadline_s
        if isinstance(what, Plan):
            return retrieve(self._agent, what.require(), what.sources, self._epoch, deadline_s, on_progress)
        by_version: dict[ContainerVersion, list[ObjectVersion]] = {}
        for one in what:
            by_version.setdefault(one.version, []).append(one)
        found: dict[ObjectVersion, Retrieved] = {}
        for version, objects in by_version.items():
            sources = self._sources(version, objects, deadline_s)
            for item in retrieve(self._agent, version, sources, self._epoch, deadline_s, on_progress):
                found[item.object] = item
        return [found[one] for one in what]

    def _sources(
        self, version: ContainerVersion, objects: Sequence[ObjectVersion], deadline_s: float
    ) -> list[ObjectSource]:
        step = version.container.step
        plan = plan_from_pb(lookup(self._agent, version.container.job, self._epoch, deadline_s / 3, step))
        if plan.version != version:
            raise ObjectNotFoundError(f"no node offers {version}: {plan.reason}")
        sources = {source.name: source for source in plan.sources}
        for one in objects:
            if one.name not in sources:
                raise ObjectNotFoundError(f"{version} has no object {one.name!r}")
        return [sources[one.name] for one in objects]
