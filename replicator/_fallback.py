"""The Python twin of the native core: the same functions, for machines where it could not be built.

The checksum itself comes from PyPI `crc32c` or `google_crc32c` when one of them is installed, else from a
table in Python, which is correct and some thousand times slower.
"""

from __future__ import annotations

import errno
import importlib
import select
import socket
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

Engine = Callable[[memoryview, int], int]

ENGINES = ("crc32c", "google_crc32c", "table")
_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reflected: bit 31 is the coefficient of x^0
_ONE = 1 << 31
_WINDOW = 1 << 20
_MAX_POLL_MS = 1e9


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        entries.append(byte)
    return tuple(entries)


def load_engine(name: str) -> Engine:
    """The checksum function of one of ENGINES: (bytes, value of the bytes before) -> value.

    Raises:
        ImportError: the package of that name is not installed.
    """
    if name == "table":
        table = _table()

        def by_table(data: memoryview, value: int) -> int:
            crc = value ^ 0xFFFFFFFF
            for byte in data:
                crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
            return crc ^ 0xFFFFFFFF

        return by_table
    module = importlib.import_module(name)
    if name == "crc32c":
        engine: Engine = module.crc32c
        return engine
    extend: Callable[[int, bytes], int] = module.extend
    return lambda data, value: extend(value, bytes(data))


def _best_engine() -> Engine:
    for name in ENGINES[:-1]:
        try:
            return load_engine(name)
        except ImportError:
            continue
    return load_engine(ENGINES[-1])


_crc: Engine = _best_engine()


def _bytes_of(buffer: ReadableBuffer) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BufferError("expected a C-contiguous buffer")
    if view.nbytes == 0:
        return memoryview(bytearray())  # a view with a zero in its shape cannot be cast
    return view.cast("B")


def _writable_bytes_of(buffer: WriteableBuffer) -> memoryview:
    view = memoryview(buffer)
    if view.readonly:
        raise BufferError("expected a writable buffer, found a read-only one")
    return _bytes_of(view)


def crc32c(buffer: ReadableBuffer, value: int, /) -> int:
    return _crc(_bytes_of(buffer), value)


def copy_crc32c(dst: WriteableBuffer, src: ReadableBuffer, value: int, /) -> int:
    source, target = _bytes_of(src), _writable_bytes_of(dst)
    if len(target) < len(source):
        raise ValueError(f"expected a target of at least {len(source)} bytes, found {len(target)}")
    target[: len(source)] = source
    return _crc(source, value)


def copy_parts(
    parts: list[tuple[WriteableBuffer | None, ReadableBuffer]],
    block_size: int,
    prefix_crc: int,
    prefix_size: int,
    threads: int,
    /,
) -> tuple[list[int], int]:
    """In one thread, whatever `threads` says."""
    crcs: list[int] = []
    crc, filled = prefix_crc, prefix_size
    for dst, src in parts:
        source = _bytes_of(src)
        target = None if dst is None else _writable_bytes_of(dst)
        if target is not None and len(target) < len(source):
            raise ValueError(f"expected a target of at least {len(source)} bytes, found {len(target)}")
        done = 0
        while done < len(source):
            piece = source[done : done + min(len(source) - done, block_size - filled)]
            if target is not None:
                target[done : done + len(piece)] = piece
            crc = _crc(piece, crc)
            done += len(piece)
            filled += len(piece)
            if filled == block_size:
                crcs.append(crc)
                crc = filled = 0
    return crcs, crc


def block_crcs(buffer: ReadableBuffer, block_size: int, /) -> list[int]:
    view = _bytes_of(buffer)
    return [_crc(view[begin : begin + block_size], 0) for begin in range(0, len(view), block_size)]


def crc32c_combine(crc_a: int, crc_b: int, len_b: int, /) -> int:
    return _multiply(_power(len_b), crc_a) ^ crc_b


def _multiply(a: int, b: int) -> int:
    """a(x) * b(x) modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=64)
def _power(bytes_after: int) -> int:
    """x^(8 * bytes_after) modulo the polynomial."""
    result, square = _ONE, _ONE >> 8
    while bytes_after:
        if bytes_after & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        bytes_after >>= 1
    return result


class _Blocks:
    """Checksums of a stream of bytes, cut into blocks; the first one began `prefix_size` bytes earlier."""

    def __init__(self, block_size: int, prefix_crc: int, prefix_size: int) -> None:
        self.done: list[int] = []
        self.tail_crc = prefix_crc
        self._block_size = block_size
        self._filled = prefix_size

    @property
    def room(self) -> int:
        return self._block_size - self._filled

    def add(self, piece: memoryview) -> None:
        self.tail_crc = _crc(piece, self.tail_crc)
        self._filled += len(piece)
        if self._filled == self._block_size:
            self.done.append(self.tail_crc)
            self.tail_crc = self._filled = 0


def recv_blocks(
    fd: int,
    dst: WriteableBuffer,
    block_size: int,
    progress_timeout_s: float,
    slice_s: float,
    cancel_fd: int,
    prefix_crc: int,
    prefix_size: int,
    /,
) -> tuple[int, list[int], int, int]:
    target = _writable_bytes_of(dst)
    blocks = _Blocks(block_size, prefix_crc, prefix_size)
    try:
        sock = socket.socket(fileno=fd)
    except OSError as failure:
        return 0, [], prefix_crc, failure.errno or errno.EIO
    try:
        size, error = _receive(sock, target, blocks, progress_timeout_s, slice_s, cancel_fd)
    finally:
        sock.detach()
    return size, blocks.done, blocks.tail_crc, error


def _receive(
    sock: socket.socket, target: memoryview, blocks: _Blocks, progress_timeout_s: float, slice_s: float, cancel_fd: int
) -> tuple[int, int]:
    """(bytes received, errno or 0). ETIME: no progress; ENODATA: the peer closed; ECANCELED: `cancel_fd`."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if cancel_fd >= 0:
        poller.register(cancel_fd, select.POLLIN)
    size = 0
    begin = last = time.monotonic()
    while size < len(target):
        wait_ms = max(0.0, last + progress_timeout_s - time.monotonic()) * 1000
        ready = {ready_fd for ready_fd, _ in poller.poll(min(wait_ms, _MAX_POLL_MS))}
        if cancel_fd in ready:
            return size, errno.ECANCELED
        if not ready:
            return size, errno.ETIME
        end = min(len(target), size + min(_WINDOW, blocks.room))
        try:
            count = sock.recv_into(target[size:end], flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        except OSError as error:
            return size, error.errno or errno.EIO
        if count == 0:
            return size, errno.ENODATA
        blocks.add(target[size : size + count])
        size += count
        last = time.monotonic()
        if last - begin >= slice_s:
            break
    return size, 0
