"""What a measurement yields: one `Result` per row, with its bar and verdict; the JSON and its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["met", "missed", "invalid", "failed", "not available", "info"]

REQUIRED_KEYS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "what": (str,),
    "value": (int, float, type(None)),
    "unit": (str,),
    "limit_name": (str,),
    "limit": (int, float, type(None)),
    "ratio": (int, float, type(None)),
    "cpu_s_per_gb": (int, float, type(None)),
    "bar": (str,),
    "verdict": (str,),
    "valid": (bool,),
    "reason": (str,),
    "runs": (int,),
    "spread": (list,),
    "cpu_s_per_gb_by_process": (dict,),
    "page_faults": (dict,),
    "peak_memory_mb": (dict,),
}
"""Key of one element of the JSON list -> types it may have."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a value, or its ratio to the limit, must be."""

    on: Literal["ratio", "value"]
    at_least: bool
    threshold: float

    def is_met(self, value: float | None, ratio: float | None) -> bool:
        measured = ratio if self.on == "ratio" else value
        if measured is None:
            return False
        return measured >= self.threshold if self.at_least else measured <= self.threshold

    def __str__(self) -> str:
        return f"{self.on} {'>=' if self.at_least else '<='} {self.threshold:g}"


def ratio_at_least(threshold: float) -> Bar:
    return Bar("ratio", True, threshold)


def ratio_at_most(threshold: float) -> Bar:
    return Bar("ratio", False, threshold)


def value_at_least(threshold: float) -> Bar:
    return Bar("value", True, threshold)


def value_at_most(threshold: float) -> Bar:
    return Bar("value", False, threshold)


@dataclass(frozen=True, slots=True)
class Result:
    """One row. `value` and `limit` are medians in `unit`; `ratio` is their quotient.

    Attributes:
        name: stable identifier.
        what: the row in words.
        limit_name: what `limit` is; empty when there is none.
        cpu_s_per_gb: of all processes involved, CPU seconds per 1e9 bytes of payload.
        bar: what is promised; None for a row that is only information.
        valid: False when the machine was busy, see `reason`.
        reason: why there is no value, or why it is not valid.
        failed: the measurement itself went wrong; a peer that is not there is no failure.
        spread: (least, greatest) value of the runs.
    """

    name: str
    what: str
    unit: str
    value: float | None = None
    limit_name: str = ""
    limit: float | None = None
    cpu_s_per_gb: float | None = None
    bar: Bar | None = None
    valid: bool = True
    reason: str = ""
    failed: bool = False
    runs: int = 0
    spread: tuple[float, float] | None = None
    cpu_by_process: Mapping[str, float] = field(default_factory=dict)
    page_faults: Mapping[str, float] = field(default_factory=dict)
    peak_memory_mb: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        if self.value is None or not self.limit:
            return None
        return self.value / self.limit

    @property
    def verdict(self) -> Verdict:
        if self.failed:
            return "failed"
        if self.value is None:
            return "not available"
        if not self.valid:
            return "invalid"
        if self.bar is None:
            return "info"
        if self.bar.on == "ratio" and self.ratio is None:
            return "not available"
        return "met" if self.bar.is_met(self.value, self.ratio) else "missed"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "value": _rounded(self.value),
            "unit": self.unit,
            "limit_name": self.limit_name,
            "limit": _rounded(self.limit),
            "ratio": _rounded(self.ratio),
            "cpu_s_per_gb": _rounded(self.cpu_s_per_gb),
            "bar": str(self.bar) if self.bar else "",
            "verdict": self.verdict,
            "valid": self.valid,
            "reason": self.reason,
            "runs": self.runs,
            "spread": [_rounded(x) for x in self.spread] if self.spread else [],
            "cpu_s_per_gb_by_process": {k: _rounded(v) for k, v in self.cpu_by_process.items()},
            "page_faults": dict(self.page_faults),
            "peak_memory_mb": {k: _rounded(v) for k, v in self.peak_memory_mb.items()},
            **({"details": dict(self.details)} if self.details else {}),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def write_json(results: Sequence[Result], path: Path) -> None:
    path.write_text(json.dumps([result.to_json() for result in results], indent=1) + "\n")


def schema_errors(document: Any) -> list[str]:
    """What is wrong with a parsed JSON file; empty when nothing is."""
    if not isinstance(document, list):
        return [f"expected a list, found {type(document).__name__}"]
    errors = []
    for number, row in enumerate(document):
        if not isinstance(row, dict):
            errors.append(f"row {number}: expected an object, found {type(row).__name__}")
            continue
        for key, types in REQUIRED_KEYS.items():
            if key not in row:
                errors.append(f"row {number} ({row.get('name')}): {key} is missing")
            elif not isinstance(row[key], types):
                errors.append(f"row {number} ({row.get('name')}): {key} is a {type(row[key]).__name__}")
        if row.get("value") is None and not row.get("reason"):
            errors.append(f"row {number} ({row.get('name')}): neither a value nor a reason")
    return errors
