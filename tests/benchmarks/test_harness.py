"""The harness of the benchmarks: medians, ratios, verdicts, and what makes a result invalid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks import machine
from benchmarks.harness import (
    MIN_RUNS,
    Series,
    Settings,
    closing_all,
    count_result,
    measure,
    rate_result,
    time_result,
)
from benchmarks.results import Result, ratio_at_least, ratio_at_most, schema_errors, value_at_most

QUIET = Settings(runs=MIN_RUNS, warmups=1, check_quiet=False, log=lambda _: None)


class Scripted:
    """A contender whose runs take the given seconds, in order."""

    def __init__(self, name: str, script: list[float | Mapping[str, float]], journal: list[str]) -> None:
        self.name = name
        self._script = iter(script)
        self._journal = journal
        self.closed = False

    @property
    def processes(self) -> Mapping[str, int]:
        return {"itself": os.getpid()}

    def prepare(self) -> None:
        self._journal.append(f"{self.name} prepares")

    def run(self) -> float | Mapping[str, float]:
        self._journal.append(f"{self.name} runs")
        return next(self._script)

    def close(self) -> None:
        self.closed = True


def test_contenders_take_turns_and_the_warm_up_does_not_count() -> None:
    journal: list[str] = []
    slow = Scripted("slow", [9.0, 2.0, 2.0, 4.0, 2.0, 3.0], journal)
    fast = Scripted("fast", [9.0, 1.0, 1.0, 1.0, 1.0, 1.0], journal)
    series = measure([slow, fast], QUIET)
    assert journal[:8] == ["slow prepares", "slow runs", "fast prepares", "fast runs"] * 2
    assert series["slow"].seconds == [2.0, 2.0, 4.0, 2.0, 3.0]
    assert series["slow"].median_s == 2.0


def test_rows_are_medians_and_their_quotient() -> None:
    size = 4_000_000_000
    own = Series("ours", seconds=[1.0, 2.0, 3.0, 4.0, 5.0], cpu=[{"a": 1.0, "b": 3.0}] * 5)
    limit = Series("raw", seconds=[2.0, 2.0, 1.0, 1.0, 2.0])
    row = rate_result("row", "words", size, own, limit, bar=ratio_at_least(0.5))
    assert row.value == pytest.approx(4 / 3)
    assert row.limit == pytest.approx(2.0)
    assert row.ratio == pytest.approx(2 / 3)
    assert row.limit_name == "raw"
    assert row.spread == pytest.approx((0.8, 4.0))
    assert row.cpu_s_per_gb == pytest.approx(1.0)
    assert row.cpu_by_process == pytest.approx({"a": 0.25, "b": 0.75})
    assert row.verdict == "met"
    assert time_result("t", "", size, own, limit).ratio == pytest.approx(1.5)
    assert count_result("c", "", 300, size, own).value == pytest.approx(100.0)


def test_a_span_of_a_run_is_a_series_of_its_own() -> None:
    contender = Scripted("ours", [{"total": 2.0, "part": 0.5}] * 6, [])
    series = measure([contender], QUIET)["ours"]
    assert series.median_s == 2.0
    assert series.span("part").median_s == 0.5


@pytest.mark.parametrize(
    ("bar", "value", "limit", "verdict"),
    [
        (ratio_at_least(0.85), 8.5, 10.0, "met"),
        (ratio_at_least(0.85), 8.4, 10.0, "missed"),
        (ratio_at_most(1.1), 1.2, 1.0, "missed"),
        (value_at_most(0.3), 0.3, None, "met"),
        (ratio_at_least(2.0), 5.0, None, "not available"),
        (None, 5.0, None, "info"),
        (ratio_at_least(2.0), None, None, "not available"),
    ],
)
def test_verdicts(bar: object, value: float | None, limit: float | None, verdict: str) -> None:
    row = Result(name="n", what="w", unit="u", value=value, limit=limit, bar=bar)  # type: ignore[arg-type]
    assert row.verdict == verdict
    assert replace(row, failed=True).verdict == "failed"


def test_an_invalid_row_has_no_verdict_on_its_bar() -> None:
    row = Result(
        name="n", what="w", unit="u", value=1.0, limit=1.0, bar=ratio_at_least(0.5), valid=False, reason="busy"
    )
    assert row.verdict == "invalid"


def test_too_few_runs_are_not_valid() -> None:
    row = rate_result("n", "w", 1, Series("ours", seconds=[1.0] * (MIN_RUNS - 1), cpu=[{}] * (MIN_RUNS - 1)))
    assert not row.valid
    assert "at least 5" in row.reason


def test_one_disturbed_run_of_five_is_borne_and_two_are_not() -> None:
    series = Series("ours", seconds=[1.0] * MIN_RUNS, disturbed=1)
    assert series.invalid_because == ""
    series.disturbed = 2
    assert "machine busy during 2 of 5 runs of ours" in series.invalid_because


def test_a_contender_that_fails_sits_out_and_the_others_go_on() -> None:
    def broken() -> list[float | Mapping[str, float]]:
        return [1.0, 1.0]

    series = measure([Scripted("broken", broken(), []), Scripted("sound", [1.0] * 6, [])], QUIET)
    assert series["broken"].error.startswith("StopIteration")
    assert series["sound"].seconds == [1.0] * MIN_RUNS
    row = rate_result("n", "w", 1, series["broken"], series["sound"])
    assert row.verdict == "failed"
    assert row.value is None


def test_all_contenders_are_closed_when_one_cannot_start() -> None:
    first = Scripted("first", [], [])

    def start_all() -> None:
        with closing_all() as contenders:
            contenders.append(first)
            raise RuntimeError("no second")

    with pytest.raises(RuntimeError, match="no second"):
        start_all()
    assert first.closed


def test_a_busy_process_that_is_not_ours_is_noticed() -> None:
    """A child is ours; one that was handed to init is not."""
    spin = "import os, sys, time\nif os.fork(): sys.exit()\nprint(os.getpid(), flush=True)\n"
    spin += "while time.process_time() < 20: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        try:
            process.wait(60)
            assert orphan not in machine.descendants(os.getpid())
            watch = machine.Watch()
            used = machine.cpu_seconds(orphan)
            while machine.cpu_seconds(orphan) - used < 0.3:
                time.sleep(0.01)
            assert watch.is_disturbed()
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_cpu_seconds_count_other_processes_and_end_with_them() -> None:
    with subprocess.Popen([sys.executable, "-c", "x = sum(range(10**7)); input()"], stdin=subprocess.PIPE) as process:
        while machine.cpu_seconds(process.pid) < 0.05:
            assert process.poll() is None
        assert process.pid in machine.descendants(os.getpid())
        process.kill()
    assert machine.cpu_seconds(process.pid) == 0.0


def test_the_schema_names_what_is_wrong() -> None:
    row = Result(name="n", what="w", unit="u", value=1.0).to_json()
    assert schema_errors([row]) == []
    assert schema_errors({}) == ["expected a list, found dict"]
    assert "limit is missing" in schema_errors([{k: v for k, v in row.items() if k != "limit"}])[0]
    assert "ratio is a str" in schema_errors([{**row, "ratio": "1.0"}])[0]
    assert "neither a value nor a reason" in schema_errors([{**row, "value": None}])[0]
