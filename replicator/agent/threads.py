"""Work in a thread that writes into memory of somebody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def run_to_end(work: Callable[[], ResultT]) -> ResultT:
    """`asyncio.to_thread`, but it has ended when this returns or raises, also when this was cancelled meanwhile.

    A thread cannot be stopped, and its memory must not be given to others before.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not working.cancelled():
            working.exception()
        raise cancelled
    return working.result()
