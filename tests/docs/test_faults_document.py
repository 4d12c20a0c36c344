"""docs/faults.md names tests that exist, and has every row it must have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2]
TEXT = (SOURCE / "docs" / "faults.md").read_text()


def names_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 80
    for file, name in named:
        assert name in names_in(SOURCE / file), f"{file}::{name}"


def test_every_fault_has_a_test() -> None:
    heads = ("|---", "| fault", "| id", "| promise")
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and not line.startswith(heads)]
    assert all("::test_" in row for row in rows)
    ids = {row.split("|")[1].strip() for row in rows}
    wanted = [*range(1, 36), *range(45, 50)]
    assert {f"F{number:02}" for number in wanted} <= ids
