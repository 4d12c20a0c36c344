"""`replicator-admin demo`: lose a node and recover, on this machine. Lives in replicator.demo; needs PyTorch."""

from __future__ import annotations

import argparse

from replicator.admin.printers import Printer
from replicator.errors import UnsupportedError

NAME = "demo"
HELP = "train on this machine, lose a node, recover from its buddy (needs PyTorch)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of replicator.demo.cli. Where it cannot be loaded, anything goes: `run` says what is missing."""
    try:
        from replicator.demo import cli
    except ModuleNotFoundError:
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    else:
        cli.add_arguments(parser)


def run(args: argparse.Namespace, printer: Printer) -> int:
    """The demo prints for itself: what happens as it happens, and with --json one object on the last line."""
    try:
        from replicator.demo import cli

        return cli.run(args)
    except ModuleNotFoundError as error:
        raise _missing(error) from None


def _missing(error: ModuleNotFoundError) -> UnsupportedError:
    return UnsupportedError(
        f"the demo needs the Python module {error.name}, which is not installed; pip install 'replicator[torch]'"
    )
