"""`python -m benchmarks`: measure, print a table, and say whether the bars are met."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.harness import MIN_RUNS, Settings
from benchmarks.results import Result, write_json
from benchmarks.suite import MEASUREMENTS, QUICK, run_measurement
from benchmarks.table import markdown, print_table

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INVALID = 3
EXIT_MISSED = 4

_EPILOG = """exit status:
  0  everything was measured, and every result is valid
  1  something could not be measured
  2  wrong arguments
  3  results are not valid: the machine was busy, or there were fewer than 5 runs
  4  with --strict: a bar was missed"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures the limits of this machine, Replicator and its peers in one run, taking turns.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--quick", action="store_true", help="only what has a bar; takes about five minutes")
    result.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    result.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, as Markdown")
    result.add_argument(
        "--only", action="append", default=[], metavar="NAME", help=f"measure only this: {', '.join(MEASUREMENTS)}"
    )
    result.add_argument("--runs", type=int, default=MIN_RUNS, metavar="N", help=f"per contender (default {MIN_RUNS})")
    result.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs (default /dev/shm)")
    result.add_argument("--cache", type=Path, default=Settings.cache, help="where peers are installed")
    result.add_argument("--no-peers", action="store_true", help="neither install nor run other products")
    result.add_argument("--connections", type=int, default=2, metavar="N", help="TCP connections between two nodes")
    result.add_argument(
        "--congestion", metavar="NAME", help="TCP congestion control; default: cubic where the system's is another"
    )
    result.add_argument("--strict", action="store_true", help="a missed bar is a failure")
    # For tests of this program: sizes at which figures mean nothing, on machines that are busy with tests.
    result.add_argument("--size", type=_size, default=1 << 30, help=argparse.SUPPRESS)
    result.add_argument("--no-quiet-check", action="store_true", help=argparse.SUPPRESS)
    return result


def _size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def settings_from(options: argparse.Namespace) -> Settings:
    """What the measurements need of the command line."""
    congestion = options.congestion
    if congestion is None:
        congestion = "cubic" if machine.default_congestion() != "cubic" else ""
        if congestion not in ("", *machine.available_congestions()):
            congestion = ""
    return Settings(
        size=options.size,
        runs=options.runs,
        quick=options.quick,
        directory=options.dir,
        cache=options.cache.absolute(),
        peers=not options.no_peers,
        connections=options.connections,
        congestion=congestion,
        check_quiet=not options.no_quiet_check,
    )


def exit_status(results: Sequence[Result], strict: bool) -> int:
    """The status that says most about these results."""
    if any(result.failed for result in results):
        return EXIT_FAILED
    if any(result.verdict == "invalid" for result in results):
        return EXIT_INVALID
    if strict and any(result.verdict == "missed" for result in results):
        return EXIT_MISSED
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; the exit status."""
    arguments = parser()
    options = arguments.parse_args(argv)
    unknown = [name for name in options.only if name not in MEASUREMENTS]
    if unknown:
        arguments.error(f"--only knows {', '.join(MEASUREMENTS)}, found {unknown[0]!r}")
    if options.runs < 1 or options.connections < 1 or options.size < 1 << 16:
        arguments.error("--runs and --connections must be 1 or more, --size 64K or more")
    if not options.dir.is_dir() or machine.filesystem_of(options.dir) != "tmpfs":
        arguments.error(f"--dir must be a directory on a tmpfs, found {options.dir}")
    for file in (options.json, options.markdown):
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            arguments.error(f"--json and --markdown must be files that can be written, found {file}")
    settings = settings_from(options)
    names = options.only or [name for name in MEASUREMENTS if not options.quick or name in QUICK]
    started = time.monotonic()
    results: list[Result] = []
    for name in names:
        settings.log(f"{name} ...")
        began = time.monotonic()
        results += run_measurement(name, settings)
        settings.log(f"  {time.monotonic() - began:.0f} s")
        if options.json:
            # After each one, so that an interrupted run leaves what it has.
            write_json(results, options.json)
    print_table(results)
    if options.markdown:
        described = {"size": f"{settings.size >> 20} MiB", "runs": settings.runs, "connections": settings.connections}
        described["congestion"] = settings.congestion or "the system's"
        options.markdown.write_text(markdown(results, machine.describe(), described))
    status = exit_status(results, options.strict)
    settings.log(f"{len(results)} rows in {time.monotonic() - started:.0f} s, exit status {status}")
    return status


if __name__ == "__main__":
    # As an interrupt does: what was started is ended, what was written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
