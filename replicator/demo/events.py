"""What the ranks of the demo's job report to its driver: JSON datagrams on one unix socket.

A datagram that was sent is in the socket's queue even when its sender is killed at the next instruction, so what a
lost rank had reported is never lost with it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAX_BYTES = 128 << 10
_SEND_S = 20.0


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in a rank. `at` is the driver's monotonic clock in seconds."""

    kind: str
    node: str
    rank: int
    pid: int
    at: float
    fields: dict[str, Any] = field(default_factory=dict)


class Reporter:
    """The rank's side. An error to send (the driver is gone) ends the rank: nobody would look after it."""

    def __init__(self, path: str, node: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_SEND_S)
        self._socket.connect(path)
        self._head = {"node": node, "rank": rank, "pid": os.getpid()}

    def send(self, kind: str, **fields: Any) -> None:
        """Report one event; the fields must be JSON values."""
        self._socket.send(json.dumps({"kind": kind, **self._head, "fields": fields}).encode())


class Inbox:
    """The driver's side; `fileno` makes it selectable."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind(str(path))

    def fileno(self) -> int:
        return self._socket.fileno()

    def drain(self) -> list[Event]:
        """All events that arrived, in the order in which they were sent."""
        events: list[Event] = []
        while True:
            try:
                message = json.loads(self._socket.recv(_MAX_BYTES))
            except BlockingIOError:
                return events
            events.append(Event(at=time.monotonic(), **message))

    def close(self) -> None:
        self._socket.close()
