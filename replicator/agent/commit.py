"""Commit and protection: the manifest on enough nodes, then every object acknowledged by every buddy.

    coordinator's agent   store manifest -> PutManifest to all members -> R+1 have it: committed
    owner's agent         has the manifest, and all its objects of it are acknowledged -> ReportReplicated
    coordinator's agent   committed, and all owners reported -> protected: persist -> MarkProtected to all members

Reports are not remembered over a restart. A coordinator that comes back sends its unprotected manifests again, and an
owner that gets one, again or for the first time, reports, or offers what is not acknowledged (own_copies.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from replicator.agent.abandon import Abandonment
from replicator.agent.background import Background
from replicator.agent.counters import Counters
from replicator.agent.distribution import Distribution
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.manifest_sender import ManifestSender
from replicator.agent.manifests import Manifests, check_own, fetch_manifest
from replicator.agent.open_container import OpenContainer, Report
from replicator.agent.own_copies import MAX_PAUSE_DEADLINES, OwnCopies
from replicator.agent.peers import PeerDirectory
from replicator.agent.replicate import Replicator
from replicator.agent.retention import Retention
from replicator.agent.skipping import Skipping
from replicator.agent.telling import tell_all
from replicator.agent.threads import run_to_end
from replicator.config import AgentConfig
from replicator.decide.backpressure import plan_skips
from replicator.decide.supersede import still_wanted, superseding
from replicator.decide.types import HeldObject, Manifest
from replicator.errors import (
    CommitError,
    NotFoundError,
    ReplicatorError,
    StaleEpochError,
    StoreError,
)
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, NodeAddress
from replicator.native import crc32c
from replicator.store import Store
from replicator.v1 import peer_pb2
from replicator.wire import Sender, manifest_to_bytes, sender_to_pb, version_to_pb

MAX_OPEN = 64
# A committed container of which nothing was acknowledged for so long: who waits for its protection is told.
UNPROTECTED_DEADLINES = 20
# Unprotected containers of a job that are taken up again after a restart, or when other nodes come and go; and as many
# that are not resumable.
RESUMED_PER_JOB = 2

log = logging.getLogger(__name__)


class Committer:
    """Used in the event loop only."""

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        store: Store,
        jobs: Jobs,
        peers: PeerDirectory,
        manifests: Manifests,
        replicator: Replicator,
        retention: Retention,
        abandonment: Abandonment,
        counters: Counters,
    ) -> None:
        self._config = config
        self._address = address
        self._store = store
        self._jobs = jobs
        self._peers = peers
        self._manifests = manifests
        self._retention = retention
        self._abandonment = abandonment
        self._counters = counters
        self._open: OrderedDict[ContainerVersion, OpenContainer] = OrderedDict()
        self._resumed: set[str] = set()  # jobs of which was taken up what was found at the start
        # Called when the manifest of a container was stored here.
        self.on_stored: Callable[[ContainerVersion], None] = lambda version: None
        self._background = Background()
        self.skipping = Skipping(
            config, address, store, jobs, peers, manifests, replicator, retention, self._background, counters
        )
        self._sender = ManifestSender(address, jobs, peers, manifests)
        self._distribution = Distribution(
            config,
            manifests,
            self._sender,
            self._background,
            lambda entry: self._open.get(entry.manifest.version) is entry,
            self._committed_if_due,
            self._fail,
        )
        peers.on_replaced.append(self._owner_replaced)
        self._own_copies = OwnCopies(
            config,
            address,
            store,
            jobs,
            peers,
            manifests,
            replicator,
            self._background,
            self.owner_reported,
            self._progressed,
        )

    # -- the coordinator

    async def commit(self, manifest: Manifest, deadline_s: float, report: Report) -> tuple[str, ...]:
        """Store the manifest here, then start sending it to all members; returns the ids of those asked.

        Its file is in the store when this returns; peers are not waited for. `report` is called in the loop,
        later: with `ok` and not `is_protected` when enough nodes have it, with `is_protected` when it is
        protected, or once with an error, also when it is committed and nothing of it is acknowledged any more.
        Idempotent for an identical manifest.

        Raises:
            StaleEpochError: a newer incarnation of the job is known.
            CommitError: another manifest of this version is stored here, an object of this node is missing, this
                node is not its coordinator, it was abandoned, or no rank of this node has joined the epoch.
            SaveSkippedError: a newer one superseded it.
            StoreFullError: no room for it.
        """
        version = manifest.version
        job = version.container.job
        self._jobs.check(job, manifest.epoch)
        if not self._jobs.has_joined(job, manifest.epoch):
            raise CommitError(
                f"{version} cannot be committed: no rank of node {self._address.node_id} has joined epoch "
                f"{manifest.epoch} of the job here, so its members are not known; call JoinJob first"
            )
        self.skipping.check(version)
        check_own(manifest, self._address.node_id, self._store)
        data = await asyncio.to_thread(manifest_to_bytes, manifest)
        with self._abandonment.storing(version):
            reach("commit.storing")
            await run_to_end(lambda: self._manifests.put(data, crc32c(data)))
        reach("commit.stored")
        # A newer incarnation that has just been told of no manifest may abandon this container on other nodes.
        self._jobs.check(job, manifest.epoch)
        members = self._others(job)
        asked = tuple(node.node_id for node in members)
        if self._store.is_protected(version):
            done = OpenContainer(manifest, manifest.epoch, 1, [report], {self._address.node_id}, committed=True)
            asyncio.get_running_loop().call_soon(done.tell_protected)
            return asked
        entry = self._open.get(version)
        if entry is None:
            entry = self._remember(manifest, manifest.epoch)
        entry.add(report)
        if entry.committed:
            asyncio.get_running_loop().call_soon(entry.tell, entry.event())
            self._watch(entry)
        self._distribution.begin(entry, members, deadline_s)
        self._own_copies.check(version)
        self.on_stored(version)
        return asked

    def owner_reported(self, version: ContainerVersion, owner: str, objects: Sequence[HeldObject]) -> None:
        """The owner says that these objects of its are acknowledged by all its buddies.

        Raises:
            NotFoundError: no manifest of the container is stored here, or the job's members are not known here (yet).
            CommitError: this node is not its coordinator and does not act in its place, or an object is not the
                manifest's.
        """
        self.skipping.check(version)
        manifest = self._require(version)
        if self._jobs.acting(version.container.job, manifest.coordinator_node_id) != self._address.node_id:
            raise CommitError(
                f"{version} is coordinated by {manifest.coordinator_node_id}, not by {self._address.node_id}"
            )
        epoch = self._jobs.epoch(version.container.job)
        if self._store.is_protected(version):
            # The owner would not have asked if it had been told.
            self._background.spawn("spread", version, self._spread_protection(version, epoch))
            return
        entry = self._open.get(version)
        if entry is None:
            if not self._jobs.is_member(version.container.job):
                raise NotFoundError(f"node {self._address.node_id} does not know the members of {version}'s job yet")
            entry = self._remember(manifest, epoch)
            self._distribution.begin(entry, self._others(version.container.job), self._config.deadline_s)
        expected = {one.name: one for one in manifest.entries}
        for held in objects:
            wanted = expected.get(held.name)
            if wanted is None or (wanted.size, wanted.crc32c, wanted.owner_node_id) != (held.size, held.crc32c, owner):
                raise CommitError(f"{owner} reports {held.name} of {version}, which is not in its manifest like that")
        reach("protect.reported")
        entry.acknowledged.setdefault(owner, set()).update(held.name for held in objects)
        self._progressed(version)
        self._protect_if_due(entry)

    def _owner_replaced(self, before: NodeAddress, now: NodeAddress) -> None:
        """What an owner reported may be gone with that incarnation: the one that is there now reports anew."""
        for entry in self._open.values():
            entry.acknowledged.pop(now.node_id, None)

    def _remember(self, manifest: Manifest, epoch: int) -> OpenContainer:
        members = len(self._others(manifest.version.container.job)) + 1
        entry = OpenContainer(manifest, epoch, min(manifest.replicas + 1, members), stored_on={self._address.node_id})
        self._open[manifest.version] = entry
        while len(self._open) > MAX_OPEN:
            oldest = next(iter(self._open))
            self._forget(oldest, f"more than {MAX_OPEN} containers are waiting to be protected")
        return entry

    def node_is_back(self, node_id: str) -> None:
        """A node answers, also again: it gets the manifests that it missed, and is told and offered what it was not."""
        for version, entry in list(self._open.items()):
            for node in self._others(version.container.job):
                if node.node_id == node_id and node_id not in entry.stored_on | entry.refused_by and entry.committed:
                    self._distribution.begin_to_one(entry, node)
        for job in self._jobs.names():
            if self._jobs.is_member(job) and any(node.node_id == node_id for node in self._jobs.members(job)):
                for version in self._unprotected(job):
                    self._own_copies.check(version)

    def _committed_if_due(self, entry: OpenContainer) -> None:
        if not entry.committed and len(entry.stored_on) >= entry.needed:
            entry.committed = True
            reach("commit.enough")
            self._counters.add("containers_committed")
            log.info("container committed", extra=fields(entry.manifest.version, nodes=len(entry.stored_on)))
            entry.tell(entry.event())
            self._watch(entry)
            self._protect_if_due(entry)
            self._skip_between(entry)

    def _skip_between(self, newest: OpenContainer) -> None:
        """What waits between the container whose copies are being made and the newest one is skipped."""
        waiting = {version: entry.manifest.resumable for version, entry in self._open.items() if not entry.stalled}
        for skip in plan_skips(waiting, newest.manifest.version, newest.manifest.resumable):
            entry = self._open.pop(skip.version)
            for what in ("distribute", "watch", "mark"):
                self._background.cancel(what, skip.version)
            self._own_copies.forget(skip.version)
            error = self.skipping.skip(skip, newest.manifest.version, newest.epoch)
            entry.tell(entry.failure(error))

    def _progressed(self, version: ContainerVersion) -> None:
        entry = self._open.get(version)
        if entry is not None:
            entry.progressed_at = asyncio.get_running_loop().time()
            if entry.stalled:
                self._watch(entry)

    def _watch(self, entry: OpenContainer) -> None:
        """Those who wait for its protection hear when it does not get any further. It may still be protected later."""
        limit_s = UNPROTECTED_DEADLINES * self._config.deadline_s
        loop = asyncio.get_running_loop()
        entry.progressed_at, entry.stalled = loop.time(), False
        version = entry.manifest.version

        def awaited(owner: str) -> Sequence[str]:
            if owner == self._address.node_id:
                return self._own_copies.lacking(version)
            return self._jobs.buddies_of(version.container.job, owner)

        async def watch() -> None:
            while True:
                left = entry.progressed_at + limit_s - loop.time()
                if left <= 0:
                    break
                await asyncio.sleep(left)
            entry.stalled = True
            self._fail(entry, entry.why_not_protected(limit_s, awaited))
            entry.reports = []

        self._background.spawn("watch", version, watch())

    def _protect_if_due(self, entry: OpenContainer) -> None:
        version = entry.manifest.version
        if not entry.committed or entry.missing_owners() or self._store.is_protected(version):
            return
        reach("protect.marking")
        try:
            marked = self._store.mark_protected(version)
        except StoreError as error:
            log.warning("a container cannot be marked as protected yet", extra=fields(version, reason=error))
            self._background.spawn("mark", version, self._mark_later(entry))
            return
        if not marked:
            return  # dropped, for a newer one was protected before this one was committed everywhere
        reach("protect.marked")
        self._counters.add("containers_protected")
        log.info("container protected", extra=fields(version))
        entry.tell_protected()
        self._background.spawn("spread", version, self._spread_protection(version, entry.epoch))

    async def _mark_later(self, entry: OpenContainer) -> None:
        """Less and less often, until there is room for the mark: nobody who has reported would do so again."""
        version = entry.manifest.version
        pauses = 1
        while self._open.get(version) is entry and not self._store.is_protected(version):
            await asyncio.sleep(self._config.deadline_s / 16 * pauses * (0.75 + random.random() / 2))
            pauses = min(2 * pauses, MAX_PAUSE_DEADLINES)
            self._protect_if_due(entry)

    async def _spread_protection(self, version: ContainerVersion, epoch: int) -> None:
        """Drop what is superseded here, and tell all members."""
        manifest = self._manifests.get(version)
        request = peer_pb2.MarkProtectedRequest(
            sender=sender_to_pb(Sender(self._address.identity, version.container.job, epoch)),
            container=version_to_pb(version),
            passed_on=manifest is None or manifest.coordinator_node_id != self._address.node_id,
        )
        await self._superseded(version)
        await tell_all(
            self._peers,
            self._others(version.container.job),
            "PeerService/MarkProtected",
            request,
            peer_pb2.MarkProtectedReply,
            about=version,
            awaited=f"taking note that {version} is protected",
            deadline_s=self._config.deadline_s,
            final=(StaleEpochError, CommitError),
            unheard="a node was not told that a container is protected",
            on_told=lambda: reach("protect.spread"),
        )

    # -- every member

    async def store_manifest(self, data: bytes, stated_crc: int, sender: Sender) -> None:
        """A coordinator sent a manifest: check it, store it, and report when all own objects are acknowledged.

        Raises:
            StaleEpochError: the sender's incarnation of the job was superseded.
            CorruptObjectError, InvalidIdError: it is damaged, or not of the sender's job.
            CommitError: another manifest of that version is stored here, or it was abandoned.
            SaveSkippedError: a newer one superseded it.
            StoreFullError: no room.
        """
        self._jobs.check(sender.job, sender.epoch)

        def check(version: ContainerVersion) -> None:
            self._abandonment.check(version)
            self.skipping.check(version)

        manifest = await asyncio.to_thread(self._manifests.put, data, stated_crc, sender.job, check)
        reach("commit.received")
        self._own_copies.check(manifest.version, again=True)
        self.on_stored(manifest.version)

    async def mark_protected(self, version: ContainerVersion, sender: Sender, *, passed_on: bool = False) -> None:
        """The coordinator says that the container is protected.

        Args:
            passed_on: somebody else says it, who was told so or acts in the coordinator's place.

        Raises:
            StaleEpochError: the sender's incarnation of the job was superseded.
            CommitError: the sender is not the container's coordinator, and does not pass it on.
            ReplicatorError: the manifest is not here and could not be fetched.
        """
        self._jobs.check(version.container.job, sender.epoch)
        manifest = self._manifests.get(version)
        if manifest is None:
            manifest = await self._fetch(version, self._peers.resolve(version.container.job, sender.node.node_id))
        if manifest.coordinator_node_id != sender.node.node_id and not passed_on:
            raise CommitError(
                f"{version} is coordinated by {manifest.coordinator_node_id}, so {sender.node.node_id} cannot say "
                "that it is protected"
            )
        if not self._store.is_protected(version) and self._store.mark_protected(version):
            reach("protect.received")
            log.info("container protected", extra=fields(version, coordinator=sender.node.node_id))
        self._background.spawn("superseded", version, self._superseded(version))

    async def _fetch(self, version: ContainerVersion, node: NodeAddress) -> Manifest:
        sender = self._peers.sender_of(version.container.job)
        data, manifest_crc = await fetch_manifest(self._peers, sender, version, node, self._config.rpc_deadline_s)
        return await asyncio.to_thread(self._manifests.put, data, manifest_crc)

    # -- start, end and memory

    def resume(self) -> None:
        """After a start: distribute and report again what is committed here and not protected.

        Jobs whose members are not known here wait until a rank joins them.
        """
        for job in self._jobs.names():
            if self._jobs.is_member(job):
                self._resume_job(job)

    def standing_changed(self) -> None:
        """Nodes are dead, drained or back: what is not protected may need other buddies, or another coordinator."""
        for job in self._jobs.names():
            if self._jobs.is_member(job):
                for version in self._unprotected(job):
                    self._own_copies.check(version, again=True)

    def report_for(self, version: ContainerVersion, owner: str) -> None:
        """The owner is gone, and its objects of the container have all their copies by this node's doing."""
        self._own_copies.report_for(version, owner)

    def joined(self, job: str) -> None:
        """The members of the job are known now."""
        if job not in self._resumed:
            self._resume_job(job)

    def _resume_job(self, job: str) -> None:
        self._resumed.add(job)
        for version in self._unprotected(job):
            manifest = self._require(version)
            if manifest.coordinator_node_id == self._address.node_id and version not in self._open:
                entry = self._remember(manifest, self._jobs.epoch(job))
                self._distribution.begin(entry, self._others(job), self._config.deadline_s)
            self._own_copies.check(version)

    def _unprotected(self, job: str) -> tuple[ContainerVersion, ...]:
        """The newest committed containers here that are not protected, and that nothing supersedes; a few at most."""
        return still_wanted(self._manifests.committed(job), self._manifests.protected(job), RESUMED_PER_JOB)

    async def close(self) -> None:
        """Give up what is under way; it is taken up by `resume` or by the trainers."""
        await self._background.close()

    async def _superseded(self, version: ContainerVersion) -> None:
        """The container is protected: forget what is kept in memory of it and of what is superseded, then drop that."""
        job = version.container.job
        self._open.pop(version, None)
        self._background.cancel("watch", version)
        self._background.cancel("send again", version)
        self._own_copies.forget(version)
        protected = self._manifests.protected(job)
        for older, entry in list(self._open.items()):
            newer = superseding(older, entry.manifest.resumable, protected)
            if newer is not None:
                self._forget(older, f"{newer} is newer and protected")
        await self._retention.run(job)

    def _forget(self, version: ContainerVersion, reason: str) -> None:
        entry = self._open.pop(version)
        for what in ("distribute", "watch", "send again", "mark"):
            self._background.cancel(what, version)
        self._fail(entry, CommitError(f"{version} was never protected: {reason}"))

    def _fail(self, entry: OpenContainer, error: ReplicatorError) -> None:
        log.warning("a container is not committed or not protected", extra=fields(entry.manifest.version, reason=error))
        if not entry.committed:
            self._counters.add("commits_failed")
            self._open.pop(entry.manifest.version, None)
        entry.tell(entry.failure(error))

    def _require(self, version: ContainerVersion) -> Manifest:
        manifest = self._manifests.get(version)
        if manifest is None:
            raise NotFoundError(f"no manifest of {version} is stored on node {self._address.node_id}")
        return manifest

    def _others(self, job: str) -> list[NodeAddress]:
        return self._sender.others(job)
