"""Free segments made ahead of need: faulted in while nobody needs the cores, given up as soon as somebody does.

A page that was never touched costs far more than copying into it. So while a node is idle its agent touches the pages
that the next object will land in, and keeps them mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from replicator.store.mapping import advise
from replicator.store.paths import TEMPORARY, StorePaths
from replicator.store.segment import MappedSegment, discard
from replicator.store.trailer import PAGE

CHUNK_BYTES = 16 << 20
"""Touched at a time by one thread: what is between two looks whether to stop."""
THREADS = 2
_MADV_POPULATE_WRITE = 23
_MAX_WAIT_S = 5.0

Fault = Callable[[MappedSegment, Callable[[], bool]], bool]
"""Touches all pages of a new segment, until it is told to stop; whether it has touched all. May raise OSError."""


class Stocking:
    """Whether a segment is being made ahead of need, and how it is stopped. Thread-safe; one at a time."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._ended.set()
        self._demand = time.monotonic()

    def begin(self) -> None:
        self._stop.clear()
        self._ended.clear()

    def end(self) -> None:
        self._ended.set()

    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def demanded(self) -> None:
        """Somebody wants memory now: no more is touched ahead of need."""
        self._demand = time.monotonic()
        self._stop.set()

    def quiet_s(self) -> float:
        """Seconds since somebody wanted memory."""
        return time.monotonic() - self._demand

    def give_way(self) -> bool:
        """Like `demanded`, and wait until what was touched is given back. False when there is nothing to wait for."""
        self.demanded()
        return not self._ended.is_set() and self._ended.wait(_MAX_WAIT_S)


@contextlib.contextmanager
def new_file(paths: StorePaths, capacity: int) -> Iterator[Path]:
    """A file of so many bytes under a temporary name, that nothing was allocated for. Whoever wants it renames it.

    Raises:
        OSError: it cannot be made.
    """
    path = paths.segments / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, capacity)
        finally:
            os.close(fd)
        yield path
    finally:
        discard(path)


def fault_in(mapped: MappedSegment, should_stop: Callable[[], bool], populate: bool = True) -> bool:
    """Allocate and touch all pages of a segment that nobody else has, with two threads; whether all are.

    Args:
        should_stop: asked in both threads, before every chunk.
        populate: let the kernel do it (MADV_POPULATE_WRITE), where it can.

    Raises:
        OSError: the file system is full. That is an error here, and no signal.
    """
    starts = iter(range(0, mapped.capacity, CHUNK_BYTES))
    lock = threading.Lock()
    failures: list[OSError] = []
    done = [0]

    def work() -> None:
        try:
            while not failures and not should_stop():
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                piece = mapped.view[start : start + CHUNK_BYTES]
                mapped.collapse(start, len(piece))
                if not populate or not _populate(piece):
                    mapped.allocate(start, len(piece))
                    for page in range(0, len(piece), PAGE):
                        piece[page] = 0
                with lock:
                    done[0] += len(piece)
        except OSError as error:
            failures.append(error)

    helpers = [threading.Thread(target=work, name="replicator-prefault", daemon=True) for _ in range(THREADS - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]
    return done[0] == mapped.capacity


def _populate(piece: memoryview) -> bool:
    """Whether the kernel could (Linux 5.14). Raises OSError when there is no memory for it."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    while True:
        number = advise(address, len(piece), _MADV_POPULATE_WRITE)
        if not number:
            return True
        if number == errno.EINVAL:
            return False
        if number not in (errno.EINTR, errno.EAGAIN):
            # EFAULT: the file system has no page left.
            raise OSError(number, os.strerror(number))
