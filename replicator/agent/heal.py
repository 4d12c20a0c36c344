"""Makes lost copies again: after nodes died, came back empty or are being drained, and until all copies are there.

    something changed --> which owners' objects, of those held here, are in question --> who holds what of them now
        --> decide.plan_healing --> this node's part of it is offered to the new holders (heal_moves.py) --> again

Nodes that hold copies of the same objects ask the same and come to the same plan, in which one of them is responsible.
Nothing follows from a node being suspect. Who holds nothing of what is in question asks nobody.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence

from replicator.agent.commit import Committer
from replicator.agent.counters import Counters
from replicator.agent.heal_moves import Moves
from replicator.agent.health import HealthMonitor, NodeHealth, NodeState
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.lookup import Lookup
from replicator.agent.manifests import Manifests
from replicator.agent.peers import PeerDirectory
from replicator.agent.replicate import Replicator
from replicator.agent.retention import Retention
from replicator.config import AgentConfig
from replicator.decide.heal import HealingPlan, Short, Standing, by_right, candidates, plan_healing
from replicator.decide.types import NodeInventory, Unanswered
from replicator.errors import ReplicatorError
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, NodeAddress, NodeIdentity
from replicator.store import Store

# In a job of up to so many nodes all are asked; of larger ones those that have something or come next.
MAX_ASKED = 64
_SPARE_CANDIDATES = 8
# Pauses between two looks at what is not healed yet, in deadlines.
_FIRST_PAUSE, _MAX_PAUSE = 0.25, 10.0
# Everything that is held here is looked at this often, for what no event told of.
_LOOK_AGAIN = 20.0
# After an event, for others of the same cause.
_SETTLE_S = 0.25

log = logging.getLogger(__name__)


class Healer:
    """Used in the event loop only.

    Attributes:
        moves: what this node copies to others now.
        on_round: called after each look at all jobs.
    """

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        store: Store,
        jobs: Jobs,
        peers: PeerDirectory,
        health: HealthMonitor,
        manifests: Manifests,
        lookup: Lookup,
        replicator: Replicator,
        retention: Retention,
        committer: Committer,
        counters: Counters,
    ) -> None:
        self._deadline_s = config.deadline_s
        self._limit_s = config.lookup_deadline_s
        self._address = address
        self._store = store
        self._jobs = jobs
        self._peers = peers
        self._health = health
        self._manifests = manifests
        self._lookup = lookup
        self._retention = retention
        self._committer = committer
        self._counters = counters
        self.moves = Moves(config, store, jobs, peers, manifests, replicator, counters, self._moved)
        self.on_round: Callable[[], None] = lambda: None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[int]] = set()
        self._look_at_all = True
        self._returned: set[str] = set()
        self._came_back: set[str] = set()
        # The process that each node was when it was last known to be alive.
        self._alive: dict[str, NodeIdentity] = {}
        self._last: dict[str, dict[str, NodeInventory]] = {}
        self._plans: dict[str, HealingPlan] = {}
        self._pause_s = 0.0
        self._looked_at = 0.0
        self._mine = 0
        self._pokes = 0
        self.quiet = False
        """Whether nothing was found that this node, which is being drained, is to copy, and nothing is under way."""
        health.on_change.append(self._on_change)
        peers.on_draining.append(self.poke)
        committer.on_stored = self._on_stored

    # -- what others see

    def short(self) -> list[Short]:
        """Containers that are short of copies, as far as this node knows, newest first within a job.

        Not those that were dropped since they were looked at.
        """
        return [
            short
            for job in sorted(self._plans)
            for short in self._plans[job].short
            if self._store.manifest(short.version) is not None
        ]

    def scarce(self) -> tuple[int, int]:
        """Objects, and their bytes, that cannot have all their copies because too few nodes stay."""
        plans = self._plans.values()
        return sum(plan.scarce_objects for plan in plans), sum(plan.scarce_bytes for plan in plans)

    def poke(self) -> None:
        """Something changed: look at everything that is held here, soon."""
        self._look_at_all = True
        self._pokes += 1
        self.quiet = False
        self.wake()

    def wake(self) -> None:
        """The members of a job changed."""
        self._pause_s = 0.0
        self._wake.set()
        # A node that is there again in another incarnation is dead for a moment only.
        asyncio.get_running_loop().call_soon(self._take_standing)

    async def run(self) -> None:
        """Watch and heal until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = self._looked_at + (self._pause_s or self._deadline_s * _LOOK_AGAIN)
            try:
                async with asyncio.timeout_at(max(due, loop.time())):
                    await self._wake.wait()
            except TimeoutError:
                self._look_at_all = self._look_at_all or not self._pause_s
            self._wake.clear()
            self._take_standing()
            await asyncio.sleep(min(_SETTLE_S, self._deadline_s / 20) * (0.5 + random.random()))
            self._take_standing()
            try:
                await self._look()
            except Exception:
                log.exception("copies could not be looked at, and will be again")
                self._looked_at, self._pause_s, self._look_at_all = loop.time(), self._deadline_s, True

    async def close(self) -> None:
        """Give up what is being copied; the next agent, or another node, goes on."""
        await self.moves.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- events

    def _on_change(self, old: NodeHealth | None, new: NodeHealth) -> None:
        node_id = new.node.node_id
        if new.state is NodeState.ALIVE:
            before, self._alive[node_id] = self._alive.get(node_id), new.node.identity
            if old is None or old.state is NodeState.DEAD or before != new.node.identity:
                # It may have come back without its memory, also when it was suspect for as long as it started.
                self._returned.add(node_id)
                self._came_back.add(node_id)
                self.moves.forget_node(node_id)
        if new.state is not NodeState.SUSPECT:
            self.wake()

    def _on_stored(self, version: ContainerVersion) -> None:
        if self._jobs.dead or self._jobs.leaving:
            self.wake()

    def _moved(self, anything: bool) -> None:
        """Nothing is being copied any more."""
        if anything:
            self.wake()

    def _take_standing(self) -> None:
        """Who is dead or leaving now; owners choose other buddies in their place."""
        dead = frozenset(node for node, one in self._health.view().items() if one.state is NodeState.DEAD)
        leaving = self._peers.draining | ({self._address.node_id} if self._peers.own_draining else frozenset())
        if (dead, leaving) == (self._jobs.dead, self._jobs.leaving):
            return
        for node in leaving - self._jobs.leaving:
            self.moves.forget_node(node)
        self._jobs.dead, self._jobs.leaving = dead, leaving
        self._committer.standing_changed()

    # -- one look

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        draining, pokes = self._peers.own_draining, self._pokes
        everything, self._look_at_all = self._look_at_all or draining, False
        returned, self._returned = self._returned, set()
        began = loop.time()
        unsettled = False
        self._mine = 0
        for job in self._jobs.names():
            try:
                unsettled |= await self._look_at(job, everything, returned)
            except ReplicatorError as error:
                log.warning("copies cannot be looked at, and will be again", extra={"job": job, "reason": error})
                unsettled = self._look_at_all = True
        self._looked_at = loop.time()
        if unsettled:
            first = self._deadline_s * _FIRST_PAUSE
            self._pause_s = min(max(first, 2 * self._pause_s), self._deadline_s * _MAX_PAUSE)
            self._returned |= returned
        else:
            self._pause_s = 0.0
        self.quiet = draining and pokes == self._pokes and not self._mine and self.moves.idle
        log.debug("copies looked at", extra={"seconds": round(loop.time() - began, 3), "unsettled": unsettled})
        self.on_round()

    async def _look_at(self, job: str, everything: bool, returned: Collection[str]) -> bool:
        """Look at one job, and start what is to be done here. Whether it has to be looked at again soon."""
        if not self._jobs.is_member(job):
            return False
        owners = self._in_question(job, everything, returned)
        if not owners:
            self._settle(job, HealingPlan())
            self.moves.replace(job, ())
            return False
        inventories, manifests, silent = await self._lookup.inventories(
            job, self._limit_s, nodes=self._whom(job, owners)
        )
        inventories = self._remember(job, inventories, silent)
        committed = {
            version: manifest
            for version, manifest in manifests.items()
            if version.container.job == job and not self._retention.refusal(version)
        }
        standing = self._standing(job, silent)
        plan = await asyncio.to_thread(
            plan_healing, committed, inventories, standing, owners=owners, place=self._jobs.preference(job)
        )
        mine = [move for move in plan.moves if move.responsible == self._address.node_id]
        self._mine += len(mine)
        for move in mine:
            log.info("copies are to be made again", extra=fields(move.version, reason=move.reason))
        if mine:
            reach("heal.planned")
        self._settle(job, plan)
        for whole in plan.whole:
            if whole.responsible == self._address.node_id and self._is_gone(job, whole.owner_node_id):
                self._committer.report_for(whole.version, whole.owner_node_id)
        self.moves.replace(job, mine)
        # Who is silent is believed to have everything only until it has said what it has, or is dead.
        self._returned |= plan.believed
        return bool(plan.short or plan.believed)

    def _in_question(self, job: str, everything: bool, returned: Collection[str]) -> set[str]:
        """Owners of committed objects held here that may lack copies."""
        members = [node.node_id for node in self._jobs.members(job)]
        place = self._jobs.preference(job)
        gone = self._jobs.dead | self._jobs.leaving | set(returned)
        known: dict[tuple[str, int], bool] = {}
        found: set[str] = set()
        for version in self._store.versions(job):
            manifest = self._manifests.get(version)
            if manifest is None:
                continue
            for owner in {info.owner_node_id for info in self._store.objects(version).values()}:
                key = owner, manifest.replicas
                if key not in known:
                    known[key] = everything or any(
                        node in gone or node not in members
                        for node in by_right(owner, members, manifest.replicas, place)
                    )
                if known[key]:
                    found.add(owner)
        found.update(owner for short in self._plans.get(job, HealingPlan()).short for owner in short.owners)
        return found

    def _whom(self, job: str, owners: Iterable[str]) -> list[NodeAddress]:
        """Those who may hold objects of these owners, and those who would get copies next."""
        everyone = {node.node_id: node for node in self._jobs.everyone(job) if node.node_id not in self._jobs.dead}
        everyone.pop(self._address.node_id, None)
        if len(everyone) <= MAX_ASKED:
            return list(everyone.values())
        members = [node.node_id for node in self._jobs.members(job)]
        place = self._jobs.preference(job)
        chosen: set[str] = set(self._last.get(job, {}))
        for owner in owners:
            able = 0
            for node in candidates(owner, members, self._jobs.replicas(job), place):
                chosen.add(node)
                able += node in everyone and node not in self._jobs.leaving
                if able > self._jobs.replicas(job) + _SPARE_CANDIDATES:
                    break
        return [node for node_id, node in everyone.items() if node_id in chosen]

    def _remember(
        self, job: str, inventories: Sequence[NodeInventory], silent: Sequence[Unanswered]
    ) -> list[NodeInventory]:
        """The answers, and of silent nodes that are the same processes still, what they answered last."""
        before = self._last.get(job, {})
        now = {inventory.node.node_id: inventory for inventory in inventories}
        for who in silent:
            last = before.get(who.node_id)
            if last is not None and last.node.identity == self._peers.identity(who.node_id):
                now.setdefault(who.node_id, last)
        # Only those that hold something: who is asked in a large job depends on it.
        self._last[job] = {node_id: one for node_id, one in now.items() if one.containers}
        return list(now.values())

    def _standing(self, job: str, silent: Sequence[Unanswered]) -> Standing:
        suspect = {node for node, one in self._health.view().items() if one.state is NodeState.SUSPECT}
        return Standing(
            members=tuple(node.node_id for node in self._jobs.members(job)),
            dead=self._jobs.dead,
            silent=frozenset(suspect | {who.node_id for who in silent}) - self._jobs.dead,
            leaving=self._jobs.leaving,
            closed=self.moves.closed(),
            refused=self.moves.refused(),
        )

    def _settle(self, job: str, plan: HealingPlan) -> None:
        """The plan is what is known now: who asks for the state, and retention, go by it."""
        before = {short.version: short for short in self._plans.get(job, HealingPlan()).short}
        now = {short.version: short for short in plan.short}
        for version, short in now.items():
            told = before.get(version)
            if told is None or (told.objects, told.lost) != (short.objects, short.lost):
                log.log(
                    logging.WARNING if short.lost or short.unplaced else logging.INFO,
                    "a container is short of copies",
                    extra=fields(version, **_numbers(short)),
                )
        for version in before.keys() - now.keys():
            if self._store.manifest(version) is None:
                continue
            if version in plan.scarce:
                log.warning(
                    "a container has a copy on every node that is there, fewer than wanted", extra=fields(version)
                )
            else:
                reach("heal.settled")
                self._counters.add("containers_healed")
                log.info("a container has all its copies again", extra=fields(version))
        self._plans[job] = plan
        self._retention.note_short(job, {version: short.lost > 0 for version, short in now.items()})
        if before and not now:
            self._spawn(self._retention.run(job))

    def _spawn(self, work: Coroutine[None, None, int]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_gone(self, job: str, owner: str) -> bool:
        """Whether the owner will tell no coordinator that its objects have all their copies."""
        members = {node.node_id for node in self._jobs.members(job)}
        return owner in self._jobs.dead or owner in self._came_back or owner not in members


def _numbers(short: Short) -> dict[str, int]:
    return {"objects": short.objects, "bytes": short.size_bytes, "unplaced": short.unplaced, "lost": short.lost}
