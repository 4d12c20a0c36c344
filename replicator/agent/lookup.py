"""Recovery lookup: everybody is asked what they hold, with one deadline, and the pure decision is made here.

Any agent can answer it (F21). Asked are the members of the job, nodes remembered from earlier epochs, configured peers,
and whom those know of (F13). Who refuses is asked again where that may give a newer checkpoint: its agent may just be
starting. Who does not answer in time is named in the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from replicator.agent.abandon import MAX_TOLD, Abandonment
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.lookup_round import Fetched, Round
from replicator.agent.manifest_sender import FINAL, ManifestSender
from replicator.agent.manifests import Manifests
from replicator.agent.peers import PeerDirectory
from replicator.agent.retention import Retention
from replicator.agent.telling import tell_all
from replicator.config import AgentConfig
from replicator.decide.asking import worth_asking_again
from replicator.decide.choose_step import choose_step
from replicator.decide.types import (
    ContainerInventory,
    Decision,
    HeldObject,
    Manifest,
    NodeInventory,
    Unanswered,
    recency,
)
from replicator.errors import ReplicatorError
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, NodeAddress, validate_job, validate_step
from replicator.store import Store
from replicator.v1 import peer_pb2, types_pb2
from replicator.wire import (
    node_address_to_pb,
    rejected_to_pb,
    sender_to_pb,
    source_to_pb,
    unanswered_to_pb,
    version_to_pb,
)

log = logging.getLogger(__name__)


class Lookup:
    """Used in the event loop only.

    Attributes:
        is_dead: of a node id: it has been silent for so long that nobody waits for it.
    """

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        store: Store,
        jobs: Jobs,
        peers: PeerDirectory,
        manifests: Manifests,
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
        self._sender = ManifestSender(address, jobs, peers, manifests)
        self.is_dead: Callable[[str], bool] = lambda node_id: False

    async def run(self, job: str, epoch: int, deadline_s: float, step: int | None) -> types_pb2.Plan:
        """The newest recoverable container, or the one of `step`; why not, when there is none.

        What earlier incarnations left uncommitted is abandoned when nobody who was asked has a manifest of it.

        Args:
            epoch: of the job that asks; 0 for an observer, who changes nothing.
            deadline_s: for all answers; who is silent is named in the plan.

        Raises:
            StaleEpochError: a newer incarnation of the job is known, here or by a peer.
            InvalidIdError: a job or step that cannot be one.
        """
        validate_job(job)
        if step is not None:
            validate_step(step)
        if epoch:
            self._jobs.check(job, epoch)
        round_ = self._round(job, epoch, step, deadline_s)
        await round_.ask_all()
        inventories, manifests, decision = await self._decide(round_, step)
        while why := worth_asking_again(decision, manifests, len(round_.unanswered())):
            if not await round_.ask_again(self.is_dead):
                break
            log.info("nodes that refused at first have answered", extra={"job": job, "waited_because": why})
            self._counters.add("lookups_asked_again")
            inventories, manifests, decision = await self._decide(round_, step)
        reach("lookup.answered")
        silent = round_.unanswered()
        self._counters.add("lookups")
        plan = types_pb2.Plan(
            found=decision.version is not None,
            sources=[source_to_pb(source) for source in decision.sources],
            reason=decision.reason,
            rejected=[rejected_to_pb(one) for one in decision.rejected],
            nodes=[node_address_to_pb(one.node) for one in inventories],
            unanswered=[unanswered_to_pb(who) for who in silent],
        )
        if decision.version is not None:
            plan.container.CopyFrom(version_to_pb(decision.version))
            plan.world_size = manifests[decision.version].world_size
            # An older incarnation may have asked for longer than it lasted.
            if epoch and step is None and epoch == self._jobs.epoch(job):
                self._retention.note_recoverable(decision.version, (one.version for one in decision.rejected))
            if epoch:
                await self._keep_manifest(decision.version, round_.fetched)
                try:
                    await self._spread_manifest(decision.version, epoch, inventories)
                except ReplicatorError as error:
                    about = fields(decision.version, reason=error)
                    log.warning("what is recovered cannot be marked as protected here", extra=about)
        if epoch and step is None and not silent:
            await self._abandon_leftovers(job, epoch, inventories)
        log.info("recovery lookup", extra={"job": job, "epoch": epoch, "found": plan.found, "reason": plan.reason})
        return plan

    async def inventories(
        self, job: str, deadline_s: float, step: int | None = None, nodes: Sequence[NodeAddress] | None = None
    ) -> tuple[list[NodeInventory], dict[ContainerVersion, Manifest], list[Unanswered]]:
        """What every node holds of the job (of all jobs, when empty), of one step when given, and all manifests.

        This node is included.

        Args:
            nodes: ask only these.
        """
        round_ = self._round(job, 0, step, deadline_s, nodes)
        await round_.ask_all()
        inventories, manifests = await round_.evidence()
        return inventories, manifests, round_.unanswered()

    def local(self, job: str, step: int | None = None) -> tuple[ContainerInventory, ...]:
        """What this node holds of the job (of all jobs, when empty), of one step when given."""
        result = []
        for version in sorted(self._store.versions(job or None)):
            if step is not None and version.container.step != step:
                continue
            objects = {
                name: HeldObject(name, info.size, info.crc32c) for name, info in self._store.objects(version).items()
            }
            crc = self._manifests.crc(version)
            is_protected = crc is not None and self._store.is_protected(version)
            if objects or crc is not None:
                result.append(ContainerInventory(version, crc, is_protected, objects))
        return tuple(result)

    def _round(
        self, job: str, epoch: int, step: int | None, deadline_s: float, nodes: Sequence[NodeAddress] | None = None
    ) -> Round:
        own = NodeInventory(self._address, self.local(job, step))
        parts = (self._jobs, self._peers, self._manifests, self._counters)
        return Round(own, *parts, job, epoch, step, deadline_s, nodes)

    async def _decide(
        self, round_: Round, step: int | None
    ) -> tuple[list[NodeInventory], dict[ContainerVersion, Manifest], Decision]:
        inventories, manifests = await round_.evidence()
        silent = round_.unanswered()
        decision = await asyncio.to_thread(choose_step, inventories, manifests, step=step, unanswered=silent)
        return inventories, manifests, decision

    async def _keep_manifest(self, version: ContainerVersion, data: Fetched) -> None:
        """What is going to be loaded here is committed here too, so that its loss elsewhere does not matter."""
        if version not in data:
            return
        try:
            await asyncio.to_thread(self._manifests.put, *data[version])
            reach("lookup.kept")
        except ReplicatorError as error:
            log.warning("the manifest of what is recovered cannot be stored", extra=fields(version, reason=error))

    async def _spread_manifest(
        self, version: ContainerVersion, epoch: int, inventories: Sequence[NodeInventory]
    ) -> None:
        """Members that lack the manifest get it, for their ranks will bring objects of it there.

        Without it these would be leftovers of a save to them, and go with the next protected container. Not waited for
        longer than for one answer.
        """
        job = version.container.job
        if epoch != self._jobs.epoch(job) or not self._jobs.is_member(job) or self._manifests.crc(version) is None:
            return
        found = {(one.node.node_id, held.version): held for one in inventories for held in one.containers}
        is_protected = any(held.is_protected for (_, of), held in found.items() if of == version)
        if is_protected and not self._store.is_protected(version):
            self._store.mark_protected(version)
        answered = {one.node.node_id for one in inventories}
        lacking = []
        for node in self._jobs.members(job):
            held = found.get((node.node_id, version))
            if node.node_id in answered - {self._address.node_id} and (held is None or held.manifest_crc32c is None):
                lacking.append(node)
        if not lacking:
            return
        limit_s = self._config.rpc_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                if is_protected:
                    await self._tell_protected(version, lacking, limit_s)
                else:
                    await asyncio.gather(*(self._sender.send(version, epoch, node, limit_s) for node in lacking))
        except TimeoutError:
            log.warning("not all members have the manifest of what is recovered", extra=fields(version))

    async def _tell_protected(self, version: ContainerVersion, nodes: Sequence[NodeAddress], limit_s: float) -> None:
        """Who is told so and lacks the manifest fetches it here."""
        sender = sender_to_pb(self._peers.sender_of(version.container.job))
        await tell_all(
            self._peers,
            nodes,
            "PeerService/MarkProtected",
            peer_pb2.MarkProtectedRequest(sender=sender, container=version_to_pb(version), passed_on=True),
            peer_pb2.MarkProtectedReply,
            about=version,
            awaited=f"keeping the manifest of {version}, which is recovered",
            deadline_s=limit_s,
            final=FINAL,
            unheard="a member lacks the manifest of what is recovered",
        )

    async def _abandon_leftovers(self, job: str, epoch: int, inventories: list[NodeInventory]) -> None:
        """Everybody answered: what is of an earlier epoch and nowhere committed never will be."""
        if epoch != self._jobs.epoch(job) or not self._jobs.is_member(job):
            return
        held: set[ContainerVersion] = set()
        committed: set[ContainerVersion] = set()
        for inventory in inventories:
            for container in inventory.containers:
                (held if container.manifest_crc32c is None else committed).add(container.version)
        leftovers = sorted((one for one in held - committed if one.epoch < epoch), key=recency, reverse=True)[:MAX_TOLD]
        if not leftovers:
            return
        reason = f"it was not committed when epoch {epoch} began"
        nodes = [inventory.node for inventory in inventories]
        try:
            await self._abandonment.abandon(job, epoch, leftovers, reason, nodes)
        except (ReplicatorError, OSError) as error:
            log.warning("leftovers could not be dropped", extra={"job": job, "reason": error})
