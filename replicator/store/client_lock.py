"""Whether a writer process lives: a record lock on clients/<client_id> that it holds for life.

POSIX record locks belong to one process: a forked child does not inherit them, and the kernel gives them back
when the process ends, however it ends. (They are also lost when the process closes any descriptor of the file,
so no code but this opens it.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading

from replicator.errors import StoreRootError
from replicator.store.paths import StorePaths

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid (fcntl(2)).
_FLOCK = "hhqqi4x"

_held: dict[str, int] = {}
_held_lock = threading.Lock()


class ClientLock:
    """The lock of one client of one store. One per client id and process."""

    def __init__(self, paths: StorePaths, client_id: str) -> None:
        self._path = str(paths.client(client_id))
        self._fd = -1
        self._pid = os.getpid()

    def acquire(self) -> None:
        """Make and lock the file.

        Raises:
            StoreRootError: another process has it, or it cannot be made.
        """
        try:
            self._acquire()
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StoreRootError(f"{self._path} is locked by another process; client ids must be unique") from None
            raise StoreRootError(f"cannot lock {self._path}: {error.strerror}") from None

    def _acquire(self) -> None:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, self._path):
                    break
            except BaseException:
                os.close(fd)
                raise
            # The agent removed the file of a client that it took for dead, between our open and our lock.
            os.close(fd)
        with _held_lock:
            _held[self._path] = os.getpid()
        self._fd = fd
        self._pid = os.getpid()

    def close(self) -> None:
        """Give the lock back and remove the file. Idempotent; does nothing in a forked child, whose lock it is not."""
        if self._fd < 0 or os.getpid() != self._pid:
            return
        with _held_lock:
            _held.pop(self._path, None)
        if _is_at(self._fd, self._path):
            os.unlink(self._path)
        os.close(self._fd)
        self._fd = -1


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def is_client_alive(paths: StorePaths, client_id: str) -> bool:
    """Whether the process that is this client lives. False for a client that is not known.

    When it cannot be found out, it is taken to live: nothing of it is then given to others.
    """
    try:
        return _holder(paths, client_id) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


def client_pid(paths: StorePaths, client_id: str) -> int | None:
    """The process that is this client; None when there is none that can be told from here (another pid namespace)."""
    try:
        return _holder(paths, client_id) or None
    except OSError:
        return None


def _holder(paths: StorePaths, client_id: str) -> int | None:
    """The process that has the lock, 0 for one in another pid namespace; None: nobody. Raises OSError."""
    path = str(paths.client(client_id))
    with _held_lock:
        if _held.get(path) == os.getpid():
            return os.getpid()
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        finally:
            os.close(fd)
    return None if kind == fcntl.F_UNLCK else max(int(pid), 0)
