"""An idle agent touches the memory that the next pulls will land in, and keeps it mapped.

What is made: first segments for objects like those of the largest container that this node has pulled, which the next
container will be like; then, up to the configured bytes, segments for objects of any size, which are cut to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from replicator.agent.counters import Counters
from replicator.agent.landing import Landing
from replicator.agent.load import CpuPressure
from replicator.agent.threads import run_to_end
from replicator.config import AUTO_BYTES, AgentConfig
from replicator.errors import StoreError
from replicator.store import Store
from replicator.store.pool import fits
from replicator.store.segment import MappedSegment
from replicator.store.stock import fault_in
from replicator.store.trailer import capacity_for

PERIOD_S = 0.5
QUIET_S = 1.0
MAX_PAUSE_S = 60.0
MIN_SEGMENT_BYTES = 1 << 20
"""A smaller object is written faster than a segment is looked for."""
MAX_SEGMENTS = 128

log = logging.getLogger(__name__)


def next_segment(
    known: Sequence[int], free: Iterable[int], limit: int, piece: int, is_auto: bool = False
) -> tuple[int, bool] | None:
    """What to make next: (capacity, whether for objects of any size); None when there is enough.

    Args:
        known: capacities that objects like the last ones need.
        free: capacities of the segments that are free already.
        limit: bytes that all free segments together may take; with `is_auto` those of `known` count instead.
        piece: capacity of a segment for objects of any size; there are none with `is_auto`.
    """
    left = sorted(free)
    if len(left) >= MAX_SEGMENTS:
        return None
    room = (sum(known) if is_auto else limit) - sum(left)
    for capacity in sorted(known, reverse=True):
        match = next((one for one in left if fits(one, capacity)), None)
        if match is not None:
            left.remove(match)
        elif capacity <= room:
            return capacity, False
    if is_auto or piece > room:
        return None
    return piece, True


class Prefaulter:
    """Used in the event loop only.

    Args:
        client_id: the agent's, as a client of its store.
        pressure: gives the percent of the time in which processes wait for a CPU.
    """

    def __init__(
        self,
        config: AgentConfig,
        client_id: str,
        store: Store,
        landing: Landing,
        counters: Counters,
        pressure: Callable[[], float] | None = None,
    ) -> None:
        self._config = config
        self._client_id = client_id
        self._store = store
        self._landing = landing
        self._counters = counters
        self._pressure = pressure or CpuPressure().percent
        self._closing = False
        self._seen: object = None
        self._known: list[int] = []

    async def run(self) -> None:
        """For ever. Returns at once when it is switched off."""
        if not self._config.prefault_bytes:
            return
        pause = PERIOD_S
        while True:
            await asyncio.sleep(pause)
            if not self._is_idle():
                continue
            wanted = self._wanted()
            if wanted is None:
                pause = PERIOD_S
            elif await self._make(*wanted):
                pause = 0.0
            else:
                # It was stopped, or there is no room; what was touched is lost, so that is not tried all the time.
                pause = min(max(pause, PERIOD_S) * 2, MAX_PAUSE_S)

    def stop(self) -> None:
        """Touch nothing more. To be called before `run` is cancelled."""
        self._closing = True

    def _is_idle(self) -> bool:
        """Nobody has asked for memory just now, nobody writes into any, and the CPUs are not wanted by others."""
        return (
            self._store.stocking.quiet_s() >= QUIET_S
            and not self._store.usage().reserved_bytes
            and not self._is_crowded()
        )

    def _is_crowded(self) -> bool:
        return self._closing or self._pressure() > self._config.prefault_max_pressure

    def _wanted(self) -> tuple[int, bool] | None:
        return next_segment(
            self._capacities(),
            [segment.capacity for segment in self._store.free_segments(self._client_id)],
            self._config.prefault_bytes,
            capacity_for(self._config.prefault_segment_bytes),
            self._config.prefault_bytes == AUTO_BYTES,
        )

    def _capacities(self) -> list[int]:
        """Of the objects in the largest container that agents have pulled to this node."""
        versions = self._store.versions()
        seen = (versions, self._store.usage().sealed_objects)
        if seen != self._seen:
            self._seen = seen
            pulled = (
                [
                    capacity_for(info.size, info.block_size)
                    for info in self._store.objects(version).values()
                    if info.client_id.startswith("agent-")
                ]
                for version in versions
            )
            self._known = max(
                ([one for one in capacities if one >= MIN_SEGMENT_BYTES] for capacities in pulled), key=sum, default=[]
            )
        return self._known

    async def _make(self, capacity: int, blank: bool) -> bool:
        def fault(mapped: MappedSegment, is_stopped: Callable[[], bool]) -> bool:
            done = fault_in(mapped, lambda: is_stopped() or self._is_crowded())
            if done:
                self._landing.keep(mapped)
            return done

        self._landing.hold()
        try:
            made = await run_to_end(lambda: self._store.stock(self._client_id, capacity, fault, blank))
        except StoreError as error:
            log.debug("%s", error)
            return False
        self._counters.add("segments_prefaulted", int(made))
        self._counters.add("bytes_prefaulted", capacity if made else 0)
        return made
