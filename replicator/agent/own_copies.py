"""The owner's side of protection: when its objects of a container have all their copies, the coordinator is told.

Which comes first, the manifest or the last acknowledgement, does not matter.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from replicator.agent.background import Background
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.manifests import Manifests
from replicator.agent.patience import repeat
from replicator.agent.peers import PeerDirectory
from replicator.agent.replicate import Replicator
from replicator.config import AgentConfig
from replicator.decide.supersede import superseding
from replicator.decide.types import HeldObject, Manifest
from replicator.errors import CommitError, ReplicatorError, SaveSkippedError, StaleEpochError
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, NodeAddress, ObjectVersion
from replicator.store import Store
from replicator.v1 import peer_pb2
from replicator.wire import OBJECTS_PER_INVENTORY_MESSAGE, held_to_pb, sender_to_pb, version_to_pb

MAX_REPORTED = 64
# What lacks a copy is offered again after one deadline, then after twice that, and so on up to so many.
MAX_PAUSE_DEADLINES = 10

log = logging.getLogger(__name__)


class OwnCopies:
    """Used in the event loop only.

    Args:
        tell_here: takes the report where this node is itself the coordinator: version, owner, objects.
        progressed: told of a container whenever something of this node was acknowledged.
    """

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        store: Store,
        jobs: Jobs,
        peers: PeerDirectory,
        manifests: Manifests,
        replicator: Replicator,
        background: Background,
        tell_here: Callable[[ContainerVersion, str, Sequence[HeldObject]], None],
        progressed: Callable[[ContainerVersion], None],
    ) -> None:
        self._deadline_s = config.deadline_s
        self._node_id = address.node_id
        self._store = store
        self._jobs = jobs
        self._peers = peers
        self._manifests = manifests
        self._replicator = replicator
        self._background = background
        self._tell_here = tell_here
        self._progressed = progressed
        self._reported: OrderedDict[ContainerVersion, None] = OrderedDict()
        self._mine: tuple[Manifest, list[HeldObject]] | None = None  # of the manifest that was asked for last
        replicator.on_acknowledged = self._on_acknowledged
        replicator.on_lost = self.check

    def check(self, version: ContainerVersion, *, again: bool = False) -> None:
        """Report to the coordinator when all objects of this node are acknowledged; offer those that are not.

        Args:
            again: report also when that was done before: the coordinator may have forgotten.
        """
        manifest = self._manifests.get(version)
        if manifest is None or self._store.is_protected(version) or self._background.closed:
            return
        mine = self._of_this_node(manifest)
        if not mine:
            return
        if again:
            # Also when the report has to wait for copies that are lacking now.
            self._reported.pop(version, None)
        missing = self._missing(version, mine)
        if missing or not self._holds(version, mine):
            self._replicator.ensure(missing, self._jobs.epoch(version.container.job))
        elif version not in self._reported:
            self._background.spawn("report", version, self._report(manifest, mine))
        else:
            return
        self._background.spawn("look again", version, self._look_again(version))

    def report_for(self, version: ContainerVersion, owner: str) -> None:
        """Report in the place of an owner that is gone: all its objects have their copies, by this node's doing."""
        manifest = self._manifests.get(version)
        if manifest is None or self._store.is_protected(version) or self._background.closed:
            return
        held = [HeldObject(one.name, one.size, one.crc32c) for one in manifest.entries if one.owner_node_id == owner]
        self._background.spawn(f"report for {owner}", version, self._report_for(manifest, owner, held))

    def forget(self, version: ContainerVersion) -> None:
        """The container is protected."""
        self._replicator.forget(version)
        self._reported.pop(version, None)
        self._background.cancel("look again", version)

    def lacking(self, version: ContainerVersion) -> tuple[str, ...]:
        """The buddies of this node that have not acknowledged all its objects of the container."""
        manifest = self._manifests.get(version)
        names = [held.name for held in self._of_this_node(manifest)] if manifest is not None else []
        return self._replicator.lacking(version, names)

    async def _look_again(self, version: ContainerVersion) -> None:
        """A buddy that was given up may come back, and a coordinator too, as long as nothing newer supersedes it."""
        job = version.container.job
        pauses = 1
        while True:
            await asyncio.sleep(self._deadline_s * pauses * (0.75 + random.random() / 2))
            pauses = min(2 * pauses, MAX_PAUSE_DEADLINES)
            manifest = self._manifests.get(version)
            if manifest is None or self._store.is_protected(version):
                return
            if superseding(version, manifest.resumable, self._manifests.protected(job)) is not None:
                return
            mine = self._of_this_node(manifest)
            missing = self._missing(version, mine)
            if missing or not self._holds(version, mine):
                self._replicator.ensure(missing, self._jobs.epoch(job))
            elif version in self._reported:
                return
            else:
                self._background.spawn("report", version, self._report(manifest, mine))

    def _missing(self, version: ContainerVersion, held: Sequence[HeldObject]) -> list[ObjectVersion]:
        return self._replicator.unacknowledged(version, (one.name for one in held))

    def _holds(self, version: ContainerVersion, mine: Sequence[HeldObject]) -> bool:
        """Whether this node's own copies are here. One that lost them, and came back, may have no buddy to ask."""
        held = self._store.objects(version)
        return all(
            (info := held.get(one.name)) is not None and (info.size, info.crc32c) == (one.size, one.crc32c)
            for one in mine
        )

    def _of_this_node(self, manifest: Manifest) -> list[HeldObject]:
        if self._mine is None or self._mine[0] is not manifest:
            held = [
                HeldObject(entry.name, entry.size, entry.crc32c)
                for entry in manifest.entries
                if entry.owner_node_id == self._node_id
            ]
            self._mine = manifest, held
        return self._mine[1]

    def _on_acknowledged(self, version: ContainerVersion) -> None:
        self._progressed(version)
        manifest = self._manifests.get(version)
        if manifest is None or self._store.is_protected(version):
            return
        # It is called for every few objects, so it may not look at all of them each time.
        mine = self._of_this_node(manifest)
        if self._replicator.may_be_whole(version, len(mine)) and not self._missing(version, mine):
            self.check(version)

    async def _report(self, manifest: Manifest, held: Sequence[HeldObject]) -> None:
        version = manifest.version
        told = False

        async def once() -> None:
            nonlocal told
            # A buddy that was replaced meanwhile has nothing any more: then its copies are made again first.
            job = version.container.job
            await asyncio.gather(*(self._peers.confirm(job, buddy) for buddy in self._jobs.buddies(job)))
            if self._missing(version, held) or not self._holds(version, held):
                return
            reach("protect.reporting")
            for start in range(0, len(held), OBJECTS_PER_INVENTORY_MESSAGE):
                await self._tell(manifest, held[start : start + OBJECTS_PER_INVENTORY_MESSAGE])
            told = True

        try:
            await repeat(once, self._deadline_s, final=(StaleEpochError, CommitError, SaveSkippedError))
        except ReplicatorError as error:
            log.warning("the coordinator was not told of copies", extra=fields(version, reason=error))
        if told:
            self._reported[version] = None
            while len(self._reported) > MAX_REPORTED:
                self._reported.popitem(last=False)

    async def _report_for(self, manifest: Manifest, owner: str, held: Sequence[HeldObject]) -> None:
        async def once() -> None:
            for start in range(0, len(held), OBJECTS_PER_INVENTORY_MESSAGE):
                await self._tell(manifest, held[start : start + OBJECTS_PER_INVENTORY_MESSAGE], owner)

        try:
            await repeat(once, self._deadline_s, final=(StaleEpochError,))
        except ReplicatorError as error:
            log.warning(
                "the coordinator was not told of copies", extra=fields(manifest.version, owner=owner, reason=error)
            )

    async def _tell(self, manifest: Manifest, part: Sequence[HeldObject], owner: str = "") -> None:
        version = manifest.version
        job = version.container.job
        coordinator = self._jobs.acting(job, manifest.coordinator_node_id)
        if coordinator == self._node_id:
            self._tell_here(version, owner or self._node_id, part)
            return
        request = peer_pb2.ReportReplicatedRequest(
            sender=sender_to_pb(self._peers.sender_of(job)),
            container=version_to_pb(version),
            objects=[held_to_pb(one) for one in part],
            owner_node_id=owner,
        )
        await self._peers.unary(
            self._peers.resolve(job, coordinator),
            "PeerService/ReportReplicated",
            request,
            peer_pb2.ReportReplicatedReply,
            awaited=f"taking note that {len(part)} objects of {version} have all their copies",
        )
