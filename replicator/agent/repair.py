"""What was put in quarantine here is brought again, from another node that holds a good copy of it.

Whoever found the copy to be bad: the scrubber, a trainer that loads, a buddy that pulled, an operator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from replicator.agent.counters import Counters
from replicator.agent.logs import fields
from replicator.agent.lookup import Lookup
from replicator.agent.puller import Puller
from replicator.agent.retention import Retention
from replicator.config import AgentConfig
from replicator.decide.types import NodeInventory, ObjectSource
from replicator.errors import ObjectNotFoundError, ReplicatorError
from replicator.ids import CheckpointContainerId, ObjectVersion
from replicator.store import Store
from replicator.store.trailer import ObjectInfo

MAX_WAITING = 4096
MAX_ATTEMPTS = 8
# After a failure it is tried again after one deadline, then after twice that, and so on up to so many.
MAX_PAUSE_DEADLINES = 10

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Damage:
    info: ObjectInfo
    due: float
    attempts: int = 0


class Repairer:
    """Used in the event loop only."""

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        retention: Retention,
        lookup: Lookup,
        puller: Puller,
        counters: Counters,
    ) -> None:
        self._deadline_s = config.deadline_s
        self._lookup_deadline_s = config.lookup_deadline_s
        self._store = store
        self._retention = retention
        self._lookup = lookup
        self._puller = puller
        self._counters = counters
        self._damaged: dict[ObjectVersion, _Damage] = {}
        self._news = asyncio.Event()

    def note(self, info: ObjectInfo) -> None:
        """This node's copy of an object was put in quarantine; `info` is what it should have been."""
        if len(self._damaged) >= MAX_WAITING and info.object not in self._damaged:
            self._counters.add("repairs_failed")
            log.warning("too many objects wait to be brought again", extra=fields(info.object))
            return
        self._damaged[info.object] = _Damage(info, self._now())
        self._news.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            self._news.clear()
            due = min((damage.due for damage in self._damaged.values()), default=None)
            try:
                async with asyncio.timeout_at(due):
                    await self._news.wait()
            except TimeoutError:
                pass
            now = self._now()
            by_step: dict[CheckpointContainerId, list[_Damage]] = {}
            for damage in self._damaged.values():
                if damage.due <= now:
                    by_step.setdefault(damage.info.object.version.container, []).append(damage)
            for container, damages in by_step.items():
                try:
                    await self._repair(container, damages)
                except Exception:
                    log.exception("bad copies could not be replaced, and will be tried again")
                    for damage in damages:
                        damage.due = max(damage.due, self._now() + self._deadline_s)

    async def _repair(self, container: CheckpointContainerId, damages: Iterable[_Damage]) -> None:
        """One round of questions for all that is damaged of one step, then a pull for each."""
        wanted = [damage for damage in damages if self._is_wanted(damage.info)]
        if not wanted:
            return
        reason: ReplicatorError
        inventories: list[NodeInventory] = []
        try:
            inventories, _, _ = await self._lookup.inventories(container.job, self._lookup_deadline_s, container.step)
        except ReplicatorError as error:
            log.warning("nobody can be asked for copies", extra={"container": str(container), "reason": error})
        for damage in wanted:
            one = damage.info.object
            try:
                await self._puller.bring_again(self._source(damage.info, inventories), one, self._deadline_s)
            except ReplicatorError as error:
                reason = error
            else:
                self._counters.add("objects_repaired")
                log.info("an object was brought again, in place of a bad copy", extra=fields(one))
                self._forget(damage)
                continue
            damage.attempts += 1
            if damage.attempts >= MAX_ATTEMPTS:
                self._counters.add("repairs_failed")
                log.warning("a bad copy could not be replaced", extra=fields(one, reason=reason))
                self._forget(damage)
                continue
            log.info("a bad copy is not replaced yet", extra=fields(one, reason=reason))
            damage.due = self._now() + self._deadline_s * min(2 ** (damage.attempts - 1), MAX_PAUSE_DEADLINES)

    def _forget(self, damage: _Damage) -> None:
        """Unless the copy that came was put in quarantine meanwhile, too."""
        if self._damaged.get(damage.info.object) is damage:
            del self._damaged[damage.info.object]

    def _is_wanted(self, info: ObjectInfo) -> bool:
        """Whether the object is still lacking, and its container still to be kept; else it is forgotten."""
        held = self._store.get(info.object)
        if held is None and not self._retention.was_dropped(info.object.version):
            return True
        del self._damaged[info.object]
        return False

    def _source(self, info: ObjectInfo, inventories: Iterable[NodeInventory]) -> ObjectSource:
        one = info.object
        holders = [
            inventory.node.node_id
            for inventory in inventories
            for container in inventory.containers
            if container.version == one.version
            and (held := container.objects.get(one.name)) is not None
            and (held.size, held.crc32c) == (info.size, info.crc32c)
        ]
        if not holders:
            raise ObjectNotFoundError(f"no other node that answers holds {one} with checksum {info.crc32c:08x}")
        holders.sort(key=lambda node_id: node_id != info.owner_node_id)
        return ObjectSource(one.name, info.size, info.crc32c, info.owner_node_id, tuple(holders))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
