"""A tmpfs of the agent's own at the root of its store: with huge pages, and filled by nobody else."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from replicator.errors import StoreRootError

OPTIONS = "mode=0700,huge=within_size"
LOCK_DEADLINE_S = 5.0
_FLAGS = 0x2 | 0x4 | 0x8  # MS_NOSUID | MS_NODEV | MS_NOEXEC
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def mount_own(root: str | Path, size: int) -> str:
    """Mount a tmpfs of `size` bytes at `root`, unless one is mounted there already. It stays when the agent ends.

    Returns:
        Empty, or why the store is not on one of that size with huge pages, and what to do.

    Raises:
        StoreRootError: the directory cannot be made or looked at, or somebody else keeps it locked.
    """
    path = Path(root).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone_at(path):
            return _mount_once(path, size)
    except OSError as error:
        raise StoreRootError(f"cannot use {path} as a store: {error.strerror}") from None


@contextlib.contextmanager
def _alone_at(path: Path) -> Iterator[None]:
    """No other agent mounts here meanwhile: the second mount would hide the first, with the store that is in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise StoreRootError(
                        f"{path} is locked by another process for {LOCK_DEADLINE_S:.0f} s, which an agent does while "
                        "it mounts a tmpfs there; stop that one, or use another root"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _mount_once(path: Path, size: int) -> str:
    if path.is_mount():
        return _why_other_size(path, size)
    if any(path.iterdir()):
        return (
            f"mount_size: {path} is not empty, and mounting there would hide what is in it; the store stays on the "
            "file system that it is on. To have it on its own, stop the agent and move the directory away"
        )
    number = _mount(path, f"size={size},{OPTIONS}")
    if not number:
        return ""
    if number == errno.EINVAL and not _mount(path, f"size={size},mode=0700"):
        return f"mount_size: the kernel has no huge pages for tmpfs; {path} was mounted without them"
    return (
        f"mount_size: cannot mount a tmpfs at {path} ({os.strerror(number)}); the store uses the file system that the "
        "directory is on. Start the agent with CAP_SYS_ADMIN, or have the system mount it: "
        f"mount -t tmpfs -o size={size},{OPTIONS} tmpfs {path}"
    )


def _why_other_size(path: Path, size: int) -> str:
    """Empty when what is mounted has the size that is wanted, as the kernel rounds it."""
    found = os.statvfs(path)
    if found.f_blocks == -(-size // found.f_frsize):
        return ""
    return (
        f"mount_size is {size}, and what is mounted at {path} has {found.f_blocks * found.f_frsize} bytes; it is left "
        f"as it is. Where it is a tmpfs, give it that size before the agent starts: mount -o remount,size={size} {path}"
    )


def _mount(path: Path, options: str) -> int:
    """0 or the error number."""
    if _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", _FLAGS, options.encode()) == 0:
        return 0
    return ctypes.get_errno()
