"""Sends one manifest to one member, with retries."""

from __future__ import annotations

import logging

from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.manifests import Manifests
from replicator.agent.patience import repeat
from replicator.agent.peers import PeerDirectory
from replicator.errors import CommitError, NotFoundError, ReplicatorError, SaveSkippedError, StaleEpochError
from replicator.ids import ContainerVersion, NodeAddress
from replicator.parts import allowance_s
from replicator.v1 import peer_pb2, types_pb2
from replicator.wire import Sender, manifest_chunks

# A member that says so is not asked again.
FINAL = (StaleEpochError, CommitError, SaveSkippedError)

log = logging.getLogger(__name__)


class ManifestSender:
    """Used in the event loop only."""

    def __init__(self, address: NodeAddress, jobs: Jobs, peers: PeerDirectory, manifests: Manifests) -> None:
        self._address = address
        self._jobs = jobs
        self._peers = peers
        self._manifests = manifests

    def others(self, job: str) -> list[NodeAddress]:
        """The members of the job but this node."""
        return [node for node in self._jobs.members(job) if node.node_id != self._address.node_id]

    async def send(
        self, version: ContainerVersion, epoch: int, node: NodeAddress, deadline_s: float
    ) -> ReplicatorError | None:
        """Have a member store the manifest that is stored here. Returns why it did not."""
        job = version.container.job
        sender = Sender(self._address.identity, job, epoch)
        stored = self._manifests.data(version)
        if stored is None:
            return NotFoundError(f"the manifest of {version} is not on node {self._address.node_id} any more")

        async def once() -> None:
            await self._peers.upload(
                self._peers.resolve(job, node.node_id),
                "PeerService/PutManifest",
                lambda: manifest_chunks(*stored, sender),
                types_pb2.ManifestChunk,
                peer_pb2.PutManifestReply,
                awaited=f"storing the manifest of {version}",
                deadline_s=self._peers.rpc_deadline_s + allowance_s(len(stored[0])),
            )

        try:
            await repeat(once, deadline_s, final=FINAL)
        except ReplicatorError as error:
            log.warning("a node did not store the manifest", extra=fields(version, peer=node.node_id, reason=error))
            return error
        return None
