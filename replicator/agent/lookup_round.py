"""One round of questions of a lookup: who is asked, who answered what, who is silent, and whose silence may end.

A node that refused is a dead one, or one whose agent is just being started again: `ask_again` goes to it once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.manifests import Manifests, fetch_manifest
from replicator.agent.peers import PeerDirectory
from replicator.decide.types import ContainerInventory, Manifest, NodeInventory, Unanswered, recency
from replicator.errors import (
    DeadlineExceededError,
    InvalidIdError,
    PeerUnavailableError,
    ReplicatorError,
    StaleEpochError,
)
from replicator.ids import ContainerVersion, NodeAddress
from replicator.native import crc32c
from replicator.v1 import peer_pb2
from replicator.wire import Sender, identity_from_pb, inventory_from_pb, manifest_from_bytes, sender_to_pb

MAX_ASKED = 16384
MAX_CONTAINERS_PER_NODE = 65536
# Of the time for all answers, what is kept for fetching manifests that are not here.
_MANIFEST_SHARE = 0.25
# Of it, for how long those who refuse are asked again.
AGAIN_SHARE = 0.5
# And for how long at most one of these questions waits: its answer may come from another address now.
_AGAIN_ANSWER_SHARE = 0.25
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 1.0
_MANIFEST_PAUSE_S = 0.25
_FETCHES_AT_ONCE = 16

log = logging.getLogger(__name__)

Fetched = dict[ContainerVersion, tuple[bytes, int]]
"""Serialized manifests that came from peers, and their CRC32C."""


class Round:
    """Used in the event loop only, once.

    Args:
        own: this node, and what it holds of the job.
        job: empty: all jobs.
        epoch: of the job that asks; 0 for an observer.
        step: ask for this one only.
        deadline_s: for all answers and manifests.
        nodes: ask only these; default: all that are known, and whom those know of.
    """

    def __init__(
        self,
        own: NodeInventory,
        jobs: Jobs,
        peers: PeerDirectory,
        manifests: Manifests,
        counters: Counters,
        job: str,
        epoch: int,
        step: int | None,
        deadline_s: float,
        nodes: Sequence[NodeAddress] | None = None,
    ) -> None:
        self._own = own.node
        self._jobs = jobs
        self._peers = peers
        self._manifests = manifests
        self._counters = counters
        self._job = job
        self._step = step
        self._nodes = nodes
        self._began = self._now()
        self._end = self._began + deadline_s
        self._answers_end = self._end - deadline_s * _MANIFEST_SHARE
        self._again_end = self._began + deadline_s * AGAIN_SHARE
        self._again_s = deadline_s * _AGAIN_ANSWER_SHARE
        self._pause_s = _FIRST_PAUSE_S
        self._sender = Sender(self._own.identity, job, epoch)
        self._asked: set[tuple[str, str]] = set()
        self._answers: dict[str, NodeInventory] = {own.node.node_id: own}
        self._silent: dict[tuple[str, str], Unanswered] = {}
        self._refused: dict[tuple[str, str], int] = {}  # how often
        self._stale: StaleEpochError | None = None
        self.fetched: Fetched = {}

    async def ask_all(self) -> None:
        """Ask everybody once.

        Raises:
            StaleEpochError: a peer knows a newer incarnation of the job.
        """
        first: Iterable[NodeAddress | str] = self._nodes or ()
        if self._nodes is None:
            first = [*self._known(), *self._peers.configured]
        await self._finish(self._ask(first))

    async def ask_again(self, is_dead: Callable[[str], bool]) -> bool:
        """Ask those who refused again, with pauses, until one of them answers: whether one did.

        Args:
            is_dead: of a node id: it has been silent for so long that it is not waited for.

        Raises:
            StaleEpochError: a peer knows a newer incarnation of the job.
        """
        answered = len(self._answers)
        while len(self._answers) == answered:
            if not await self._pause() or not self._waited_for(is_dead):
                return False
            # A node may be reached elsewhere since its last start, and have said so meanwhile.
            known = {one.node_id: one.grpc_address for one in self._known()}
            targets = {(node_id, known.get(node_id, address)) for node_id, address in self._waited_for(is_dead)}
            self._asked |= targets
            loop = asyncio.get_running_loop()
            end = min(self._now() + self._again_s, self._answers_end)
            await self._finish({loop.create_task(self._ask_one(*target, end)) for target in sorted(targets)})
        return True

    async def evidence(self) -> tuple[list[NodeInventory], dict[ContainerVersion, Manifest]]:
        """All answers so far, sorted by node, and the manifests they speak of; those of peers are in `fetched`."""
        inventories = [self._answers[node_id] for node_id in sorted(self._answers)]
        await self._fetch_manifests(inventories)
        manifests = {}
        for version, (content, _) in self.fetched.items():
            manifests[version] = await asyncio.to_thread(manifest_from_bytes, content)
        for inventory in inventories:
            for container in inventory.containers:
                stored = self._manifests.get(container.version)
                if stored is not None:
                    manifests[container.version] = stored
        return inventories, manifests

    def unanswered(self) -> list[Unanswered]:
        """Who was asked in vain, sorted, each once; a node that answered at another address is not among them."""
        silent = [who for who in self._silent.values() if who.node_id not in self._answers]
        named = {who.grpc_address for who in silent if who.node_id}
        silent = [who for who in silent if who.node_id or who.grpc_address not in named]
        return sorted(silent, key=lambda who: (who.node_id, who.grpc_address))

    # -- parts

    def _known(self) -> Iterable[NodeAddress]:
        names = [self._job] if self._job else self._jobs.names()
        for job in names:
            yield from self._jobs.everyone(job)
        # Of a job that never ran here, or whose members were lost with its record, any node may hold something (F13).
        if not self._job or not self._jobs.members(self._job):
            yield from (node for node in self._peers.known() if isinstance(node, NodeAddress))

    def _waited_for(self, is_dead: Callable[[str], bool]) -> list[tuple[str, str]]:
        """Those whose last answer was a refusal, and who may be there again soon."""
        waited_for = {(who.node_id, who.grpc_address) for who in self.unanswered()}
        return [one for one in self._refused if one in waited_for and not (one[0] and is_dead(one[0]))]

    async def _pause(self) -> bool:
        """Wait a little, longer each time; False when the time for it is over."""
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, _MAX_PAUSE_S)
        if self._now() + pause > self._again_end:
            return False
        await asyncio.sleep(pause)
        return True

    def _ask(self, targets: Iterable[NodeAddress | str]) -> set[asyncio.Task[tuple[NodeAddress, ...]]]:
        tasks = set()
        for target in targets:
            node_id, address = ("", target) if isinstance(target, str) else (target.node_id, target.grpc_address)
            if (node_id, address) in self._asked or node_id in self._answers or len(self._asked) >= MAX_ASKED:
                continue
            self._asked.add((node_id, address))
            tasks.add(asyncio.get_running_loop().create_task(self._ask_one(node_id, address, self._answers_end)))
        return tasks

    async def _finish(self, pending: set[asyncio.Task[tuple[NodeAddress, ...]]]) -> None:
        """Wait for answers, and ask whom those know of."""
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                pending |= self._ask(task.result() if self._nodes is None else ())
        if self._stale is not None:
            raise self._stale

    async def _ask_one(self, wanted: str, address: str, end: float) -> tuple[NodeAddress, ...]:
        """Hello and Inventory, of whoever is there: when it is not `wanted`, that one counts as silent.

        Returns whom the node knows of.
        """
        limit = end - self._now()
        node_id = wanted
        try:
            async with asyncio.timeout_at(end):
                answer = await self._peers.ask_epoch(self._job, address, None, limit)
                node_id = answer.node.node_id
                self._refused.pop((wanted, address), None)
                if wanted and wanted != node_id:
                    reason = f"expected node {wanted} at {address}, found node {node_id} there"
                    self._refuse(wanted, address, reason)
                else:
                    self._silent.pop((wanted, address), None)
                if node_id != self._own.node_id and node_id not in self._answers:
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
        except PeerUnavailableError as error:
            self._refuse(node_id, address, str(error))
        except ReplicatorError as error:
            self._silent[node_id, address] = Unanswered(node_id, address, str(error))
        return ()

    def _refuse(self, node_id: str, address: str, reason: str) -> None:
        self._counters.add("lookups_refused")
        times = self._refused[node_id, address] = self._refused.get((node_id, address), 0) + 1
        if times > 1:
            reason += f" (asked {times} times in {self._now() - self._began:.1f} s)"
        self._silent[node_id, address] = Unanswered(node_id, address, reason)

    async def _inventory(self, node: NodeAddress, limit_s: float) -> tuple[ContainerInventory, ...]:
        request = peer_pb2.InventoryRequest(sender=sender_to_pb(self._sender), has_step=self._step is not None)
        request.step = self._step or 0
        found: dict[ContainerVersion, ContainerInventory] = {}
        async for reply in self._peers.stream(
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

    async def _fetch_manifests(self, inventories: list[NodeInventory]) -> None:
        """Manifests that are not stored here, from any holder, newest first."""
        wanted: dict[ContainerVersion, list[tuple[NodeAddress, int]]] = {}
        for inventory in inventories:
            for container in inventory.containers:
                version, crc = container.version, container.manifest_crc32c
                if crc is not None and version not in self.fetched and self._manifests.crc(version) is None:
                    wanted.setdefault(version, []).append((inventory.node, crc))
        slots = asyncio.Semaphore(_FETCHES_AT_ONCE)

        async def fetch(version: ContainerVersion, holders: list[tuple[NodeAddress, int]]) -> None:
            refused = True
            while refused:
                refused = False
                for node, listed_crc in holders:
                    limit = self._end - self._now()
                    if limit <= 0:
                        return
                    try:
                        async with slots, asyncio.timeout_at(self._end):
                            data, crc = await fetch_manifest(self._peers, self._sender, version, node, limit)
                    except (ReplicatorError, TimeoutError) as error:
                        about = fields(version, peer=node.node_id, reason=error)
                        log.warning("a manifest could not be read", extra=about)
                        # It gave its inventory a moment ago, so that it is rather starting again than gone.
                        refused = refused or isinstance(error, PeerUnavailableError)
                        continue
                    if crc == listed_crc == crc32c(data):
                        self.fetched[version] = (data, crc)
                        return
                refused = refused and self._now() + _MANIFEST_PAUSE_S < self._again_end
                if refused:
                    await asyncio.sleep(_MANIFEST_PAUSE_S)

        order = sorted(wanted, key=lambda version: (version.container.job, *recency(version)), reverse=True)
        await asyncio.gather(*(fetch(version, wanted[version]) for version in order))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
