"""Brings the manifest of a container that this node coordinates to all members, also to those that come back late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from replicator.agent.background import Background
from replicator.agent.manifest_sender import FINAL, ManifestSender
from replicator.agent.manifests import Manifests
from replicator.agent.open_container import OpenContainer
from replicator.agent.own_copies import MAX_PAUSE_DEADLINES
from replicator.config import AgentConfig
from replicator.errors import CommitError, ReplicatorError
from replicator.faultpoints import reach
from replicator.ids import NodeAddress


class Distribution:
    """Used in the event loop only.

    Args:
        is_open: whether the container is still waited for.
        stored: called when one more node has the manifest, also this one.
        fail: called when too few nodes have it.
    """

    def __init__(
        self,
        config: AgentConfig,
        manifests: Manifests,
        sender: ManifestSender,
        background: Background,
        is_open: Callable[[OpenContainer], bool],
        stored: Callable[[OpenContainer], None],
        fail: Callable[[OpenContainer, ReplicatorError], None],
    ) -> None:
        self._config = config
        self._manifests = manifests
        self._sender = sender
        self._background = background
        self._is_open = is_open
        self._stored = stored
        self._fail = fail

    def begin(self, entry: OpenContainer, members: Sequence[NodeAddress], deadline_s: float) -> None:
        """Send it to all members, unless that is under way."""
        if entry.distribution is None or entry.distribution.done():
            entry.distribution = self._background.spawn(
                "distribute", entry.manifest.version, self._send_to_all(entry, members, deadline_s)
            )

    async def _send_to_all(self, entry: OpenContainer, members: Sequence[NodeAddress], deadline_s: float) -> None:
        version = entry.manifest.version
        if self._manifests.data(version) is None:
            self._fail(entry, CommitError(f"{version}: the manifest that was stored on this node is gone"))
            return
        self._stored(entry)
        asked = [node for node in members if node.node_id not in entry.stored_on]
        errors = await asyncio.gather(*(self._send(entry, node, deadline_s) for node in asked))
        refusals = {node.node_id: error for node, error in zip(asked, errors, strict=True) if error is not None}
        if not entry.committed:
            self._fail(entry, entry.why_not_committed(refusals))
        elif refusals:
            self._background.spawn("send again", version, self._send_again(entry))

    async def _send(self, entry: OpenContainer, node: NodeAddress, deadline_s: float) -> ReplicatorError | None:
        error = await self._sender.send(entry.manifest.version, entry.epoch, node, deadline_s)
        if isinstance(error, FINAL):
            entry.refused_by.add(node.node_id)
        if error is None:
            entry.stored_on.add(node.node_id)
            reach("commit.sent")
            self._stored(entry)
        return error

    async def _send_again(self, entry: OpenContainer) -> None:
        """Less and less often, to members that were away for the whole deadline: as owners they would never report."""
        version = entry.manifest.version
        pauses = 1
        while True:
            await asyncio.sleep(self._config.deadline_s * pauses * (0.75 + random.random() / 2))
            pauses = min(2 * pauses, MAX_PAUSE_DEADLINES)
            settled = entry.stored_on | entry.refused_by
            lacking = [node for node in self._sender.others(version.container.job) if node.node_id not in settled]
            if not self._is_open(entry) or not lacking:
                return
            await asyncio.gather(*(self._send(entry, node, self._config.rpc_deadline_s) for node in lacking))

    def begin_to_one(self, entry: OpenContainer, node: NodeAddress) -> None:
        """Send it to a member that is back and lacks it, unless that is under way."""
        what = f"manifest to {node.node_id}"
        self._background.spawn(what, entry.manifest.version, self._send_to_one(entry, node))

    async def _send_to_one(self, entry: OpenContainer, node: NodeAddress) -> None:
        await self._send(entry, node, self._config.deadline_s)
