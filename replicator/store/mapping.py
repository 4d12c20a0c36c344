"""Files in memory. A mapping ends when nobody holds a part of it any more, and forked children have none of it.

`mmap.mmap` will not do: it keeps a second descriptor, it refuses to end while a part is held, and a forked child that
destroys its copy unmaps whatever lies at that address there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator

HUGE_PAGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10

# A child that kept them would keep the memory of removed files, and readers' locks, for its whole life.
_parents_only: set[int] = set()


def open_parents_only(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file whose descriptor children do not get, neither by exec nor by fork. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    _parents_only.add(fd)
    return fd


def close(fd: int) -> None:
    """Close what `open_parents_only` opened, in the same process."""
    _parents_only.discard(fd)
    os.close(fd)


def _close_in_child() -> None:
    for fd in _parents_only:
        with contextlib.suppress(OSError):
            os.close(fd)
    _parents_only.clear()


os.register_at_fork(after_in_child=_close_in_child)


def map_file(fd: int, length: int, writable: bool) -> memoryview:
    """The first `length` bytes (at least 1) of a file from `open_parents_only`, which this takes over.

    When the view and all that was made of it are gone, the mapping ends and the descriptor is closed.

    Raises:
        OSError: it cannot be mapped; the descriptor is still the caller's.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _map(length, protection, fd)
    _libc.madvise(address, length, mmap.MADV_DONTFORK)
    memory = (ctypes.c_char * length).from_address(address)
    view = memoryview(memory).cast("B")
    view = view if writable else view.toreadonly()
    # Last: from here on the descriptor is not the caller's any more.
    weakref.finalize(memory, _end, os.getpid(), address, length, fd).atexit = False
    return view


def _map(length: int, protection: int, fd: int) -> int:
    """The address of a new mapping; on the bound of a huge page, for only there the kernel maps one as a whole."""
    if length < HUGE_PAGE:
        return _checked(_libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, 0))
    whole = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    room = _checked(_libc.mmap(None, whole + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
    address = -(-room // HUGE_PAGE) * HUGE_PAGE
    try:
        _checked(_libc.mmap(address, length, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0))
    except OSError:
        _libc.munmap(room, whole + HUGE_PAGE)
        raise
    if address > room:
        _libc.munmap(room, address - room)
    _libc.munmap(address + whole, room + HUGE_PAGE - address)
    return address


def _checked(address: int) -> int:
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@contextlib.contextmanager
def mapped_for_advice(fd: int, length: int) -> Iterator[int]:
    """The address at which a file is mapped within the block, for `advise` alone. Raises OSError."""
    address = _map(length, mmap.PROT_READ | mmap.PROT_WRITE, fd)
    try:
        yield address
    finally:
        _libc.munmap(address, length)


def advise(address: int, length: int, advice: int) -> int:
    """madvise(2), with the GIL released; 0 or the error number."""
    return 0 if _libc.madvise(address, length, advice) == 0 else ctypes.get_errno()


def _end(pid: int, address: int, length: int, fd: int) -> None:
    if os.getpid() == pid:
        _libc.munmap(address, length)
        close(fd)
