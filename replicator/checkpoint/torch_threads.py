"""PyTorch's own threads, while objects are written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_bound_lock = threading.Lock()
_bound_users = 0
_unbound_threads = 0


@contextmanager
def bounded_threads(writers: int) -> Iterator[None]:
    """Half of the processors for PyTorch's own threads, shared by the writers; afterwards what it was.

    PyTorch has one number for this thread and one for all threads that are new, and sets both at once. So it is set
    before the writers begin, and what it was is known by the first of those who are in such a block at the same time.
    """
    global _bound_users, _unbound_threads
    with _bound_lock:
        if _bound_users == 0:
            _unbound_threads = torch.get_num_threads()
        _bound_users += 1
        torch.set_num_threads(max(1, min(_unbound_threads, (os.cpu_count() or 1) // 2 // writers)))
    try:
        yield
    finally:
        with _bound_lock:
            _bound_users -= 1
            torch.set_num_threads(_unbound_threads)
