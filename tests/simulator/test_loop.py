"""Virtual time, and processes that die between two steps."""

from __future__ import annotations

import asyncio
import random

import pytest

from .loop import DeadlockError, Process, VirtualLoop


def test_time_jumps_to_the_next_timer() -> None:
    loop = VirtualLoop(random.Random(1))

    async def main() -> float:
        began = loop.time()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        return loop.time() - began

    assert loop.run(main()) == 7260


def test_a_thread_does_its_work_at_one_moment_and_is_heard_of_later() -> None:
    loop = VirtualLoop(random.Random(1))
    seen: list[float] = []

    async def main() -> tuple[float, float]:
        began = loop.time()
        await asyncio.to_thread(lambda: seen.append(loop.time()))
        return began, loop.time()

    began, ended = loop.run(main())
    assert began < seen[0] < ended


def test_a_killed_process_takes_no_step_more_not_even_to_tidy_up() -> None:
    loop = VirtualLoop(random.Random(1))
    done: list[str] = []

    async def life(name: str) -> None:
        try:
            await asyncio.to_thread(done.append, f"{name} writes")
            await asyncio.sleep(10)
            done.append(f"{name} wakes")
        finally:
            done.append(f"{name} tidies up")

    async def main() -> None:
        killed, other = Process(loop, "killed"), Process(loop, "other")
        killed.spawn(life("killed"))
        task = other.spawn(life("other"))
        await asyncio.sleep(5)
        killed.kill()
        await task

    loop.run(main())
    assert done == ["killed writes", "other writes", "other wakes", "other tidies up"] or done == [
        "other writes",
        "killed writes",
        "other wakes",
        "other tidies up",
    ]


def test_a_wait_without_a_deadline_is_an_error() -> None:
    loop = VirtualLoop(random.Random(1))

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="somebody still waits"):
        loop.run(main())
