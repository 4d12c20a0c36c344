"""How results look: one JSON object, or tables for people. Commands do not print.

Text from agents is shown without control characters, and never read as markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from replicator.admin.views import SCHEMA_VERSION, View

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 10_000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Printer:
    """Prints the result of one command to stdout, as JSON or through a function that draws it for people.

    Args:
        command: its name; None where the command line could not be understood.
        as_json: whether --json was given.
    """

    def __init__(self, command: str | None, as_json: bool) -> None:
        self._command = command
        self._as_json = as_json

    def show(self, view: View, draw: Callable[[Page, View], None]) -> None:
        """Print `view` in one go."""
        if self._as_json:
            print(json.dumps({"schema_version": SCHEMA_VERSION, "command": self._command, **view}), flush=True)
        else:
            draw(Page(), view)
            sys.stdout.flush()

    def error(self, kind: str, message: str, exit_code: int) -> int:
        """One line on stderr; with --json also an object on stdout, so that there always is one. Returns exit_code."""
        if self._as_json:
            self.show({"error": {"kind": kind, "message": message, "exit_code": exit_code}}, lambda page, view: None)
        print(f"replicator-admin: error: {clean(message)}", file=sys.stderr, flush=True)
        return exit_code


class Page:
    """Text for people on stdout: with frames on a terminal, plain and unwrapped in a pipe."""

    def __init__(self) -> None:
        from rich.console import Console

        self._is_terminal = sys.stdout.isatty()
        self._console: Console = Console(
            markup=False, highlight=False, emoji=False, width=None if self._is_terminal else _PIPE_WIDTH
        )

    def line(self, text: str, style: str = "") -> None:
        self._console.print(clean(text), style=style or None, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
        """A table; a column whose name ends in '>' is aligned to the right."""
        from rich import box
        from rich.table import Table

        table = Table(
            title=clean(title) or None,
            title_justify="left",
            box=box.ROUNDED if self._is_terminal else None,
            pad_edge=self._is_terminal,
        )
        for column in columns:
            right = column.endswith(">")
            table.add_column(column.rstrip(">"), justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(clean(cell) for cell in row))
        self._console.print(table)

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        items = list(pairs)
        width = max((len(name) for name, _ in items), default=0)
        for name, value in items:
            self.line(f"{name:<{width}}  {value}")


def clean(text: str) -> str:
    """The text on one line, with everything that a terminal would obey replaced."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def size(number: int) -> str:
    """ "512 B", "4.0 MiB"."""
    value = float(number)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """ "0.4 s", "5 min 3 s", "2 d 4 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def names(items: Sequence[str], limit: int = 6) -> str:
    """ "a, b, c", or a dash; long lists end in their number."""
    shown = ", ".join(items[:limit]) or "-"
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def version_of(view: View) -> str:
    """A container with its epoch and attempt, as in `job/step-10_ckpt@1.0`."""
    return f"{view['container']}@{view['epoch']}.{view['attempt']}"


def unanswered_lines(page: Page, view: View) -> None:
    """A line about each node that did not answer; nothing when all did."""
    for who in view["unanswered"]:
        address = f" ({who['grpc_address']})" if who["grpc_address"] else ""
        page.line(f"No answer from {who['node_id'] or 'a node'}{address}: {who['reason']}", style="yellow")
