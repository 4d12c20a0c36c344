"""What the operating system gives: random names, a disk that is full, and locks that the dead lose."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from replicator.agent import scrub
from replicator.store import client_lock
from replicator.store.paths import StorePaths

from .loop import Process


@contextlib.contextmanager
def simulated(rng: random.Random, now: Callable[[], float]) -> Iterator[None]:
    """Within the block every random choice comes from `rng`, and nodes with a full disk make no files."""
    real_open = os.open

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            process = Process.current.get()
            if process is not None and process.node is not None and process.node.refuses_file(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real_open(path, flags, *args, **kwargs)

    def milliseconds() -> int:
        return int(now() * 1000)

    state = random.getstate()
    random.seed(rng.getrandbits(64))
    try:
        with (
            mock.patch.object(secrets, "token_hex", lambda count=32: f"{rng.getrandbits(8 * count):0{2 * count}x}"),
            mock.patch.object(secrets, "token_urlsafe", lambda count=32: f"{rng.getrandbits(8 * count):x}"),
            mock.patch.object(os, "open", opened),
            mock.patch.object(scrub, "_now_ms", milliseconds),
        ):
            yield
    finally:
        random.setstate(state)


def lock_lost(paths: StorePaths, client_id: str) -> None:
    """A client's process is dead. The kernel gives its lock back; here all processes are one, which forgets it."""
    client_lock._held.pop(str(paths.client(client_id)), None)
