"""How much the processes of this machine wait for a CPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_S = 0.1


class CpuPressure:
    """Percent of the time in which something that could run had to wait (PSI); without PSI 100 when the load average
    is above the number of CPUs, else 0. Thread-safe.

    Args:
        pressure, loadavg: files of the kernel.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pressure: Path = Path("/proc/pressure/cpu"),
        loadavg: Path = Path("/proc/loadavg"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pressure = pressure
        self._loadavg = loadavg
        self._clock = clock
        self._lock = threading.Lock()
        self._at = clock()
        self._waited_us = self._read()
        self._percent = 0.0

    def percent(self) -> float:
        """Since the last look, a tenth of a second ago or more."""
        with self._lock:
            now = self._clock()
            if now - self._at < _LOOK_S:
                return self._percent
            waited = self._read()
            if waited is None or self._waited_us is None:
                self._percent = self._from_loadavg()
            else:
                self._percent = (waited - self._waited_us) / (now - self._at) / 1e4
            self._at, self._waited_us = now, waited
            return self._percent

    def _read(self) -> int | None:
        """Microseconds in which somebody waited; None when the kernel does not say."""
        try:
            words = self._pressure.read_text().split("\n", 1)[0].split()
            return int(words[-1].removeprefix("total="))
        except (OSError, ValueError, IndexError):
            return None

    def _from_loadavg(self) -> float:
        try:
            load = float(self._loadavg.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0.0
        return 100.0 if load > (os.cpu_count() or 1) else 0.0
