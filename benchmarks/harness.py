"""How things are measured: warm-up, then rounds in which every contender runs once, then medians.

Contenders of one measurement take turns, so that a ratio compares the same minutes. Before each run the
machine must be quiet; a run during which others took CPU time is repeated, and when too many stay
disturbed the result is marked invalid.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from benchmarks import machine
from benchmarks.results import Bar, Result

MIN_RUNS = 5
"""With fewer runs a result is not called valid."""
MAX_REPEATS = 5
"""So often a disturbed run is tried again, over all runs of one contender."""


@dataclass(frozen=True)
class Settings:
    """What the command line asked for. Sizes in bytes."""

    size: int = 1 << 30
    runs: int = MIN_RUNS
    warmups: int = 1
    quick: bool = False
    directory: Path = Path("/dev/shm")
    cache: Path = Path(__file__).parent / ".cache"
    peers: bool = True
    connections: int = 2
    congestion: str = ""
    quiet_limit_s: float = 20.0
    check_quiet: bool = True
    log: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))


class Contender(Protocol):
    """One thing that is measured."""

    @property
    def name(self) -> str: ...

    @property
    def processes(self) -> Mapping[str, int]:
        """Role in words -> pid of every process whose CPU time and memory count."""

    def prepare(self) -> None:
        """Whatever each run needs before it, not timed."""

    def run(self) -> float | Mapping[str, float]:
        """One run; the seconds it took, or several spans of it by name, of which "total" counts."""

    def close(self) -> None: ...


@dataclass
class Series:
    """The runs of one contender, without the warm-up.

    Attributes:
        seconds: of each run.
        spans: of each run, all spans that it reported.
        cpu: of each run, CPU seconds by process.
        faults: of each run, page faults by process.
        peak_bytes: by process, greatest resident memory during a run.
        disturbed: runs among them during which the machine was busy with something else.
        error: why there are no more runs.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    spans: list[Mapping[str, float]] = field(default_factory=list)
    cpu: list[dict[str, float]] = field(default_factory=list)
    faults: list[dict[str, int]] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    disturbed: int = 0
    repeats: int = 0
    error: str = ""

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds and not self.error else None

    @property
    def invalid_because(self) -> str:
        """Empty when the runs can be trusted."""
        if self.disturbed * MIN_RUNS > len(self.seconds):
            return f"machine busy during {self.disturbed} of {len(self.seconds)} runs of {self.name}"
        if len(self.seconds) < MIN_RUNS:
            return f"{len(self.seconds)} runs, at least {MIN_RUNS} are needed"
        return ""

    def span(self, name: str) -> Series:
        """The same runs, but the seconds of one span of each."""
        seconds = [run[name] for run in self.spans]
        return replace(self, name=f"{self.name}, {name}", seconds=seconds)

    def cpu_s_per_gb(self, size: int) -> dict[str, float]:
        """By process: median CPU seconds per 1e9 bytes, for runs of `size` bytes."""
        roles = self.cpu[0] if self.cpu else {}
        return {role: statistics.median(run.get(role, 0.0) for run in self.cpu) / size * 1e9 for role in roles}

    def page_faults(self) -> dict[str, float]:
        """By process: median page faults of a run."""
        roles = self.faults[0] if self.faults else {}
        return {role: statistics.median(run.get(role, 0) for run in self.faults) for role in roles}

    def total_cpu_s_per_gb(self, size: int) -> float | None:
        """Median over the runs of all processes' CPU seconds per 1e9 bytes."""
        return statistics.median(sum(run.values()) for run in self.cpu) / size * 1e9 if self.cpu else None


def measure(contenders: Sequence[Contender], settings: Settings) -> dict[str, Series]:
    """Run all contenders in turns; by name. One that raises keeps the error and sits out the rest."""
    series = {contender.name: Series(contender.name) for contender in contenders}
    for number in range(settings.warmups + settings.runs):
        for contender in contenders:
            record = series[contender.name]
            if not record.error:
                try:
                    _run_once(contender, record, settings, keep=number >= settings.warmups)
                except Exception as error:
                    record.error = f"{type(error).__name__}: {error}"
                    settings.log(f"    {contender.name} failed: {record.error}")
    return series


def _run_once(contender: Contender, record: Series, settings: Settings, keep: bool) -> None:
    while True:
        contender.prepare()
        watching = keep and settings.check_quiet
        quiet = machine.wait_until_quiet(settings.quiet_limit_s) if watching else True
        for pid in contender.processes.values():
            machine.reset_peak(pid)
        before = {role: machine.cpu_seconds(pid) for role, pid in contender.processes.items()}
        faults_before = {role: machine.page_faults(pid) for role, pid in contender.processes.items()}
        watch = machine.Watch()
        spans = _spans(contender.run())
        disturbed = watching and (watch.is_disturbed() or not quiet)
        processes = dict(contender.processes)
        # A process that the run itself started counts from its birth.
        cpu = {role: machine.cpu_seconds(pid) - before.get(role, 0.0) for role, pid in processes.items()}
        if not keep:
            return
        if disturbed and record.repeats < MAX_REPEATS:
            record.repeats += 1
            continue
        record.seconds.append(spans["total"])
        record.spans.append(spans)
        record.cpu.append(cpu)
        record.faults.append(
            {role: machine.page_faults(pid) - faults_before.get(role, 0) for role, pid in processes.items()}
        )
        record.disturbed += disturbed
        for role, pid in processes.items():
            record.peak_bytes[role] = max(record.peak_bytes.get(role, 0), machine.Memory.of(pid).peak)
        return


def _spans(result: float | Mapping[str, float]) -> Mapping[str, float]:
    return result if isinstance(result, Mapping) else {"total": result}


@contextmanager
def closing_all() -> Iterator[list[Contender]]:
    """A list of contenders, all closed at the end, the last one first."""
    contenders: list[Contender] = []
    try:
        yield contenders
    finally:
        for contender in reversed(contenders):
            contender.close()


def rate_result(
    name: str,
    what: str,
    size: int,
    own: Series,
    limit: Series | None = None,
    limit_name: str = "",
    bar: Bar | None = None,
) -> Result:
    """A row in GB/s: `own` against `limit`, both having moved `size` bytes per run."""
    return _result(name, what, "GB/s", lambda s: size / s / 1e9, size, own, limit, limit_name, bar)


def time_result(
    name: str,
    what: str,
    size: int,
    own: Series,
    limit: Series | None = None,
    limit_name: str = "",
    bar: Bar | None = None,
) -> Result:
    """A row in seconds."""
    return _result(name, what, "s", lambda s: s, size, own, limit, limit_name, bar)


def count_result(
    name: str,
    what: str,
    count: int,
    size: int,
    own: Series,
    limit: Series | None = None,
    limit_name: str = "",
    bar: Bar | None = None,
) -> Result:
    """A row in objects per second, of `count` objects with `size` bytes altogether."""
    return _result(name, what, "objects/s", lambda s: count / s, size, own, limit, limit_name, bar)


def _result(
    name: str,
    what: str,
    unit: str,
    of_seconds: Callable[[float], float],
    size: int,
    own: Series,
    limit: Series | None,
    limit_name: str,
    bar: Bar | None,
) -> Result:
    values = [of_seconds(seconds) for seconds in own.seconds]
    reasons = [own.error or own.invalid_because]
    if limit is not None:
        reasons.append(limit.error or limit.invalid_because)
    median = own.median_s
    limit_median = limit.median_s if limit is not None else None
    return Result(
        name=name,
        what=what,
        unit=unit,
        value=of_seconds(median) if median is not None else None,
        limit_name=limit_name or (limit.name if limit is not None else ""),
        limit=of_seconds(limit_median) if limit_median is not None else None,
        cpu_s_per_gb=own.total_cpu_s_per_gb(size),
        bar=bar,
        valid=not any(reasons),
        reason="; ".join(dict.fromkeys(reason for reason in reasons if reason)),
        failed=bool(own.error or (limit is not None and limit.error)),
        runs=len(own.seconds),
        spread=(min(values), max(values)) if values else None,
        cpu_by_process=own.cpu_s_per_gb(size),
        page_faults=own.page_faults(),
        peak_memory_mb={role: peak / 1e6 for role, peak in own.peak_bytes.items()},
    )


def combine_validity(*series: Series) -> tuple[bool, str]:
    """(valid, reason) of a row made of several series."""
    reasons = [reason for one in series if (reason := one.error or one.invalid_because)]
    return not reasons, "; ".join(dict.fromkeys(reasons))
