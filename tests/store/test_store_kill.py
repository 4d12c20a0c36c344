"""SIGKILL at any line of the store's code: a restart finds the old state or the new one."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_program.py")


@pytest.mark.parametrize(("role", "stride", "at_least"), [("agent", 41, 40), ("trainer", 17, 20)])
def test_a_kill_at_any_line_leaves_the_old_state_or_the_new_one(
    shm_root: Path, role: str, stride: int, at_least: int
) -> None:
    """F05, F24, F27: nothing half-written is ever seen, nothing finished is lost, and no byte leaks.

    Each run takes other lines; all of them (stride 1) take minutes.
    """
    first = random.randint(1, stride)
    command = [sys.executable, str(PROGRAM), str(shm_root), role, str(stride), str(first)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stderr}"
    assert int(ended.stdout) >= at_least
