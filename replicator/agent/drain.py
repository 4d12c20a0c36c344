"""Empties a node before it is stopped: it takes no copies any more, and gives what only it provides to others.

Which copies those are is decided by `decide.plan_healing`, for which the copies of a node that leaves do not count, and
done by heal.py. Being drained is a state of the process: another one that takes its place is not drained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from replicator.agent.counters import Counters
from replicator.agent.heal import Healer
from replicator.agent.jobs import Jobs
from replicator.agent.peers import PeerDirectory
from replicator.agent.puller import Puller
from replicator.config import AgentConfig
from replicator.decide.types import counted, listed

# Between two reports of how far it is.
_REPORT_S = 0.25
# Without anything being copied, or found out, for so many deadlines, a drain is given up as unknown.
_IDLE_DEADLINES = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain is.

    Attributes:
        done: nothing more is going to be moved now. `reason` says why something is left, if there is.
        objects_moved, bytes_moved: copies made since it began.
        objects_left, bytes_left: what has fewer copies than wanted on nodes that stay.
        objects_exposed: of these, those that no node has that stays: they would be lost.
    """

    draining: bool
    done: bool
    objects_moved: int
    bytes_moved: int
    objects_left: int
    bytes_left: int
    objects_exposed: int
    reason: str = ""


class Drain:
    """Of this node. Used in the event loop only."""

    def __init__(
        self,
        config: AgentConfig,
        node_id: str,
        jobs: Jobs,
        peers: PeerDirectory,
        puller: Puller,
        healer: Healer,
        counters: Counters,
    ) -> None:
        self._limit_s = _IDLE_DEADLINES * config.deadline_s
        self._node_id = node_id
        self._jobs = jobs
        self._peers = peers
        self._puller = puller
        self._healer = healer
        self._counters = counters
        self._moved_before = (0, 0)
        self._news = asyncio.Event()
        self._announcement: asyncio.Task[None] | None = None
        healer.on_round = self._news.set

    @property
    def active(self) -> bool:
        """Whether this node is being drained, or is drained."""
        return self._puller.draining

    def begin(self) -> None:
        """Take no copies any more, tell the others, and start moving. Does not wait. Idempotent."""
        if not self.active:
            self._moved_before = self._healer.moves.objects_moved, self._healer.moves.bytes_moved
            self._counters.add("drains")
            log.info("this node is being drained: it takes no copies any more")
        self._set(True)

    def cancel(self) -> None:
        """Take copies again. What was moved stays where it is. Idempotent."""
        if self.active:
            log.info("this node takes copies again")
        self._set(False)

    def progress(self) -> DrainProgress:
        """Now."""
        short = self._healer.short() if self.active else []
        done = not self.active or self._healer.quiet
        scarce, scarce_bytes = self._healer.scarce() if self.active else (0, 0)
        left, exposed = scarce + sum(one.objects for one in short), sum(one.exposed for one in short)
        moves = self._healer.moves
        return DrainProgress(
            draining=self.active,
            done=done,
            objects_moved=moves.objects_moved - self._moved_before[0],
            bytes_moved=moves.bytes_moved - self._moved_before[1],
            objects_left=left if done else max(left, moves.objects_left),
            bytes_left=scarce_bytes + sum(one.size_bytes for one in short) if done else moves.bytes_left,
            objects_exposed=exposed,
            reason=self._why_left(left, exposed, scarce) if done and left else "",
        )

    async def watch(self) -> AsyncGenerator[DrainProgress, None]:
        """How far it is, several times a second; the last one is `done`.

        Every question and every copy has a deadline, and who failed to take a copy is not asked again soon. Should it
        all the same not be found out for long whether anything is left, that is the end, and the reason.
        """
        loop = asyncio.get_running_loop()
        idle_since = loop.time()
        while True:
            self._news.clear()
            now = self.progress()
            if not self._healer.moves.idle:
                idle_since = loop.time()
            if not now.done and loop.time() - idle_since > self._limit_s:
                reason = f"for {self._limit_s:.1f} s it could not be found out who holds what; see the agent's log"
                now = replace(now, done=True, objects_exposed=max(now.objects_exposed, 1), reason=reason)
            yield now
            if now.done:
                return
            try:
                async with asyncio.timeout(_REPORT_S):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def finish(self, within_s: float) -> DrainProgress:
        """Drain, for at most so many seconds; how far it got."""
        self.begin()
        try:
            async with asyncio.timeout(within_s):
                async for now in self.watch():
                    if now.done:
                        return now
        except TimeoutError:
            pass
        return self.progress()

    async def close(self) -> None:
        """Give up telling others."""
        if self._announcement is not None:
            self._announcement.cancel()
            await asyncio.gather(self._announcement, return_exceptions=True)

    def _set(self, active: bool) -> None:
        if active == self.active:
            if active:
                self._healer.poke()
            return
        self._puller.draining = self._peers.own_draining = active
        self._healer.poke()
        if self._announcement is not None:
            self._announcement.cancel()
        self._announcement = asyncio.get_running_loop().create_task(self._peers.announce())

    def _why_left(self, left: int, exposed: int, scarce: int) -> str:
        cannot = [f"too few nodes stay for {scarce} of them"] if scarce else []
        cannot += [f"{node} is dead" for node in sorted(self._jobs.dead)]
        cannot += [f"{node} is being drained" for node in sorted(self._jobs.leaving - {self._node_id})]
        cannot += [f"{node} could not take copies" for node in sorted(self._healer.moves.closed())]
        cannot += [f"{node} refused some" for node in sorted({node for _, node in self._healer.moves.refused()})]
        who = f": {listed(cannot)}" if cannot else ""
        would = f"; {counted(exposed, 'object')} would be lost with it" if exposed else "; each has one at least"
        return f"{counted(left, 'object')} have fewer copies than wanted on nodes that stay{who}{would}"
