"""The command line of the fault tests. Exit status 0 only when everything was as promised."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path
from typing import TypeVar

from fault_kills import Matrix, all_cases
from fault_net import why_not
from fault_network import CASES, Faults
from fault_table import Line, table, to_json

CaseT = TypeVar("CaseT")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", action="append", help="cases with such a name, like 'save/*/node'")
    parser.add_argument(
        "--part", metavar="K/N", type=_part, help="of these only the K-th of N parts, to run it in pieces"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and end")
    parser.add_argument("--json", metavar="FILE", help="write the lines there too")
    options = parser.parse_args(argv)
    patterns = options.only or ["*"]

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    number, parts = options.part or (1, 1)
    kills = _slice([case for case in all_cases() if wanted(case.name)], number, parts)
    network = _slice([case for case in CASES if wanted(case.name)], number, parts)
    if options.list:
        print("\n".join(case.name for case in (*kills, *network)))
        return 0
    lines: list[Line] = []

    def add(line: Line) -> None:
        lines.append(line)
        print(table([line]).splitlines()[1] + f"  ({line.seconds:.1f} s)", flush=True)
        if not line.ok:
            print(line.outcome, file=sys.stderr, flush=True)

    with Matrix() as matrix:
        for case in kills:
            add(matrix.run(case))
    if network and why_not():
        print(f"{len(network)} network faults are left out: {why_not()}", file=sys.stderr)
        network = []
    with Faults() as faults:
        for one in network:
            add(faults.run(one))
    print(f"\n{table(lines)}\n")
    wrong = [line for line in lines if not line.ok]
    print(f"{len(lines)} faults, {len(wrong)} not as promised, {sum(line.seconds for line in lines):.0f} s")
    if options.json:
        Path(options.json).write_text(to_json(lines))
    return 1 if wrong or not lines else 0


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected K/N with K from 1 to N, like 1/3, found {text!r}")
    return int(number), int(parts)


def _slice(cases: list[CaseT], number: int, parts: int) -> list[CaseT]:
    """The `number`-th of so many parts of about the same length, in order."""
    return cases[len(cases) * (number - 1) // parts : len(cases) * number // parts]
