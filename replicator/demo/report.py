"""What the demo prints: one line as each thing happens, then a table, or one JSON object on the last line."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replicator.admin.views import SCHEMA_VERSION
from replicator.local_cluster.processes import tail

_PIPE_WIDTH = 120
_STYLES = {"good": "green", "bad": "bold red", "loud": "bold yellow", "plain": ""}


@dataclass(slots=True)
class Result:
    """The outcome; also the object that `--json` prints, with these names. Times in seconds, sizes in bytes."""

    ok: bool = False
    nodes: int = 0
    replicas: int = 0
    seed: int = 0
    steps: int = 0
    save_every: int = 0
    lost_node: str = ""
    lost_rank: int = -1
    lost_at_step: int = -1
    replacement_node: str = ""
    survivors: list[str] = field(default_factory=list)
    last_committed_step: int | None = None
    last_protected_step: int | None = None
    newest_recoverable_step: int | None = None
    recovered_step: int | None = None
    plan_reason: str = ""
    source: str = "none"
    source_nodes: list[str] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)
    objects_in_checkpoint: int = 0
    checkpoint_bytes: int = 0
    objects_pulled: int = 0
    objects_pulled_by_replacement: int = 0
    bytes_pulled: int = 0
    recovery_seconds: float | None = None
    downtime_seconds: float | None = None
    epochs: list[int] = field(default_factory=list)
    losses_compared: int = 0
    losses_equal: bool = False
    state_bytes_compared: int = 0
    parameters_equal: bool = False
    bitwise_equal: bool = False
    final_loss: float | None = None
    total_seconds: float = 0.0
    kept: str = ""
    problems: list[str] = field(default_factory=list)


class Report:
    """Prints to `output`. Colours only where that is a terminal."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._console = Console(file=output, highlight=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console.width = _PIPE_WIDTH
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, who: str, text: str, style: str = "plain") -> None:
        """One line: when, who, what."""
        line = Text(f"{self.elapsed_s:6.1f} s  ")
        line.append(f"{who:<10}", style="cyan")
        line.append(text, style=_STYLES[style])
        self._console.print(line)

    def summary(self, result: Result) -> None:
        """The table, and what is not true."""
        table = Table(title="Replicator demo", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        for name, value in _rows(result):
            table.add_row(name, Text(value, style=_STYLES["good"] if value.startswith("yes") else ""))
        self._console.print(table, soft_wrap=False)
        for problem in result.problems:
            self._console.print(Text(f"not as it should be: {problem}", style=_STYLES["bad"]))

    def logs(self, logs: Sequence[Path]) -> None:
        """The last lines of each log that has any."""
        for log in logs:
            text = tail(log)
            if text:
                self._console.print(Text(f"{log.name}:\n{text}", style="dim"))

    def json(self, result: Result) -> None:
        """The whole result as one line."""
        head = {"schema_version": SCHEMA_VERSION, "command": "demo"}
        print(json.dumps(head | asdict(result)), file=self._console.file, flush=True)


def _rows(result: Result) -> list[tuple[str, str]]:
    def yes(value: bool) -> str:
        return "yes" if value else "NO"

    seconds = "-" if result.recovery_seconds is None else f"{result.recovery_seconds:.2f} s"
    downtime = "-" if result.downtime_seconds is None else f"{result.downtime_seconds:.1f} s"
    return [
        ("nodes, replicas, seed", f"{result.nodes}, {result.replicas}, {result.seed}"),
        ("lost", f"{result.lost_node} with rank {result.lost_rank} and its memory, after step {result.lost_at_step}"),
        ("replaced by", f"{result.replacement_node}, empty"),
        ("last committed step", str(result.last_committed_step)),
        ("recovered step", f"{result.recovered_step} of {result.steps}"),
        ("source", f"{result.source} ({', '.join(result.source_nodes) or 'none'}; {', '.join(result.lanes) or '-'})"),
        (
            "pulled from them",
            f"{result.bytes_pulled / 1e6:.1f} MB in {result.objects_pulled} objects, "
            f"{result.objects_pulled_by_replacement} of them by {result.replacement_node}; "
            f"the checkpoint has {result.objects_in_checkpoint}",
        ),
        ("lookup, pull and load", seconds),
        ("from loss to next step", f"{downtime}, of which most is starting Python and PyTorch again"),
        ("losses equal, bit for bit", f"{yes(result.losses_equal)} ({result.losses_compared} of all ranks and steps)"),
        (
            "final state equal, bit for bit",
            f"{yes(result.parameters_equal)} ({result.state_bytes_compared / 1e6:.1f} MB of parameters and optimizer)",
        ),
        ("all true", yes(result.ok)),
    ]
