"""Work on a container that nobody waits for: one task of a kind per container, none of them forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from replicator.agent.logs import fields
from replicator.ids import ContainerVersion

log = logging.getLogger(__name__)


class Background:
    """Used in the event loop only."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, ContainerVersion], asyncio.Task[None]] = {}
        self.closed = False

    def spawn(self, what: str, version: ContainerVersion, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Begin `work`, unless work of this kind is under way for the container already; the task of it."""
        key = (what, version)
        running = self._tasks.get(key)
        if running is not None and not running.done():
            work.close()
            return running
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[key] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self._tasks.get(key) is done:
                del self._tasks[key]
            if not done.cancelled() and done.exception() is not None:
                log.error("background work on a container failed", exc_info=done.exception(), extra=fields(version))

        task.add_done_callback(ended)
        return task

    def cancel(self, what: str, version: ContainerVersion) -> None:
        """Give up work of a kind."""
        task = self._tasks.get((what, version))
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give up everything."""
        self.closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
