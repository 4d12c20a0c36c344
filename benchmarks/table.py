"""Results as a table: for the terminal, and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.results import Result

_STYLES: Mapping[str, str] = {
    "met": "green",
    "missed": "bold red",
    "invalid": "yellow",
    "failed": "bold red",
    "not available": "dim",
    "info": "",
}
SHOWN_NAMES = 6
PIPE_WIDTH = 170
"""Characters of a line when nobody says how wide the terminal is."""
_COLUMNS = ("what", "value", "against", "limit", "ratio", "bar", "verdict", "CPU s/GB")


def number(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.2e}"


def _cells(result: Result) -> tuple[str, ...]:
    value = "-" if result.value is None else f"{number(result.value)} {result.unit}"
    return (
        result.what,
        value,
        result.limit_name,
        number(result.limit),
        number(result.ratio),
        str(result.bar) if result.bar else "",
        result.verdict,
        number(result.cpu_s_per_gb),
    )


def print_table(results: Sequence[Result], console: Console | None = None) -> None:
    """One row per result; reasons below."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    table = Table(show_lines=False, header_style="bold")
    for index, column in enumerate(_COLUMNS):
        numeric = index in (1, 3, 4, 7)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for result in results:
        table.add_row(*_cells(result), style=_STYLES[result.verdict])
    console.print(table)
    for line in notes(results):
        console.print(line, soft_wrap=True, style="dim", highlight=False, markup=False)


def notes(results: Sequence[Result]) -> list[str]:
    """Why rows have no value, or are not valid; each reason once."""
    rows: dict[str, list[str]] = {}
    for result in results:
        if result.reason:
            rows.setdefault(result.reason, []).append(result.name)
    return [
        f"{', '.join(names) if len(names) <= SHOWN_NAMES else f'{len(names)} rows'}: {reason}"
        for reason, names in rows.items()
    ]


def markdown(results: Sequence[Result], machine: Mapping[str, object], settings: Mapping[str, object]) -> str:
    """The same as GitHub-flavoured Markdown, with the machine and the settings it was measured with."""
    lines = [
        "Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + ".",
        "Settings: " + ", ".join(f"{key} {value}" for key, value in settings.items()) + ".",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "|".join("--:" if i in (1, 3, 4, 7) else "---" for i in range(len(_COLUMNS))) + "|",
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(result)) + " |" for result in results]
    reasons = notes(results)
    if reasons:
        lines += ["", *(f"- {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"
