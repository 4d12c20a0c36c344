"""What all sources of members have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

MAX_ADDRESSES = 8192

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How a source is. `problem` is empty while it is up to date; else the addresses are those known last."""

    kind: str
    addresses: int
    problem: str
    problem_since_unix_s: float


class Source(ABC):
    """Addresses of agents, kept up to date by `run`. Used in the event loop only.

    Attributes:
        on_change: called after the addresses have changed.
    """

    kind: ClassVar[str]

    def __init__(self, unix: Callable[[], float] = time.time) -> None:
        self._unix = unix
        self._problem = ""
        self._problem_since = 0.0
        self._poked = asyncio.Event()
        self.on_change: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """`host:port` each, at most MAX_ADDRESSES, without duplicates. This agent's own may be among them."""

    @property
    def status(self) -> SourceStatus:
        """How it is now."""
        return SourceStatus(self.kind, len(self.addresses), self._problem, self._problem_since)

    def poke(self) -> None:
        """A connection to some node was lost: nodes may have moved, so look again soon (F34)."""
        self._poked.set()

    async def run(self) -> None:
        """Keep the addresses up to date until cancelled; ends at once where nothing changes by itself."""
        return

    def _changed(self) -> None:
        for callback in self.on_change:
            callback()

    def _report(self, problem: str) -> None:
        """What is wrong now; empty when nothing is."""
        if problem and not self._problem:
            self._problem_since = self._unix()
            log.warning("members cannot be looked up by %s, those known last are kept: %s", self.kind, problem)
        elif self._problem and not problem:
            log.info("members are up to date again by %s", self.kind)
        self._problem = problem
        if not problem:
            self._problem_since = 0.0

    async def _pause(self, least_s: float, most_s: float) -> None:
        """Wait `most_s`, more or less, or until `poke`, but no shorter than `least_s`."""
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, most_s * random.uniform(0.75, 1.25) - least_s)):
                await self._poked.wait()
        self._poked.clear()
