"""Drops what is superseded: after a container became protected, and first of all when the store is full.

What may go is decided by `decide.plan_retention` alone. What went is remembered, so that copies of it that arrive
late are refused and do not bring its directory back (F48).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.manifests import Manifests
from replicator.config import AgentConfig
from replicator.decide.retention import Drop, RetentionView, plan_retention
from replicator.decide.supersede import superseding
from replicator.decide.types import Manifest, describe, recency
from replicator.ids import ContainerVersion, NodeAddress
from replicator.store import Store

MAX_REMEMBERED = 4096

log = logging.getLogger(__name__)


class Retention:
    """`on_pressure` may be called in any thread, the rest in the event loop."""

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        store: Store,
        jobs: Jobs,
        manifests: Manifests,
        counters: Counters,
    ) -> None:
        self._keep_last = config.keep_last
        self._keep_every = config.keep_every
        self._node_id = address.node_id
        self._store = store
        self._jobs = jobs
        self._manifests = manifests
        self._counters = counters
        self._dropped: OrderedDict[ContainerVersion, str] = OrderedDict()
        # Of each job what its last lookup found, and the newer ones that it could not take.
        self._recoverable: dict[str, tuple[ContainerVersion, frozenset[ContainerVersion]]] = {}
        self._observed: dict[str, ContainerVersion] = {}
        self._short: dict[str, dict[ContainerVersion, bool]] = {}

    async def run(self, job: str) -> int:
        """Drop what `plan_retention` allows for the job; returns how many containers."""
        drops = plan_retention(self._views(job), self._keep_last, self._keep_every)
        for drop in drops:
            await asyncio.to_thread(self._drop, drop)
        return len(drops)

    def on_pressure(self, wanted_bytes: int) -> int:
        """`Store.on_pressure`: drop superseded containers, oldest first; returns the bytes that were freed.

        What `keep_last` and `keep_every` would keep beside the newest protected container is given up too. Nothing is
        dropped when all of it together is not enough: what asked would fail all the same, and the containers be lost
        for nothing.
        """
        views = [view for job in self._jobs_held() for view in self._views(job, pressed=True)]
        drops = plan_retention(views, keep_last=1)
        if sum(self._store.bytes_of(drop.version) for drop in drops) < wanted_bytes:
            return 0
        freed = 0
        for drop in drops:
            if freed >= wanted_bytes:
                break
            freed += self._drop(drop)
            self._counters.add("containers_dropped_under_pressure")
        return freed

    def refusal(self, version: ContainerVersion) -> str:
        """Why this node does not take copies of `version` any more; empty when it does."""
        reason = self._dropped.get(version)
        if reason is not None:
            return f"it was dropped here: {reason}"
        if self._keep_every and version.container.step % self._keep_every == 0:
            return ""
        job = version.container.job
        protected = [held for held in self._store.versions(job) if self._is_protected(held)]
        resumable = sorted((held for held in protected if self._manifests.is_resumable(held)), key=recency)
        if len(resumable) < self._keep_last:
            return ""
        floor = resumable[-self._keep_last]
        if recency(version) >= recency(floor):
            return ""
        short = self._short.get(job, {})
        if version in self._gone_on_from(job, [held for held in protected if held not in short]):
            return ""
        return (
            f"{describe(version)} is older than {describe(floor)}, the oldest of the {self._keep_last} protected "
            "checkpoints that are kept here"
        )

    def was_dropped(self, version: ContainerVersion) -> bool:
        """Whether this node has dropped the container since it started, and so wants nothing of it."""
        return version in self._dropped

    def drop_abandoned(self, version: ContainerVersion, reason: str) -> int:
        """Drop what is here of a container that will never be committed; the bytes that were freed. In any thread."""
        return self._drop(Drop(version, reason))

    def drop_skipped(self, version: ContainerVersion, reason: str) -> int:
        """Drop what is here of a container that a newer committed one supersedes, though neither has its copies yet.

        Not one that a restart found or brings here: that goes when a newer one is protected. In any thread.
        """
        job = version.container.job
        recoverable, _ = self._recoverable.get(job, (None, None))
        retrieved, _ = self._jobs.retrieved(job)
        if version in (retrieved, self._observed.get(job), recoverable):
            return 0
        return self._drop(Drop(version, reason))

    def note_recoverable(self, version: ContainerVersion, passed_over: Iterable[ContainerVersion]) -> None:
        """A job found this container to be recoverable: keep it until it finds another, or protects a newer one.

        Args:
            passed_over: newer ones that cannot be restored. They do not take its place, also when this node hears
                only later that they had been protected.
        """
        self._recoverable[version.container.job] = (version, frozenset(passed_over))

    def note_retrieved(self, version: ContainerVersion, *, observer: bool = False) -> None:
        """A trainer brings this container here to load it: keep it until something is protected in its own epoch.

        Args:
            observer: of another job. That one goes on from something else, which is kept beside it.
        """
        if observer:
            self._observed[version.container.job] = version
        else:
            self._jobs.note_retrieved(version)
            # It may have been dropped here, and be brought back from others.
            self._dropped.pop(version, None)

    def note_short(self, job: str, short: Mapping[ContainerVersion, bool]) -> None:
        """Containers that lost copies, and whether objects of them have none left. In any thread.

        They supersede nothing until they have all copies again; when the store is full, those that lost everything.
        """
        self._short[job] = dict(short)

    def _views(self, job: str, *, pressed: bool = False) -> list[RetentionView]:
        versions = self._store.versions(job)
        short = self._short.get(job, {})
        marked = [version for version in versions if self._is_protected(version)]
        protected = [version for version in marked if not (short.get(version, False) if pressed else version in short)]
        newest_epoch = self._newest_epoch(protected)
        observed = self._observed.get(job)
        recoverable = self._found_recoverable(job)
        pinned = self._gone_on_from(job, protected)
        views = []
        for version in versions:
            manifest = self._manifests.get(version)
            is_protected = version in protected
            views.append(
                RetentionView(
                    version,
                    committed=manifest is not None,
                    is_protected=is_protected,
                    was_protected=version in marked and not pressed,
                    complete_locally=manifest is not None and is_protected and self._is_complete(manifest),
                    recoverable=version == recoverable,
                    pinned=version in pinned or (version == observed and version.epoch >= newest_epoch),
                    resumable=manifest is None or manifest.resumable,
                )
            )
        return views

    def _is_complete(self, manifest: Manifest) -> bool:
        """Whether this node has everything of the container that placement gives it."""
        job = manifest.version.container.job
        owners = {entry.owner_node_id for entry in manifest.entries}
        me = self._node_id
        mine = {owner for owner in owners if owner == me or me in self._jobs.buddies_of(job, owner)}
        held = self._store.objects(manifest.version)
        for entry in manifest.entries:
            if entry.owner_node_id in mine:
                info = held.get(entry.name)
                if info is None or info.size != entry.size or info.crc32c != entry.crc32c:
                    return False
        return True

    def _gone_on_from(self, job: str, protected: Iterable[ContainerVersion]) -> set[ContainerVersion]:
        """What the job goes on from: its last lookup found it, or its trainers loaded it, and nothing replaces it yet.

        Args:
            protected: what counts as that.
        """
        recoverable = self._found_recoverable(job)
        found = set() if recoverable is None else {recoverable}
        retrieved, since = self._jobs.retrieved(job)
        if retrieved is not None and max(since, retrieved.epoch + 1) > self._newest_epoch(protected):
            found.add(retrieved)
        return found

    def _found_recoverable(self, job: str) -> ContainerVersion | None:
        """What the last lookup of the job found; None also when something newer was protected since."""
        version, passed_over = self._recoverable.get(job, (None, frozenset[ContainerVersion]()))
        if version is None:
            return None
        protected = self._manifests.protected(job)
        others = {one: resumable for one, resumable in protected.items() if one not in passed_over}
        newer = superseding(version, self._manifests.is_resumable(version), others)
        # It was acknowledged by all its holders later than that.
        return version if newer is None else None

    def _newest_epoch(self, protected: Iterable[ContainerVersion]) -> int:
        return max((version.epoch for version in protected if self._manifests.is_resumable(version)), default=0)

    def _is_protected(self, version: ContainerVersion) -> bool:
        return self._store.is_protected(version) and self._store.manifest(version) is not None

    def _jobs_held(self) -> list[str]:
        return sorted({version.container.job for version in self._store.versions()})

    def _drop(self, drop: Drop) -> int:
        """Drop one container; the bytes that were freed."""
        self._dropped[drop.version] = drop.reason
        while len(self._dropped) > MAX_REMEMBERED:
            self._dropped.popitem(last=False)
        size = self._store.drop(drop.version)
        self._counters.add("containers_dropped")
        log.info("container dropped", extra=fields(drop.version, reason=drop.reason, bytes=size))
        return size
