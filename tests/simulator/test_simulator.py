"""The simulator itself: seeds pass, a seed is a run, and what is broken on purpose is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .breaks import BREAKS
from .world import run_seed

SOURCE = Path(__file__).parents[2]
# Of each run of CI; `make simulate` runs as many as one wants.
SEEDS = 90


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", *arguments],
        cwd=SOURCE,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.timeout(300)
def test_all_invariants_hold_whatever_goes_wrong() -> None:
    """F01, F04, F05, F09, F10, F11, F13, F19, F45, F48, F49, in the orders that these seeds come up with."""
    done = simulate("--seeds", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds in" in done.stdout
    assert "seeds that failed: 0" in done.stdout
    for kind in ("agent crash", "node loss", "partition", "bit flip at rest", "disk full", "duplicated"):
        assert kind in done.stdout


def test_a_seed_is_a_run() -> None:
    traces: list[list[str]] = [[], []]
    results = [run_seed(11, tell=lines.append) for lines in traces]
    assert traces[0] == traces[1]
    assert results[0].steps == results[1].steps
    assert len(traces[0]) > 100


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_what_is_broken_on_purpose_is_noticed(name: str) -> None:
    problems = (run_seed(seed, name).problem for seed in range(1, 51))
    assert next(filter(None, problems), "") != ""


def test_a_failure_names_its_seed_and_how_to_see_it_again() -> None:
    before = _directories()
    done = simulate("--seeds", "3", "--break", "drop-newest")
    made = _directories() - before
    assert done.returncode == 1
    assert "FAILED: node n" in done.stdout
    assert "make simulate SEED=" in done.stdout
    assert "BREAK=drop-newest" in done.stdout
    # Those of other tests, which run meanwhile, go when they end; the runs that the failure ended are ended.
    end = time.monotonic() + 60
    while left := made & _directories():
        assert time.monotonic() < end, left
        time.sleep(0.05)


def _directories() -> set[Path]:
    return set(Path("/dev/shm").glob("replicator-sim-*"))
