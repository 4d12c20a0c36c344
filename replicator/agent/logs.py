"""Structured logs: one line per record on stderr, as text for people or as JSON for collectors.

A record carries fields beside its message: `log.info("object sealed", extra=fields(version))`. Whatever is given
in `extra` is written, the node always. Line breaks inside a value are escaped, so that a record stays one
line whatever a peer put into it.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, TextIO

from replicator.ids import CheckpointContainerId, ContainerVersion, ObjectVersion

ROOT_LOGGER = "replicator"
MAX_VALUE_CHARS = 4_000
_PLAIN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_QUIET = frozenset(' "=\\')


def configure(level: str, style: str, node_id: str, stream: TextIO | None = None) -> None:
    """Send the records of this package at `level` ("debug".."error") and above to `stream` (default stderr).

    `style` is "text" or "json". Calling it again replaces what was configured before. Records of other packages
    come through from "warning" on.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(node_id) if style == "json" else TextFormatter(node_id))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT_LOGGER).setLevel(level.upper())
    # A log that cannot be written (closed pipe) must not become an error of what was logged.
    logging.raiseExceptions = False


def fields(subject: CheckpointContainerId | ContainerVersion | ObjectVersion, **more: Any) -> dict[str, Any]:
    """The `extra` of a record about `subject`: job, step, epoch, attempt and object as far as it has them."""
    result: dict[str, Any] = {}
    if isinstance(subject, ObjectVersion):
        result["object"] = subject.name
        subject = subject.version
    if isinstance(subject, ContainerVersion):
        result["generation"] = str(subject).rpartition("@")[2]
        subject = subject.container
    return {"job": subject.job, "step": subject.step, **result, **more}


class TextFormatter(logging.Formatter):
    """`<time> <LEVEL> <logger> <message> key=value ...`"""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        pairs = " ".join(f"{key}={_quoted(value)}" for key, value in _fields(record, self._node_id).items())
        text = f"{_time(record)} {record.levelname:<7} {_short(record.name)} {_one_line(record.getMessage())} {pairs}"
        trace = _trace(self, record)
        return f"{text} trace={_quoted(trace)}" if trace else text


class JsonFormatter(logging.Formatter):
    """One JSON object with time, level, logger, message, node, and the record's own fields."""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_VALUE_CHARS],
            **_fields(record, self._node_id),
        }
        trace = _trace(self, record)
        if trace:
            line["trace"] = trace
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord, node_id: str) -> dict[str, Any]:
    own = {key: value for key, value in vars(record).items() if key not in _PLAIN}
    return {"node": node_id, **own}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _short(name: str) -> str:
    return name.removeprefix(f"{ROOT_LOGGER}.")


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


def _one_line(text: str) -> str:
    text = text[:MAX_VALUE_CHARS]
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _quoted(value: Any) -> str:
    text = _one_line(str(value))
    if text and not _QUIET.intersection(text):
        return text
    return json.dumps(text, ensure_ascii=False)
