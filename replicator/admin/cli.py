"""The command line of `replicator-admin`: parse, run one command, turn every error into one line and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from replicator.admin.commands import (
    demo,
    drain,
    inspect_object,
    ls,
    nodes,
    pull,
    recover,
    status,
    undrain,
    verify,
    version,
)
from replicator.admin.options import Parser, add_global_options
from replicator.admin.printers import OutputError, Printer
from replicator.errors import ReplicatorError
from replicator.partial_dir import Terminated

COMMANDS = {
    module.NAME: module
    for module in (status, nodes, ls, inspect_object, recover, verify, pull, drain, undrain, demo, version)
}
INTERRUPTED = 130
_EPILOG = """\
exit status: 0 done, 1 internal error, 2 wrong usage, configuration or id, 3 not found, 4 agent or node not reachable,
5 store or disk, 6 corrupt bytes, 7 transfer or commit failed, 8 superseded job, 9 deadline passed, 130 interrupted
"""


def build_parser(argv: Sequence[str]) -> Parser:
    """The parser for this command line. The demo's own options are loaded only where `argv` names it."""
    parser = Parser(
        prog="replicator-admin",
        description="Look at and copy checkpoints in the memory of the nodes, through any agent.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_global_options(parser, for_command=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        # The demo brings options of its own, which win over the ones of all commands.
        child = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, allow_abbrev=False, conflict_handler="resolve"
        )
        add_global_options(child, for_command=True, asks_agent=module not in (demo, version))
        if module is not demo or name in argv:
            module.add_arguments(child)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status (see docs/admin.md); an interrupt ends the process."""
    given = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its number instead of a failed command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(given)
    except OutputError as error:
        if sys.stdout is not None:
            # What Python would still flush at exit goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.reason:
            print(f"replicator-admin: error: {error}", file=sys.stderr, flush=True)
        return ReplicatorError.exit_code


def _run(given: list[str]) -> int:
    # Known before the line is parsed, so that an early error is reported in the right form, too.
    named = next((text for text in given if text in COMMANDS), None)
    printer = Printer(named, as_json="--json" in given)
    try:
        args = build_parser(given).parse_args(given)
        printer = Printer(args.command, args.json)
        status: int = COMMANDS[args.command].run(args, printer)
        return status
    except ReplicatorError as error:
        return printer.error(error.kind, str(error), error.exit_code)
    except KeyboardInterrupt:
        _end_now(printer.error("Interrupted", "interrupted; nothing half-written was left behind", INTERRUPTED))
    except Terminated as error:
        _end_now(printer.error("Terminated", f"{error}; nothing half-written was left behind", error.exit_code))
    except OutputError:
        raise
    except Exception as error:
        if "--debug" in given:
            traceback.print_exc()
        message = (
            f"internal error: {type(error).__name__}: {error}; run it again with --debug, and report what it shows"
        )
        return printer.error("InternalError", message, ReplicatorError.exit_code)


def _end_now(status: int) -> NoReturn:
    """End the process at once, after everything of ours was cleaned up.

    A call that a signal interrupted half-way may never end for gRPC, which then waits for it without a deadline as
    soon as its channel is closed or collected: about once in twenty times, with grpcio 1.85.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)
