"""Recovery lookup: everybody is asked what they hold, with one deadline, and the pure decision is made here.

Any agent can answer it (F21). Asked are the members of the job, nodes remembered from earlier epochs, configured peers,
and whom those know of (F13). Who does not answer in time is named in the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from replicator.agent.abandon import MAX_TOLD, Abandonment
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.manifests import Manifests, fetch_manifest
from replicator.agent.peers import PeerDirectory
from replicator.agent.retention import Retention
from replicator.config import AgentConfig
from replicator.decide.choose_step import choose_step
from replicator.decide.types import ContainerInventory, HeldObject, Manifest, NodeInventory, Unanswered, recency
from replicator.errors import DeadlineExceededError, InvalidIdError, ReplicatorError, StaleEpochError
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, NodeAddress, validate_job, validate_step
from replicator.native import crc32c
from replicator.store import Store
from replicator.v1 import peer_pb2, types_pb2
from replicator.wire import (
    Sender,
    identity_from_pb,
    inventory_from_pb,
    manifest_from_bytes,
    node_address_to_pb,
    rejected_to_pb,
    sender_to_pb,
    source_to_pb,
    unanswered_to_pb,
    version_to_pb,
)

MAX_ASKED = 16384
MAX_CONTAINERS_PER_NODE = 65536
# Of the time for all answers, what is kept for fetching manifests that are not here.
_MANIFEST_SHARE = 0.25
_FETCHES_AT_ONCE = 16

log = logging.getLogger(__name__)


class Lookup:
    """Used in the event loop only."""

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
        round_ = _Round(self, job, epoch, step, deadline_s)
        inventories, manifests, data = await round_.ask_all()
        reach("lookup.answered")
        silent = round_.unanswered()
        decision = await asyncio.to_thread(choose_step, inventories, manifests, step=step, unanswered=silent)
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
            if epoch and step is None:
                self._retention.note_recoverable(decision.version)
            if epoch:
                await self._keep_manifest(decision.version, data)
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
        round_ = _Round(self, job, 0, step, deadline_s, nodes)
        inventories, manifests, _ = await round_.ask_all()
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

    async def _keep_manifest(self, version: ContainerVersion, data: dict[ContainerVersion, tuple[bytes, int]]) -> None:
        """What is going to be loaded here is committed here too, so that its loss elsewhere does not matter."""
        if version not in data:
            return
        try:
            await asyncio.to_thread(self._manifests.put, *data[version])
            reach("lookup.kept")
        except ReplicatorError as error:
            log.warning("the manifest of what is recovered cannot be stored", extra=fields(version, reason=error))

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


class _Round:
    """One round of questions."""

    def __init__(
        self,
        lookup: Lookup,
        job: str,
        epoch: int,
        step: int | None,
        deadline_s: float,
        nodes: Sequence[NodeAddress] | None = None,
    ) -> None:
        self._of = lookup
        self._job = job
        self._step = step
        self._nodes = nodes
        self._deadline_s = deadline_s
        self._end = self._now() + deadline_s
        self._sender = Sender(lookup._address.identity, job, epoch)
        self._asked: set[tuple[str, str]] = set()
        self._answers: dict[str, NodeInventory] = {}
        self._silent: dict[tuple[str, str], Unanswered] = {}
        self._stale: StaleEpochError | None = None

    async def ask_all(
        self,
    ) -> tuple[list[NodeInventory], dict[ContainerVersion, Manifest], dict[ContainerVersion, tuple[bytes, int]]]:
        """All answers sorted by node, the manifests they speak of, and the bytes of those fetched from peers."""
        of = self._of
        self._answers[of._address.node_id] = NodeInventory(of._address, of.local(self._job, self._step))
        answers_end = self._end - self._deadline_s * _MANIFEST_SHARE
        first: Iterable[NodeAddress | str] = self._nodes or ()
        if self._nodes is None:
            first = [*self._known(), *of._peers.configured]
        pending = self._ask(first, answers_end)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                pending |= self._ask(task.result() if self._nodes is None else (), answers_end)
        if self._stale is not None:
            raise self._stale
        inventories = [self._answers[node_id] for node_id in sorted(self._answers)]
        data = await self._fetch_manifests(inventories)
        manifests = {}
        for version, (content, _) in data.items():
            manifests[version] = await asyncio.to_thread(manifest_from_bytes, content)
        for inventory in inventories:
            for container in inventory.containers:
                stored = of._manifests.get(container.version)
                if stored is not None:
                    manifests[container.version] = stored
        return inventories, manifests, data

    def unanswered(self) -> list[Unanswered]:
        """Who was asked in vain, sorted, each once; a node that answered at another address is not among them."""
        silent = [who for who in self._silent.values() if who.node_id not in self._answers]
        named = {who.grpc_address for who in silent if who.node_id}
        silent = [who for who in silent if who.node_id or who.grpc_address not in named]
        return sorted(silent, key=lambda who: (who.node_id, who.grpc_address))

    def _known(self) -> Iterable[NodeAddress]:
        names = [self._job] if self._job else self._of._jobs.names()
        for job in names:
            yield from self._of._jobs.everyone(job)
        if not self._job:
            yield from (node for node in self._of._peers.known() if isinstance(node, NodeAddress))

    def _ask(self, targets: Iterable[NodeAddress | str], end: float) -> set[asyncio.Task[tuple[NodeAddress, ...]]]:
        tasks = set()
        for target in targets:
            node_id, address = ("", target) if isinstance(target, str) else (target.node_id, target.grpc_address)
            if (node_id, address) in self._asked or node_id in self._answers or len(self._asked) >= MAX_ASKED:
                continue
            self._asked.add((node_id, address))
            tasks.add(asyncio.get_running_loop().create_task(self._ask_one(node_id, address, end)))
        return tasks

    async def _ask_one(self, wanted: str, address: str, end: float) -> tuple[NodeAddress, ...]:
        """Hello and Inventory, of whoever is there: when it is not `wanted`, that one counts as silent.

        Returns whom the node knows of.
        """
        limit = end - self._now()
        node_id = wanted
        try:
            async with asyncio.timeout_at(end):
                answer = await self._of._peers.ask_epoch(self._job, address, None, limit)
                node_id = answer.node.node_id
                if wanted and wanted != node_id:
                    reason = f"expected node {wanted} at {address}, found node {node_id} there"
                    self._silent[wanted, address] = Unanswered(wanted, address, reason)
                if node_id != self._of._address.node_id and node_id not in self._answers:
                    containers = await self._inventory(answer.node, limit)
                    self._answers[node_id] = NodeInventory(answer.node, containers)
                return answer.known_members
        except StaleEpochError as error:
            self._stale = error
        except TimeoutError as error:
            whom = f"node {node_id} ({address})" if node_id else f"the agent at {address}"
            if not isinstance(error, DeadlineExceededError):
                error = DeadlineExceededError.of("its inventory", whom, limit)
            self._silent[node_id, address] = Unanswered(node_id, address, str(error))
        except ReplicatorError as error:
            self._silent[node_id, address] = Unanswered(node_id, address, str(error))
        return ()

    async def _inventory(self, node: NodeAddress, limit_s: float) -> tuple[ContainerInventory, ...]:
        request = peer_pb2.InventoryRequest(sender=sender_to_pb(self._sender), has_step=self._step is not None)
        request.step = self._step or 0
        found: dict[ContainerVersion, ContainerInventory] = {}
        async for reply in self._of._peers.stream(
            node,
            "PeerService/Inventory",
            request,
            peer_pb2.InventoryReply,
            awaited="its inventory",
            idle_s=max(limit_s, 0.001),
        ):
            if identity_from_pb(reply.node) != node.identity:
                raise InvalidIdError(f"expected the inventory of {node.identity}, found one of {reply.node.node_id}")
            container = inventory_from_pb(reply.container)
            if self._job and container.version.container.job != self._job:
                raise InvalidIdError(f"expected containers of job {self._job}, found {container.version}")
            before = found.get(container.version)
            if before is not None:
                container = inventory_from_pb(reply.container, before.objects)
            if len(found) >= MAX_CONTAINERS_PER_NODE:
                raise InvalidIdError(f"more than {MAX_CONTAINERS_PER_NODE} containers on one node")
            found[container.version] = container
        return tuple(found[version] for version in sorted(found))

    async def _fetch_manifests(self, inventories: list[NodeInventory]) -> dict[ContainerVersion, tuple[bytes, int]]:
        """Manifests that are not stored here, from any holder, newest first."""
        wanted: dict[ContainerVersion, list[tuple[NodeAddress, int]]] = {}
        for inventory in inventories:
            for container in inventory.containers:
                if container.manifest_crc32c is not None and self._of._manifests.crc(container.version) is None:
                    wanted.setdefault(container.version, []).append((inventory.node, container.manifest_crc32c))
        slots = asyncio.Semaphore(_FETCHES_AT_ONCE)
        found: dict[ContainerVersion, tuple[bytes, int]] = {}

        async def fetch(version: ContainerVersion, holders: list[tuple[NodeAddress, int]]) -> None:
            for node, listed_crc in holders:
                limit = self._end - self._now()
                if limit <= 0:
                    return
                try:
                    async with slots, asyncio.timeout_at(self._end):
                        data, crc = await fetch_manifest(self._of._peers, self._sender, version, node, limit)
                except (ReplicatorError, TimeoutError) as error:
                    log.warning("a manifest could not be read", extra=fields(version, peer=node.node_id, reason=error))
                    continue
                if crc == listed_crc == crc32c(data):
                    found[version] = (data, crc)
                    return

        order = sorted(wanted, key=lambda version: (version.container.job, *recency(version)), reverse=True)
        await asyncio.gather(*(fetch(version, wanted[version]) for version in order))
        return found

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
