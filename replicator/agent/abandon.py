"""Saves that failed: no manifest of them will ever be, so their objects go, here and on all nodes.

Only who coordinates an attempt knows that it will not be committed; a later incarnation of the job knows it of the
attempts of earlier ones, of which no node has a manifest. Nothing with a manifest goes, and nothing for lack of
contact: a node that is not told keeps what it has until it is told of the next one, or something newer is protected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from replicator.agent.background import Background
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.peers import PeerDirectory
from replicator.agent.replicate import Replicator
from replicator.agent.retention import Retention
from replicator.agent.telling import tell_all
from replicator.config import AgentConfig
from replicator.errors import CommitError, InvalidIdError, StaleEpochError
from replicator.ids import ContainerVersion, NodeAddress
from replicator.store import Store
from replicator.v1 import peer_pb2
from replicator.wire import Sender, sender_to_pb, version_to_pb

MAX_REMEMBERED = 4096
# In one message: the newest ones, so that a node which missed some hears of them with the next.
MAX_TOLD = 256

log = logging.getLogger(__name__)


class Abandonment:
    """Used in the event loop only."""

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        store: Store,
        jobs: Jobs,
        peers: PeerDirectory,
        replicator: Replicator,
        retention: Retention,
        counters: Counters,
    ) -> None:
        self._config = config
        self._address = address
        self._store = store
        self._jobs = jobs
        self._peers = peers
        self._replicator = replicator
        self._retention = retention
        self._counters = counters
        self._background = Background()
        self._abandoned: OrderedDict[ContainerVersion, str] = OrderedDict()
        self._storing: dict[ContainerVersion, int] = {}

    # -- who knows that a save failed

    async def abandon(
        self,
        job: str,
        epoch: int,
        versions: Sequence[ContainerVersion],
        reason: str,
        nodes: Sequence[NodeAddress] | None = None,
    ) -> list[ContainerVersion]:
        """Drop what this node has of attempts that will not be committed, and let the other nodes do the same.

        Other nodes are told in the background. Of an attempt with a manifest, or whose manifest is just being stored,
        nothing is done.

        Args:
            epoch: of the incarnation that says so.
            nodes: who is told; default: the members of the job.

        Returns:
            Those that are abandoned, now or before.

        Raises:
            InvalidIdError: an attempt of another job, or of a later incarnation.
        """
        given_up = await self.drop(job, epoch, versions, reason)
        chosen = self._jobs.members(job) if nodes is None else nodes
        told = [node for node in chosen if node.node_id != self._address.node_id]
        if given_up and told and not self._background.closed:
            newest = max(given_up, key=lambda version: version.generation)
            self._background.spawn("abandon", newest, self._tell_all(job, epoch, given_up, told))
        return given_up

    async def drop(
        self, job: str, epoch: int, versions: Sequence[ContainerVersion], reason: str
    ) -> list[ContainerVersion]:
        """Drop what this node has of attempts that will not be committed, and refuse what comes of them later.

        Returns those that are abandoned here, now or before. Raises like `abandon`.
        """
        for version in versions:
            if version.container.job != job or version.epoch > epoch:
                raise InvalidIdError(f"{version} is not for epoch {epoch} of job {job} to abandon")
        given_up = []
        for version in dict.fromkeys(versions):
            if version in self._storing or self._store.manifest(version) is not None:
                log.warning("what has a manifest is not abandoned", extra=fields(version))
                continue
            given_up.append(version)
            is_new = version not in self._abandoned
            if is_new:
                self._abandoned[version] = reason
                self._counters.add("containers_abandoned")
                while len(self._abandoned) > MAX_REMEMBERED:
                    self._abandoned.popitem(last=False)
            self._replicator.forget(version)
            # It is told of again with every later one; what is refused since the first time is not here.
            if is_new or self._store.objects(version):
                await asyncio.to_thread(self._retention.drop_abandoned, version, reason)
        return given_up

    # -- who stores something of a container

    def check(self, version: ContainerVersion) -> None:
        """Raises CommitError for an attempt that was abandoned. May be called in any thread."""
        reason = self._abandoned.get(version)
        if reason is not None:
            raise CommitError(f"{version} was abandoned: {reason}; begin a new attempt to save the step")

    def drop_late(self, version: ContainerVersion) -> None:
        """Something of it was published without the agent: gone again, when it was abandoned. Raises like `check`."""
        reason = self._abandoned.get(version)
        if reason is not None:
            self._retention.drop_abandoned(version, reason)
            self.check(version)

    @contextlib.contextmanager
    def storing(self, version: ContainerVersion) -> Iterator[None]:
        """While a manifest is being stored its container cannot be abandoned. Raises CommitError when it is already."""
        self.check(version)
        self._storing[version] = self._storing.get(version, 0) + 1
        try:
            yield
        finally:
            self._storing[version] -= 1
            if not self._storing[version]:
                del self._storing[version]

    async def close(self) -> None:
        """Give up telling others."""
        await self._background.close()

    # -- parts

    async def _tell_all(
        self, job: str, epoch: int, given_up: Sequence[ContainerVersion], nodes: Sequence[NodeAddress]
    ) -> None:
        # Earlier ones again: who was away then may be back now.
        known = [version for version in self._abandoned if version.container.job == job and version.epoch <= epoch]
        containers = list(dict.fromkeys([*given_up, *reversed(known)]))[:MAX_TOLD]
        request = peer_pb2.AbandonRequest(
            sender=sender_to_pb(Sender(self._address.identity, job, epoch)),
            containers=[version_to_pb(version) for version in containers],
        )
        await tell_all(
            self._peers,
            nodes,
            "PeerService/Abandon",
            request,
            peer_pb2.AbandonReply,
            about=containers[0],
            awaited=f"giving up {len(containers)} saves of job {job} that failed",
            deadline_s=self._config.deadline_s,
            final=(StaleEpochError, InvalidIdError),
            unheard="a node was not told of a failed save",
        )
