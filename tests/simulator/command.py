"""Runs seeds, and says what they showed."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterable

from .world import Result, run_seed


def one(seed: int, break_what: str, *, quiet: bool = False) -> int:
    """One seed with its trace. Returns the exit status."""
    result = run_seed(seed, break_what, None if quiet else lambda line: print(line, flush=True))
    print(_outcome(result, break_what))
    return 1 if result.problem else 0


def many(first: int, count: int, break_what: str, processes: int, *, keep_going: bool = False) -> int:
    """Many seeds; the first one that fails ends it. Returns the exit status."""
    began = time.monotonic()
    results: list[Result] = []
    failed: list[Result] = []
    with (
        # Of what is ended in the middle, too, nothing stays.
        tempfile.TemporaryDirectory(prefix="replicator-sim-", dir="/dev/shm") as within,
        multiprocessing.get_context("spawn").Pool(min(processes, count)) as pool,
    ):
        work = [(seed, break_what, within) for seed in range(first, first + count)]
        for result in pool.imap_unordered(_run, work, chunksize=1):
            results.append(result)
            if result.problem:
                failed.append(result)
                print(_outcome(result, break_what), flush=True)
                if not keep_going:
                    print("its last events:\n" + "\n".join(result.trace))
                    break
        pool.terminate()
        pool.join()
    print(_summary(results, time.monotonic() - began))
    return 1 if failed else 0


def _run(work: tuple[int, str, str]) -> Result:
    seed, break_what, within = work
    return run_seed(seed, break_what, within=within)


def _outcome(result: Result, break_what: str) -> str:
    if not result.problem:
        return f"seed {result.seed}: all invariants held, in {result.seconds:.1f} simulated seconds"
    again = f"make simulate SEED={result.seed}" + (f" BREAK={break_what}" if break_what else "")
    return f"seed {result.seed} FAILED: {result.problem}\n  again, with its trace: {again}"


def _summary(results: list[Result], seconds: float) -> str:
    checked: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for result in results:
        checked.update(result.checked)
        faults.update(result.faults)
    lines = [
        f"{len(results)} seeds in {seconds:.1f} s: {sum(one.seconds for one in results) / 3600:.1f} simulated hours, "
        f"{sum(one.steps for one in results)} steps",
        f"invariants checked: {sum(checked.values())}",
        *_table(checked.items()),
        f"faults injected: {sum(faults.values())}",
        *_table(faults.items()),
        f"checkpoints protected: {sum(one.protected for one in results)}",
        f"recoveries made: {sum(one.restores for one in results)}",
        f"seeds that failed: {sum(bool(one.problem) for one in results)}",
    ]
    return "\n".join(lines)


def _table(items: Iterable[tuple[str, int]]) -> list[str]:
    return [f"  {count:10}  {name}" for name, count in sorted(items)]
