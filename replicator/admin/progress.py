"""What is shown on stderr while something takes longer than a second. Nothing where stderr is not a terminal."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.status import Status

_AFTER_S = 1.0


class ByteProgress:
    """Counts bytes; draws once `_AFTER_S` have passed."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title = title
        self._total = total_bytes
        self._done = 0
        self._started = time.monotonic()
        self._enabled = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def add(self, number: int, *, total: int | None = None) -> None:
        """`number` bytes more are done; negative when a piece has to be read again. `total` may have changed."""
        self._done += number
        self._total = self._total if total is None else total
        if self._bar is None and self._enabled and self.seconds >= _AFTER_S:
            self._bar = self._draw()
            self._task = self._bar.add_task(self._title, total=self._total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, total=self._total)

    def _draw(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), Speed())
        bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        bar.start()
        return bar

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class Waiting:
    """Says what is being waited for, once `_AFTER_S` have passed in the block."""

    def __init__(self, awaited: str, whom: str, deadline_s: float) -> None:
        self._text = f"waiting for {awaited} from {whom} (up to {deadline_s:g} s)"
        self._lock = threading.Lock()
        self._over = False
        self._status: Status | None = None
        self._timer: threading.Timer | None = None

    def _show(self) -> None:
        from rich.console import Console
        from rich.markup import escape

        with self._lock:
            if not self._over:
                self._status = Console(stderr=True).status(escape(self._text))
                self._status.start()

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            self._timer = threading.Timer(_AFTER_S, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            with self._lock:
                self._over = True
                if self._status is not None:
                    self._status.stop()
