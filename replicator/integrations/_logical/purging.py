"""A thread that lets superseded steps go, so that a trainer never waits for it."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from torch_checkpointing.storage.base_storage import Storage

logger = logging.getLogger("replicator.integrations")


class Purger:
    """One thread, which looks when it is told to. `close` waits until it has.

    Args:
        storage: any that lists and removes directories.
        find: the directories that may go, oldest first.
    """

    def __init__(self, storage: Storage, find: Callable[[Storage], list[Path]]) -> None:
        self._storage = storage
        self._find = find
        # One look that is still to come covers everything that was saved before it.
        self._looks: queue.Queue[bool] = queue.Queue(2)
        self._thread = threading.Thread(target=self._run, name="replicator-purge", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Something was saved. Does not wait."""
        if self._looks.empty():
            self._looks.put_nowait(True)

    def close(self, deadline_s: float) -> None:
        """Look once more, and end. Idempotent. Waits for at most `deadline_s`."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):  # it was told before, and hangs
                self._looks.put(False, timeout=deadline_s)
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                logger.warning("superseded checkpoints are still being removed after %.0f s", deadline_s)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._looks.get()
            try:
                for path in self._find(self._storage):
                    self._remove(path)
            except Exception as error:
                logger.warning("superseded checkpoints cannot be listed: %s", error)

    def _remove(self, path: Path) -> None:
        try:
            self._storage.rmdir(path)
            logger.info("removed %s", path)
        except Exception as error:
            # One that cannot be removed must not keep the others.
            logger.warning("%s cannot be removed: %s", path, error)
