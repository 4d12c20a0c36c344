"""Trying again: exponential back-off with jitter, inside a deadline, unless the refusal is final."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from replicator.errors import ReplicatorError

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


async def repeat(
    once: Callable[[], Awaitable[None]],
    deadline_s: float,
    final: tuple[type[ReplicatorError], ...] = (),
) -> None:
    """Run `once` until it succeeds.

    Args:
        deadline_s: no new attempt is begun when this long has passed.
        final: errors after which it is not tried again.

    Raises:
        ReplicatorError: of the last attempt.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    pause = FIRST_BACKOFF_S
    while True:
        try:
            await once()
            return
        except final:
            raise
        except ReplicatorError:
            wait = min(pause, deadline_s / 4) * (0.5 + random.random())
            if loop.time() + wait >= end:
                raise
        await asyncio.sleep(wait)
        pause = min(pause * 2, MAX_BACKOFF_S)
