"""Named counts of what happened since the agent started, shown by `replicator-admin status`."""

from __future__ import annotations

import threading


class Counters:
    """A bounded set of named, ever-growing integers. Thread-safe.

    Names are fixed words of the code (`objects_sealed`), never built from ids.
    """

    MAX_NAMES = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Add `amount` (0 or more) to the count `name`, which starts at 0."""
        if amount < 0:
            raise ValueError(f"count {name!r} can only grow, found an amount of {amount}")
        with self._lock:
            if name not in self._values and len(self._values) >= self.MAX_NAMES:
                raise ValueError(f"expected at most {self.MAX_NAMES} names of counts, found one more: {name!r}")
            self._values[name] = self._values.get(name, 0) + amount

    def get(self, name: str) -> int:
        """The count, 0 when nothing was counted."""
        with self._lock:
            return self._values.get(name, 0)

    def snapshot(self) -> dict[str, int]:
        """All counts at one moment, sorted by name."""
        with self._lock:
            return dict(sorted(self._values.items()))
