"""How results look: one JSON object, or tables for people. Commands do not print.

Text from agents is shown without control characters, and never read as markup.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from replicator.admin.views import SCHEMA_VERSION, View

if TYPE_CHECKING:
    from rich.console import Console

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class OutputError(Exception):
    """stdout takes nothing. `reason` is empty when its reader has simply gone."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the result cannot be written to stdout: {reason}" if reason else "stdout has no reader")
        self.reason = reason


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
        """Print `view` in one go.

        Raises:
            OutputError: stdout is closed, has no reader, or is a file on a full disk.
        """
        if sys.stdout is None:  # Python found it closed when it started.
            raise OutputError("it is closed")
        try:
            if self._as_json:
                print(json.dumps({"schema_version": SCHEMA_VERSION, "command": self._command, **view}), flush=True)
            else:
                draw(Page(), view)
                sys.stdout.flush()
        except BrokenPipeError:
            raise OutputError("") from None
        except OSError as error:
            raise OutputError(error.strerror or str(error)) from None

    def error(self, kind: str, message: str, exit_code: int) -> int:
        """One line on stderr; with --json also an object on stdout, so that there always is one. Returns exit_code."""
        if self._as_json:
            self.show({"error": {"kind": kind, "message": message, "exit_code": exit_code}}, lambda page, view: None)
        print(f"replicator-admin: error: {clean(message)}", file=sys.stderr, flush=True)
        return exit_code


class Page:
    """Text for people on stdout: with frames on a terminal, plain rows and no line breaks in a pipe."""

    def __init__(self) -> None:
        self._console = _console() if sys.stdout.isatty() else None

    def line(self, text: str, style: str = "") -> None:
        self._put(clean(text), style)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table; a column whose name ends in '>' is aligned to the right."""
        heads = [column.rstrip(">") for column in columns]
        right = [column.endswith(">") for column in columns]
        cells = [[clean(cell) for cell in row] for row in rows]
        if self._console is None:
            _plain_table([heads, *cells], right)
            return
        from rich import box
        from rich.table import Table

        table = Table(box=box.ROUNDED)
        for head, is_right in zip(heads, right, strict=True):
            table.add_column(head, justify="right" if is_right else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        self._console.print(table)

    def facts(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            self._put(f"{name:<{width}}  {clean(value)}", "")

    def _put(self, text: str, style: str) -> None:
        if self._console is None:
            print(text)
        else:
            self._console.print(text, style=style or None, soft_wrap=True)


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def _plain_table(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        print(
            "  ".join(
                f"{cell:>{width}}" if is_right else f"{cell:<{width}}" for cell, width, is_right in cells
            ).rstrip()
        )


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


def health_line(view: View) -> str:
    """ "dead for 5 min 3 s: no answer"."""
    seconds = max(0.0, time.time() - view["since_unix_seconds"])
    return f"{view['state']} for {duration(seconds)}: {view['reason']}"


def version_of(view: View) -> str:
    """A container with its epoch and attempt, as in `job/step-10_ckpt@1.0`."""
    return f"{view['container']}@{view['epoch']}.{view['attempt']}"


def unanswered_lines(page: Page, view: View) -> None:
    """A line about each node that did not answer; nothing when all did."""
    for who in view["unanswered"]:
        address = f" ({who['grpc_address']})" if who["grpc_address"] else ""
        page.line(f"No answer from {who['node_id'] or 'a node'}{address}: {who['reason']}", style="yellow")
