"""The command line of the fault tests. Exit status 0 only when everything was as promised."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

from fault_kills import Matrix, all_cases
from fault_net import why_not
from fault_network import CASES, Faults
from fault_table import Line, table, to_json


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", action="append", help="cases with such a name, like 'save/*/node'")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and end")
    parser.add_argument("--json", metavar="FILE", help="write the lines there too")
    options = parser.parse_args(argv)
    patterns = options.only or ["*"]

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    kills = [case for case in all_cases() if wanted(case.name)]
    network = [case for case in CASES if wanted(case.name)]
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
