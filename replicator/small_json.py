"""Reading JSON that another process, or an earlier one, wrote into a small file."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What `text` says. Its numbers are finite, so `int()` takes every one of them.

    Raises:
        ValueError: it is not JSON, which here also means: not UTF-8, nested beyond what Python can follow, or with
            a number that is none or infinite.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(word: str) -> float:
    raise ValueError(f"expected a number, found {word}")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text[:80])
