"""The scrubber: verifies every object that this node holds, one after the other, slowly, and again and again.

A copy that nobody reads may be bad for days, and is found to be so when it is the last one. What is found here is put
in quarantine, and pulled again from another holder (repair.py).

It gives way: nothing is read while objects are written, pulled or copied, or while processes wait for CPUs. But not for
ever: on a machine that is never idle, a piece is checked after each `MAX_PAUSE_S`. Its thread keeps the priority of all
others: one that is given the CPU last could hold the interpreter's lock all the while.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicator.agent.counters import Counters
from replicator.agent.landing import Landing
from replicator.agent.load import CpuPressure
from replicator.agent.pieces import Pieces, Place, verify
from replicator.config import AgentConfig
from replicator.errors import InvalidIdError
from replicator.ids import CheckpointContainerId, ContainerVersion, validate_object_name
from replicator.store import Store
from replicator.store.paths import StorePaths, read_small, write_atomic

QUIET_S = 1.0
LOOK_S = 0.5
MAX_PAUSE_S = 10.0
# From the begin of one pass to that of the next, at least.
PASS_S = 600.0
SAVE_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the scrubber is. Times are those of the wall clock in milliseconds; 0: not yet."""

    began_unix_ms: int = 0
    finished_unix_ms: int = 0  # the last full pass
    place: Place | None = None  # None: no pass is under way

    def to_json(self) -> str:
        found: dict[str, Any] = {"began_unix_ms": self.began_unix_ms, "finished_unix_ms": self.finished_unix_ms}
        if self.place is not None:
            version = self.place.version
            found["place"] = {
                "job": version.container.job,
                "step": version.container.step,
                "generation": version.generation,
                "name": self.place.name,
                "block": self.place.block,
            }
        return json.dumps(found)

    @classmethod
    def from_json(cls, text: bytes) -> Progress:
        """Raises ValueError for what it is not."""
        try:
            found = json.loads(text)
            at = found.get("place")
            place = None
            if at is not None:
                version = ContainerVersion(CheckpointContainerId(at["job"], at["step"]), at["generation"])
                place = Place(version, validate_object_name(at["name"]), _count(at["block"]))
            return cls(_count(found["began_unix_ms"]), _count(found["finished_unix_ms"]), place)
        except (LookupError, TypeError, AttributeError, InvalidIdError) as error:
            raise ValueError(f"not the progress of a scrubber: {error}") from None


class Scrubber:
    """Used in the event loop only.

    Args:
        is_busy: whether objects are on their way to this node or from it.
        pressure: gives the percent of the time in which processes wait for a CPU.
        pass_s: at least so long from the begin of one pass to that of the next, in seconds.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        landing: Landing,
        counters: Counters,
        is_busy: Callable[[], bool],
        pressure: Callable[[], float] | None = None,
        pass_s: float = PASS_S,
    ) -> None:
        self._config = config
        self._store = store
        self._landing = landing
        self._counters = counters
        self._is_busy_elsewhere = is_busy
        self._pressure = pressure or CpuPressure().percent
        self._pass_s = pass_s
        self._saved_at = 0.0
        self.progress = _read(store.paths)

    async def run(self) -> None:
        """For ever. Returns at once when it is switched off."""
        if not self._config.scrub_bytes_per_s:
            return
        try:
            while True:
                await asyncio.sleep(self._until_next_pass())
                try:
                    if await self._pass():
                        continue
                except Exception:
                    log.exception("objects could not be verified, and will be again")
                    await asyncio.sleep(self._config.deadline_s)
                await asyncio.sleep(LOOK_S)
        finally:
            self._save()

    def _until_next_pass(self) -> float:
        """Seconds. A clock that was set back makes nobody wait."""
        if self.progress.place is not None:
            return 0.0
        since = (_now_ms() - self.progress.began_unix_ms) / 1000
        return min(max(self._pass_s - since, 0.0), self._pass_s) if since >= 0 else 0.0

    async def _pass(self) -> bool:
        """One pass, or the rest of one; False when there was nothing to look at."""
        began = self.progress.began_unix_ms if self.progress.place is not None else _now_ms()
        pieces = Pieces(self._store, self.progress.place)
        started = asyncio.get_running_loop().time()
        checked = 0
        while True:
            await self._wait_for_calm()
            due = asyncio.get_running_loop().time()
            parts = pieces.next()
            if not parts:
                break
            bad = await self._landing.check_many(lambda parts=parts: verify(self._store.paths, parts))  # type: ignore[misc]
            for one, error in bad:
                self._counters.add("scrub_bad")
                await self._landing.set_aside(one, error)
            checked += sum(part.size for part in parts)
            self._counters.add("objects_scrubbed", sum(part.is_last for part in parts))
            self._counters.add("bytes_scrubbed", sum(part.size for part in parts))
            self.progress = Progress(began, self.progress.finished_unix_ms, pieces.place)
            self._save(SAVE_S)
            due += sum(part.cost for part in parts) / self._config.scrub_bytes_per_s
            await asyncio.sleep(max(due - asyncio.get_running_loop().time(), 0.0))
        if pieces.place is None:
            return False
        self.progress = Progress(began, _now_ms())
        self._save()
        seconds = round(asyncio.get_running_loop().time() - started, 1)
        log.info("all objects of this node were verified", extra={"bytes": checked, "seconds": seconds})
        return True

    async def _wait_for_calm(self) -> None:
        for _ in range(int(MAX_PAUSE_S / LOOK_S)):
            if not self._is_busy():
                return
            await asyncio.sleep(LOOK_S)

    def _is_busy(self) -> bool:
        return (
            self._is_busy_elsewhere()
            or self._store.stocking.quiet_s() < QUIET_S
            or self._store.usage().reserved_bytes > 0
            or self._pressure() > self._config.scrub_max_pressure
        )

    def _save(self, at_most_every_s: float = 0.0) -> None:
        now = time.monotonic()
        if at_most_every_s and now - self._saved_at < at_most_every_s:
            return
        self._saved_at = now
        try:
            write_atomic(self._store.paths.scrub, self.progress.to_json().encode())
        except OSError as error:
            # What is lost by it is the place, after a restart.
            log.debug("the place of the scrubber cannot be stored: %s", error)


def _read(paths: StorePaths) -> Progress:
    try:
        return Progress.from_json(read_small(paths.scrub))
    except FileNotFoundError:
        return Progress()
    except (OSError, ValueError) as error:
        log.warning("where the scrubber was cannot be read, it begins anew: %s", error)
        return Progress()


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a number from 0 on, found {value!r}")
    return value


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
