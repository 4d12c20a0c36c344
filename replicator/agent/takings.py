"""Objects on their way to this node, each one once at a time whoever wants it, and their outcomes many at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from replicator.agent.counters import Counters
from replicator.agent.logs import fields
from replicator.errors import ObjectExistsError, ReplicationError, ReplicatorError, TransferError
from replicator.ids import ObjectVersion
from replicator.store.trailer import ObjectInfo

MAX_WAITING = 65536

KeyT = TypeVar("KeyT")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """An object that is sealed here. `lane` and `node_id` are empty when it was here already."""

    info: ObjectInfo
    lane: str = ""
    node_id: str = ""


@dataclass(slots=True, eq=False)
class Taking:
    """An object on its way here. Shared by all who want it.

    `task` ends with it. It may be a mere future, which whoever brings many objects resolves; cancelled, it is not
    wanted any more.
    """

    object: ObjectVersion
    size: int
    crc32c: int
    task: asyncio.Future[Taken]
    waiting: bool = True
    bytes_done: int = 0
    users: int = 0
    later: bool = False
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        """One who waited is gone. When that was the last, the object is not pulled any further."""
        self.users -= 1
        if not self.users and not self.task.done():
            self.task.cancel()


class Takings:
    """All objects on their way here. Used in the event loop only."""

    def __init__(self, node_id: str, counters: Counters) -> None:
        self._node_id = node_id
        self._counters = counters
        self._running: dict[ObjectVersion, Taking] = {}

    def __len__(self) -> int:
        return len(self._running)

    def join(self, one: ObjectVersion, size: int, crc: int) -> Taking | None:
        """Like `find`, for somebody who waits for it: what was for later is hurried, or left to him to begin.

        Raises like `find`.
        """
        taking = self.find(one, size, crc)
        if taking is None or not taking.later:
            return taking
        if taking.waiting:
            del self._running[one]
            taking.task.cancel()
            return None
        taking.hurry.set()
        return taking

    def find(self, one: ObjectVersion, size: int, crc: int) -> Taking | None:
        """The pull of the same object that is under way, if there is one.

        Raises:
            ObjectExistsError: other content is on its way under that name.
        """
        taking = self._running.get(one)
        if taking is not None and (taking.size, taking.crc32c) != (size, crc):
            raise ObjectExistsError(
                f"{one} is being pulled with {taking.size} bytes and checksum {taking.crc32c:08x}; asked for were "
                f"{size} bytes, {crc:08x}"
            )
        return taking

    def start(
        self,
        one: ObjectVersion,
        size: int,
        crc: int,
        work: Callable[[Taking], Coroutine[Any, Any, Taken]],
        *,
        later: bool = False,
    ) -> Taking:
        """Begin a pull with a task of its own. Raises ReplicationError when too many are under way."""
        self._require_room()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[Taking] = loop.create_future()

        async def run() -> Taken:
            return await work(await ready)

        taking = Taking(one, size, crc, loop.create_task(run()), later=later)
        ready.set_result(taking)
        return self._enter(taking)

    def expect(self, one: ObjectVersion, size: int, crc: int) -> Taking:
        """Announce an object that somebody brings among others. Raises like `start`."""
        self._require_room()
        return self._enter(Taking(one, size, crc, asyncio.get_running_loop().create_future()))

    def held(self, info: ObjectInfo) -> Taking:
        """Of an object that is here."""
        done: asyncio.Future[Taken] = asyncio.get_running_loop().create_future()
        done.set_result(Taken(info))
        return Taking(info.object, info.size, info.crc32c, done, waiting=False)

    async def wait(self, taking: Taking) -> Taken:
        """Wait for an object; when everybody who waits for it is gone, it is not pulled any further."""
        taking.users += 1
        try:
            await asyncio.wait([taking.task])
        finally:
            taking.leave()
        return outcome_of(taking)

    async def close(self) -> None:
        """Give up all of them."""
        tasks = [taking.task for taking in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _require_room(self) -> None:
        if len(self._running) >= MAX_WAITING:
            raise ReplicationError(f"node {self._node_id} has {MAX_WAITING} objects waiting already; try later")

    def _enter(self, taking: Taking) -> Taking:
        self._running[taking.object] = taking
        taking.task.add_done_callback(lambda done: self._ended(taking))
        return taking

    def _ended(self, taking: Taking) -> None:
        if self._running.get(taking.object) is taking:
            del self._running[taking.object]
        if taking.task.cancelled():
            return
        error = taking.task.exception()
        if error is not None:
            self._counters.add("pulls_failed")
            trouble = None if isinstance(error, ReplicatorError) else error
            log.warning("an object was not pulled", extra=fields(taking.object, reason=error), exc_info=trouble)


def outcome_of(taking: Taking) -> Taken:
    """What came of it. Raises what went wrong; TransferError when it was given up."""
    if taking.task.cancelled():
        raise TransferError(f"the pull of {taking.object} was given up because the agent is stopping")
    return taking.task.result()


class Outcomes(Generic[KeyT]):
    """Waits for many takings, and gives those that have ended together. Used in the event loop only."""

    def __init__(self) -> None:
        self._ended: list[tuple[KeyT, Taking]] = []
        self._news = asyncio.Event()
        self.open: dict[Taking, KeyT] = {}

    def add(self, key: KeyT, taking: Taking) -> None:
        self.open[taking] = key
        taking.task.add_done_callback(lambda done: self._end(key, taking))

    def _end(self, key: KeyT, taking: Taking) -> None:
        self._ended.append((key, taking))
        self._news.set()

    async def next(self, timeout_s: float | None = None) -> list[tuple[KeyT, Taking]]:
        """Those that ended since the last call, in this order; waits until there is one, or for `timeout_s`."""
        if not self._ended:
            self._news.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        ended, self._ended = self._ended, []
        for _, taking in ended:
            self.open.pop(taking, None)
        return ended
