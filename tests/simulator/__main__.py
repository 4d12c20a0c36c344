"""`python -m tests.simulator`: many seeds at once, or one with its trace."""

from __future__ import annotations

import argparse
import os
import sys

from .breaks import BREAKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one, and print what happens in it")
    parser.add_argument("--quiet", action="store_true", help="with --seed: only how it ends")
    parser.add_argument(
        "--break", dest="breaks", choices=sorted(BREAKS), default="", help="break an invariant on purpose"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="seeds run at a time")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that fails")
    chosen = parser.parse_args()
    # Sets of strings have the same order in every run only so.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulator", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    from . import command

    if chosen.seed is not None:
        return command.one(chosen.seed, chosen.breaks, quiet=chosen.quiet)
    return command.many(chosen.first, chosen.seeds, chosen.breaks, chosen.processes, keep_going=chosen.keep_going)


if __name__ == "__main__":
    sys.exit(main())
