"""What a load has read past this node's store comes into it afterwards, so that the node is a holder again.

Nobody waits for that, so it gives way to whoever waits for bytes: one object at a time, and before each piece of it
until no trainer does. When somebody comes to wait for such an object itself, it gives way no more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from replicator.agent.counters import Counters
from replicator.agent.retention import Retention
from replicator.agent.takings import Taken, Taking, Takings
from replicator.decide.types import ObjectSource
from replicator.errors import ReplicationError
from replicator.ids import ContainerVersion
from replicator.store import Store
from replicator.transfer.turns import Patience, PullPolicy

QUIET_S = 0.25


class Quiet:
    """Tells when no trainer has waited for bytes for QUIET_S. Used in the event loop only."""

    def __init__(self) -> None:
        self._waiting = 0
        self._event = asyncio.Event()
        self._event.set()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def disturbed(self) -> Iterator[None]:
        """In the block a trainer waits for bytes."""
        self._waiting += 1
        self._event.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._event.set)

    async def wait(self, hurry: asyncio.Event, limit_s: float) -> None:
        """Until it is quiet, `hurry` is set, or the time is over: work that can wait is not put off for ever."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._event, hurry)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()


class Land(Protocol):
    """Pulls a whole object from its holders into this node's store."""

    def __call__(
        self,
        taking: Taking,
        source: ObjectSource,
        patience: Patience,
        require_wanted: Callable[[], None],
        pace: Callable[[], Awaitable[None]],
        /,
    ) -> Awaitable[Taken]: ...


class Refill:
    """Used in the event loop only."""

    def __init__(
        self, store: Store, takings: Takings, retention: Retention, counters: Counters, quiet: Quiet, land: Land
    ) -> None:
        self._store = store
        self._takings = takings
        self._retention = retention
        self._counters = counters
        self._quiet = quiet
        self._land = land
        self._slots = asyncio.Semaphore(1)

    def expect(self, version: ContainerVersion, sources: Sequence[ObjectSource], policy: PullPolicy) -> None:
        """Bring these objects in time. Returns at once; what becomes of them is in the log and the counts.

        Args:
            policy: before each piece others are given way to for no longer than a silent source is waited for.

        Raises:
            ReplicationError: too many objects are on their way here already.
            ObjectExistsError: other content is on its way under one of the names.
        """
        for source in sources:
            one = version.object(source.name)
            held = self._store.get(one)
            if held is not None and (held.size, held.crc32c) == (source.size, source.crc32c):
                continue
            if self._takings.find(one, source.size, source.crc32c) is not None:
                continue
            taking = self._takings.start(
                one,
                source.size,
                source.crc32c,
                lambda taking, source=source: self._bring(taking, source, policy),  # type: ignore[misc]
                later=True,
            )
            taking.users += 1

    async def _bring(self, taking: Taking, source: ObjectSource, policy: PullPolicy) -> Taken:
        version = taking.object.version

        def require_wanted() -> None:
            reason = self._retention.refusal(version)
            if reason:
                raise ReplicationError(f"{taking.object} is not brought to this node any more: {reason}")

        async def pace() -> None:
            await self._quiet.wait(taking.hurry, policy.progress_timeout_s)
            require_wanted()

        async with self._slots:
            await pace()
            taking.waiting = False
            taken = await self._land(taking, source, Patience(policy), require_wanted, pace)
        self._counters.add("objects_refilled")
        return taken
