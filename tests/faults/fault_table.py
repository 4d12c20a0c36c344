"""One line per fault that was made: what, where, noticed after how long, what came of it, and how much was lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

HEAD = ("fault", "point", "noticed after", "outcome", "lost steps")


@dataclass(frozen=True, slots=True)
class Line:
    """One case.

    Attributes:
        noticed_s: seconds from the fault until those who are concerned knew; None: nobody had to know.
        lost_steps: saves that were committed, as their trainer was told, and could not be recovered.
    """

    fault: str
    point: str
    noticed_s: float | None
    outcome: str
    lost_steps: int | None
    ok: bool
    seconds: float

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.fault,
            self.point,
            "-" if self.noticed_s is None else f"{self.noticed_s:.2f} s",
            self.outcome if self.ok else f"NOT AS PROMISED: {self.outcome.splitlines()[0]}",
            "-" if self.lost_steps is None else str(self.lost_steps),
        )


def table(lines: Sequence[Line]) -> str:
    """Text for people."""
    rows = [HEAD, *(line.cells for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 2)]
    text = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        text.append("  ".join([*cells, row[4].rjust(len(HEAD[4])), row[3]]))
    head = text[0].rsplit("  ", 1)
    return "\n".join(["  ".join(head), *text[1:]])


def to_json(lines: Sequence[Line]) -> str:
    return json.dumps([dataclasses.asdict(line) for line in lines], indent=2)
