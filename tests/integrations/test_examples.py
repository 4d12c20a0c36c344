"""The harness of the examples: one example as a user runs it, and what it compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples._play import Play, names
from examples.report import digest

SOURCE = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_an_example_recovers_bit_for_bit_from_the_peer() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "examples", "--json", "--only", "storage_writer"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=SOURCE,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["ok"] is True
    (played,) = told["examples"]
    assert played["problems"] == []
    assert played["framework"] == "storage_writer"
    assert played["saved_step"] == played["recovered_step"] == 4
    assert played["source"] == "peers"
    assert played["bitwise_equal"] is True
    assert played["tensor_bytes"] > 1 << 20


def test_every_example_can_be_named_and_says_what_it_is() -> None:
    assert "storage_writer" in names()
    assert "report" not in names()
    for name in names():
        source = (SOURCE / "examples" / f"{name}.py").read_text()
        assert source.startswith('"""'), name
        assert "report.saved(" in source, name
        assert "report.recovered(" in source, name


def test_a_digest_tells_bits_keys_shapes_and_types_apart() -> None:
    state = {"w": torch.arange(6.0), "step": 3, "nest": [torch.ones(2, dtype=torch.bfloat16), None]}
    same = {"nest": [torch.ones(2, dtype=torch.bfloat16), None], "step": 3, "w": torch.arange(12.0)[::2] / 2}
    assert digest(state) == digest(same), "neither order nor strides count"
    assert digest(state)[1] == 6 * 4 + 2 * 2
    other_bit = torch.arange(6.0)
    other_bit.view(torch.int32)[5] ^= 1
    for change in (
        {"w": other_bit},
        {"w": torch.arange(6.0).reshape(2, 3)},
        {"w": torch.arange(6.0).view(torch.int32)},
        {"step": 3.0},
        {"more": None},
    ):
        assert digest(state | change)[0] != digest(state)[0], change
    assert digest({"x": -torch.zeros(1)})[0] != digest({"x": torch.zeros(1)})[0]
    with pytest.raises(TypeError, match="/a/0"):
        digest({"a": [object()]})


def lines(kind: str, step: int, digests: list[str]) -> list[dict[str, object]]:
    return [
        {"kind": kind, "rank": rank, "step": step, "sha256": sha256, "tensor_bytes": 8}
        for rank, sha256 in enumerate(digests)
    ]


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (lines("saved", 4, ["a", "b"]), lines("recovered", 4, ["a", "c"]) + lines("saved", 6, ["d", "e"]), "rank 1"),
        (lines("saved", 4, ["a", "b"]), lines("recovered", 2, ["a", "b"]) + lines("saved", 6, ["d", "e"]), "step 4"),
        (lines("saved", 4, ["a", "b"]), lines("recovered", 4, ["a"]) + lines("saved", 6, ["d", "e"]), "ranks"),
        (lines("saved", 4, ["a"]), lines("recovered", 4, ["a", "b"]) + lines("saved", 6, ["d", "e"]), "ranks"),
        (lines("saved", 4, ["a", "b"]), lines("recovered", 4, ["a", "b"]), "go on"),
        ([], [], "ranks"),
    ],
)
def test_what_differs_is_not_passed_over(
    tmp_path: Path, before: list[dict[str, object]], after: list[dict[str, object]], problem: str
) -> None:
    play = Play("storage_writer", tmp_path, 1.0)
    play.played.saved_step = 4
    play._judge_bytes(before, after)
    assert any(problem in one for one in play.played.problems)
