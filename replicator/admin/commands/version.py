"""`replicator-admin version`: what is installed here. Asks no agent."""

from __future__ import annotations

import argparse
import platform

from replicator.admin.printers import Page, Printer
from replicator.admin.views import View

NAME = "version"
HELP = "print the version of this installation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator import native
    from replicator.version import version

    view = {
        "version": version(),
        "native_core": native.IMPLEMENTATION == "native",
        "native_core_missing_because": native.FALLBACK_REASON,
        "protocol": "replicator.v1",
        "python": platform.python_version(),
    }
    printer.show(view, _draw)
    return 0


def _draw(page: Page, view: View) -> None:
    core = "native core" if view["native_core"] else f"Python fallback: {view['native_core_missing_because']}"
    page.line(f"replicator {view['version']} (protocol {view['protocol']}, {core}, Python {view['python']})")
