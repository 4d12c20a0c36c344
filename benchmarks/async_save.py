"""An asynchronous save: how long the training stands still."""

from __future__ import annotations

from benchmarks.harness import Settings, closing_all, measure, time_result
from benchmarks.product import Trainer
from benchmarks.results import Result, ratio_at_most
from benchmarks.single import Single


def measure_async_save(settings: Settings) -> list[Result]:
    """Blocking time of `dcp.async_save` against one copy of the state."""
    size = settings.size
    with closing_all() as ours:
        ours.append(Trainer("our async_save", "checkpointing:AsyncRole", settings, size=size, replicas=0))
        # One after the other, for the memory.
        with closing_all() as other:
            other.append(Single("one copy of the state", "checkpointing:CopyRole", size=size))
            own, copy = measure([*ours, *other], settings).values()
        rows = [
            time_result("async_blocking", "blocking time of dcp.async_save", size, own, copy, bar=ratio_at_most(1.1))
        ]
        if settings.quick:
            return rows
        with closing_all() as other:
            other.append(
                Single(
                    "async_save with FileSystemWriter", "peers.stock:AsyncRole", directory=settings.directory, size=size
                )
            )
            own_again, stock = measure([*ours, *other], settings).values()
    return [*rows, time_result("async_vs_dcp", "the same against stock DCP", size, own_again, stock)]
