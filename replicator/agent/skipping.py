"""Saves that come faster than their copies are made: those in between are skipped, here and on all nodes.

The coordinator's agent decides (`decide.plan_skips`) when a container is committed, and tells all members. A node drops
a skipped container only once it has the manifest of the newer one, and never one that a restart is loading.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence

from replicator.agent.background import Background
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.manifests import Manifests
from replicator.agent.peers import PeerDirectory
from replicator.agent.replicate import Replicator
from replicator.agent.retention import Retention
from replicator.agent.telling import tell_all
from replicator.config import AgentConfig
from replicator.decide.backpressure import Skip
from replicator.decide.types import recency
from replicator.errors import (
    CommitError,
    InvalidIdError,
    NotFoundError,
    SaveSkippedError,
    StaleEpochError,
)
from replicator.ids import ContainerVersion, NodeAddress
from replicator.store import Store
from replicator.v1 import peer_pb2
from replicator.wire import Sender, sender_to_pb, version_to_pb

MAX_REMEMBERED = 4096
MAX_NAMED = 16
MAX_JOBS = 1024

log = logging.getLogger(__name__)


class Skipping:
    """Used in the event loop only, but for `check`."""

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
        background: Background,
        counters: Counters,
    ) -> None:
        self._deadline_s = config.deadline_s
        self._address = address
        self._store = store
        self._jobs = jobs
        self._peers = peers
        self._manifests = manifests
        self._replicator = replicator
        self._retention = retention
        self._background = background
        self._counters = counters
        self._skipped: OrderedDict[ContainerVersion, str] = OrderedDict()
        self._named: OrderedDict[str, tuple[int, deque[int]]] = OrderedDict()

    def named(self, job: str) -> tuple[int, tuple[int, ...]]:
        """How many saves of a job were skipped since this agent started, and the steps of the last ones."""
        count, steps = self._named.get(job, (0, deque()))
        return count, tuple(steps)

    def check(self, version: ContainerVersion) -> None:
        """Raises SaveSkippedError for a container that was skipped. May be called in any thread."""
        reason = self._skipped.get(version)
        if reason is not None:
            raise SaveSkippedError(reason)

    def skip(self, skip: Skip, newest: ContainerVersion, epoch: int) -> SaveSkippedError:
        """This node coordinates it, and it is skipped from now on; the error for those who wait for it."""
        error = SaveSkippedError(
            f"{skip.reason}. What is committed after it holds newer state; save less often, or wait"
        )
        if self._remember(skip.version, str(error)):
            members = [node for node in self._jobs.members(skip.version.container.job) if node != self._address]
            self._background.spawn("skip", skip.version, self._spread(skip.version, newest, epoch, error, members))
        return error

    async def skipped(self, sender: Sender, versions: Sequence[ContainerVersion], newest: ContainerVersion) -> None:
        """The coordinator says that these are superseded by `newest` before they had their copies.

        Raises:
            StaleEpochError: the sender's incarnation of the job was superseded.
            NotFoundError: the manifest of `newest` is not here (yet), so nothing older is given up.
            InvalidIdError: one of another job, or not older.
            CommitError: the sender is not the coordinator.
        """
        self._jobs.check(sender.job, sender.epoch)
        if newest.container.job != sender.job or any(
            one.container.job != sender.job or recency(one) >= recency(newest) for one in versions
        ):
            raise InvalidIdError(f"what {newest} supersedes must be older and of job {sender.job}")
        for version in (newest, *versions):
            manifest = self._manifests.get(version)
            if manifest is not None and manifest.coordinator_node_id != sender.node.node_id:
                raise CommitError(f"{version} is not coordinated by {sender.node.node_id}, who says that it is skipped")
            if manifest is None and version == newest:
                raise NotFoundError(f"no manifest of {newest} is stored on node {self._address.node_id} yet")
        for version in versions:
            reason = (
                f"{version} was skipped: superseded by {newest.container} before its copies were made, says node "
                f"{sender.node.node_id}"
            )
            if self._remember(version, reason):
                await self._drop(version, SaveSkippedError(reason))

    def _remember(self, version: ContainerVersion, reason: str) -> bool:
        """False when it was skipped before, or has its copies by now."""
        if version in self._skipped or self._store.is_protected(version):
            return False
        self._skipped[version] = reason
        while len(self._skipped) > MAX_REMEMBERED:
            self._skipped.popitem(last=False)
        job = version.container.job
        count, steps = self._named.pop(job, (0, deque(maxlen=MAX_NAMED)))
        steps.append(version.container.step)
        self._named[job] = (count + 1, steps)
        while len(self._named) > MAX_JOBS:
            self._named.popitem(last=False)
        self._counters.add("containers_skipped")
        log.warning(
            "a save was skipped, for they come faster than their copies are made", extra=fields(version, reason=reason)
        )
        return True

    async def _drop(self, version: ContainerVersion, error: SaveSkippedError) -> None:
        self._replicator.give_up(version, error)
        await asyncio.to_thread(self._retention.drop_skipped, version, str(error))

    async def _spread(
        self,
        version: ContainerVersion,
        newest: ContainerVersion,
        epoch: int,
        error: SaveSkippedError,
        members: Sequence[NodeAddress],
    ) -> None:
        request = peer_pb2.SkipRequest(
            sender=sender_to_pb(Sender(self._address.identity, version.container.job, epoch)),
            containers=[version_to_pb(version)],
            superseded_by=version_to_pb(newest),
        )
        await self._drop(version, error)
        await tell_all(
            self._peers,
            members,
            "PeerService/Skip",
            request,
            peer_pb2.SkipReply,
            about=version,
            awaited=f"giving up {version}, which was skipped",
            deadline_s=self._deadline_s,
            final=(StaleEpochError, CommitError, InvalidIdError),
            unheard="a node was not told of a skipped save",
        )
