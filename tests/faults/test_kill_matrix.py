"""A few cases of the kill matrix. All of them: `make faults`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_kills import Case, Matrix, all_cases

from replicator.faultpoints import POINTS

QUICK = (
    Case("save", "seal.after_rename", "agent"),
    Case("save", "commit.sent", "node"),
    Case("recover", "pull.block", "agent"),
    Case("heal", "heal.copied", "agent"),
    Case("restart", "restart.rebuilding", "agent"),
)


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with Matrix() as made:
        yield made


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_kill_loses_nothing_that_was_promised(matrix: Matrix, case: Case) -> None:
    """F05, F24, F27: the newest recoverable step is found, byte by byte, nothing stays reserved, and saves go on."""
    line = matrix.run(case)
    assert line.ok, line.outcome
    assert line.lost_steps == 0 or case.death == "node"


def test_the_matrix_has_every_point() -> None:
    cases = list(all_cases())
    assert {case.point for case in cases} == set(POINTS)
    assert len({case.name for case in cases}) == len(cases)
    assert set(QUICK) <= set(cases)


def test_the_command_starts_by_itself() -> None:
    """It finds what the tests share without pytest."""
    top = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--list"], cwd=top, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) >= {case.name for case in all_cases()}
