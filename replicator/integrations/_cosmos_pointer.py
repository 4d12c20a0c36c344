"""`latest_checkpoint.txt`, and how an iteration is called."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

from replicator.client.outstanding import CommitInfo

logger = logging.getLogger("replicator.integrations")

LATEST_NAME = "latest_checkpoint.txt"
_ITERATION = re.compile(r"iter_([0-9]{9,19})")


def iteration_name(iteration: int) -> str:
    """The directory of an iteration: `iter_` and nine digits."""
    return f"iter_{iteration:09d}"


def parse_iteration(name: str) -> int | None:
    """The number in the name of an iteration's directory; None for anything else."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


class LatestPointer:
    """Writes `latest_checkpoint.txt` when an iteration is committed, in a thread: its file system may hang (F16).

    It is for people and tools that look there; a resume asks the agents.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._changed = threading.Condition()
        self._followed: list[Future[CommitInfo]] = []
        self._wanted: str | None = None
        self._busy = False
        self._thread: threading.Thread | None = None

    def follow(self, iteration: int, committed: Future[CommitInfo]) -> None:
        """Point to the iteration as soon as it is committed, unless a save that began later is by then."""
        with self._changed:
            self._followed.append(committed)

        def done(future: Future[CommitInfo]) -> None:
            with self._changed:
                if future not in self._followed:
                    return
                if future.exception() is not None:
                    self._followed.remove(future)
                    return
                del self._followed[: self._followed.index(future) + 1]
                self._wanted = iteration_name(iteration)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="replicator-latest", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

        committed.add_done_callback(done)

    def settle(self, deadline_s: float) -> None:
        """Wait until what is to be written is written."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._wanted is None and not self._busy, deadline_s):
                logger.warning("%s is not written after %.1f s; see its file system", self._path, deadline_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._wanted is not None)
                name, self._wanted, self._busy = self._wanted, None, True
            assert name is not None
            try:
                self._write(name)
            except OSError as error:
                logger.warning("cannot write %s: %s; checkpoints are found without it", self._path, error)

    def _write(self, name: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=f".{LATEST_NAME}.", delete=False) as stream:
            written = Path(stream.name)
            try:
                stream.write(f"{name}\n")
                stream.flush()
                os.fsync(stream.fileno())
                written.chmod(0o644)
                written.replace(self._path)
            except BaseException:
                written.unlink(missing_ok=True)
                raise
