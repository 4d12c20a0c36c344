"""A short, repeatable run of every fuzz target; `python -m tests.fuzz` runs them for as long as wished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_engine import MAX_INPUT_BYTES, Found, Target, TooSlowError, fuzz, inputs
from fuzz_targets import all_targets

SEED = 1
ROUNDS = 1500
ROOT = Path(__file__).parents[2]
TARGETS = {target.name: target for target in all_targets()}


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_accepted(name: str) -> None:
    """Otherwise mutations of them would stop at the first check."""
    accepted = 0
    for data in TARGETS[name].corpus:
        try:
            TARGETS[name].read(data)
        except TARGETS[name].refusals:
            continue
        accepted += 1
    assert accepted


@pytest.mark.parametrize("name", TARGETS)
def test_strange_inputs_are_refused_with_typed_errors(name: str) -> None:
    """F37, F38: whatever a peer or a file says, no other exception, no hang, no memory beyond the input's worth."""
    _, found = fuzz(TARGETS[name], SEED, rounds=ROUNDS // TARGETS[name].cost)
    assert found is None, str(found)


def _reader(data: bytes) -> None:
    if b"\xff\xff" in data:
        raise IndexError("planted")
    if len(data) > 4:
        raise ValueError("too long")


def _found(read: object) -> Found:
    target = Target("planted", [b"ab"], read, (ValueError,))  # type: ignore[arg-type]
    _, found = fuzz(target, SEED, rounds=20_000)
    assert found is not None
    return found


def test_a_planted_fault_is_found_and_can_be_repeated() -> None:
    first, second = _found(_reader), _found(_reader)
    assert isinstance(first.error, IndexError)
    assert (first.number, first.data) == (second.number, second.data)
    assert first.data == b"\xff\xff"
    assert repr(first.data) in str(first)
    assert f"--seed {SEED}" in str(first)


def test_a_hang_and_a_greedy_input_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz_engine.MAX_CPU_S", 0.05)

    def hangs(data: bytes) -> None:
        while data != b"ab":
            pass

    def is_greedy(data: bytes) -> None:
        if data != b"ab":
            bytearray(b"x") * (200 << 20)

    assert isinstance(_found(hangs).error, TooSlowError)
    monkeypatch.setattr("fuzz_engine.MAX_CPU_S", 5.0)
    assert isinstance(_found(is_greedy).error, MemoryError)


def test_inputs_are_bounded() -> None:
    stream = inputs(Target("long", [b"x" * MAX_INPUT_BYTES], len, ()), SEED)
    assert all(len(next(stream)) <= MAX_INPUT_BYTES for _ in range(100))


@pytest.mark.parametrize("command", [["-m", "tests.fuzz"], ["tests/fuzz"]])
def test_the_command_says_what_it_did(command: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, *command, "packed-piece", "--seconds", "0.05", "--seed", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "seed 7, nothing found" in ran.stdout
