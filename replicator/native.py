"""Checksums, the copy that computes one, and the receive that computes one per block.

In C++ (native/) where that was built, else in Python (replicator/_fallback.py): IMPLEMENTATION says which, and
FALLBACK_REASON why. Buffers are anything with the buffer protocol, C-contiguous. Checksums are CRC32C (RFC 3720),
the final value as everybody prints it; a `value` of 0 begins a new one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicator.checksum import BLOCK_SIZE, block_count
from replicator.errors import TransferError, TransferStalledError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "BLOCK_SIZE",
    "FALLBACK_REASON",
    "IMPLEMENTATION",
    "Received",
    "block_crcs",
    "combine_blocks",
    "copy_crc32c",
    "copy_parts",
    "crc32c",
    "crc32c_combine",
    "receive",
    "recv_crc32c",
]

IMPLEMENTATION: str
"""`native`, or `python` for the slower fallback."""
FALLBACK_REASON: str
"""Why the fallback is in use; empty when it is not."""

try:
    from replicator._native import block_crcs as _block_crcs
    from replicator._native import copy_crc32c as _copy_crc32c
    from replicator._native import copy_parts as _copy_parts
    from replicator._native import crc32c as _crc32c
    from replicator._native import crc32c_combine as _crc32c_combine
    from replicator._native import recv_blocks as _recv_blocks

    IMPLEMENTATION, FALLBACK_REASON = "native", ""
except ImportError as error:
    from replicator._fallback import block_crcs as _block_crcs
    from replicator._fallback import copy_crc32c as _copy_crc32c
    from replicator._fallback import copy_parts as _copy_parts
    from replicator._fallback import crc32c as _crc32c
    from replicator._fallback import crc32c_combine as _crc32c_combine
    from replicator._fallback import recv_blocks as _recv_blocks

    IMPLEMENTATION = "python"
    FALLBACK_REASON = f"the native core was not built, or does not load here ({error}); install g++ and reinstall"

COPY_THREADS = min(len(os.sched_getaffinity(0)), 4)
"""That share one large copy, when nothing else is asked for."""
NEVER_S = 1e9
"""A slice that does not end by itself."""


@dataclass(frozen=True, slots=True)
class Received:
    """What `receive` got before it returned, whatever made it return."""

    size: int
    """Bytes now in the target."""
    block_crcs: list[int]
    """Of the blocks that are complete."""
    tail_crc: int
    """Of the bytes of the block after them; 0 when there are none."""
    error: int
    """0, or an errno: ETIME no progress, ENODATA the peer closed, ECANCELED cancelled, else the socket's own."""


def crc32c(buffer: ReadableBuffer, value: int = 0) -> int:
    """The CRC32C of `buffer`, continued from `value`, the CRC32C of the bytes before it."""
    return _crc32c(buffer, value)


def crc32c_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """The CRC32C of two byte strings in a row, from the CRC32C of each and the length of the second."""
    if len_b < 0:
        raise ValueError(f"len_b: expected 0 or more bytes, found {len_b}")
    return _crc32c_combine(crc_a, crc_b, len_b)


def copy_crc32c(dst: WriteableBuffer, src: ReadableBuffer, value: int = 0) -> int:
    """Copy `src` to the start of `dst` and return its CRC32C, continued from `value`. The two must not overlap.

    Raises:
        ValueError: `dst` is shorter than `src`.
        BufferError: a buffer is not contiguous, or `dst` is read-only.
    """
    return _copy_crc32c(dst, src, value)


def copy_parts(
    parts: Sequence[tuple[WriteableBuffer | None, ReadableBuffer]],
    *,
    block_size: int = BLOCK_SIZE,
    prefix_crc: int = 0,
    prefix_size: int = 0,
    threads: int = COPY_THREADS,
) -> tuple[list[int], int]:
    """Copy each source to the start of its target, with the CRC32C of every block of the stream the sources make.

    Args:
        parts: (target, source); without a target the source is only checksummed. Nothing may overlap.
        block_size: in bytes; blocks end at multiples of it, counted from `prefix_size` bytes before the first source.
        prefix_crc, prefix_size: CRC32C and length of the part of the first block that went before.
        threads: that share the work when it is large, this one included.

    Returns:
        The checksums of the blocks that are complete, and that of the bytes after them (0 when there are none).

    Raises:
        ValueError: a target is shorter than its source, or a part is not a pair.
        BufferError: a buffer is not contiguous, or a target is read-only.
    """
    _check_prefix(prefix_size, block_size)
    if threads < 1:
        raise ValueError(f"threads: expected 1 or more, found {threads}")
    return _copy_parts([(target, source) for target, source in parts], block_size, prefix_crc, prefix_size, threads)


def block_crcs(buffer: ReadableBuffer, block_size: int = BLOCK_SIZE) -> list[int]:
    """The CRC32C of every block of `buffer`; the last block may be short, an empty buffer has none."""
    _check_block_size(block_size)
    return _block_crcs(buffer, block_size)


def combine_blocks(crcs: Sequence[int], size: int, block_size: int = BLOCK_SIZE) -> int:
    """The CRC32C of an object of `size` bytes from those of its blocks; 0 for an empty one.

    Raises:
        ValueError: `crcs` has another length than an object of that size has blocks.
    """
    _check_block_size(block_size)
    if len(crcs) != block_count(size, block_size):
        raise ValueError(
            f"expected {block_count(size, block_size)} block checksums for {size} bytes, found {len(crcs)}"
        )
    if not crcs:
        return 0
    combined = crcs[0]
    for crc in crcs[1:-1]:
        combined = _crc32c_combine(combined, crc, block_size)
    if len(crcs) > 1:
        combined = _crc32c_combine(combined, crcs[-1], size - (len(crcs) - 1) * block_size)
    return combined


def receive(
    fd: int,
    dst: WriteableBuffer,
    *,
    block_size: int = BLOCK_SIZE,
    progress_timeout_s: float,
    slice_s: float = NEVER_S,
    cancel_fd: int = -1,
    prefix_crc: int = 0,
    prefix_size: int = 0,
) -> Received:
    """Receive `len(dst)` bytes from a connected socket, or less when `slice_s` is over or something goes wrong.

    Each block's checksum is computed right behind the receive, while its bytes are in cache. Never raises for
    what the peer or the network did: `Received.error` tells it, and what came before it is kept.

    Args:
        fd: a stream socket, blocking or not.
        block_size: in bytes; blocks end at multiples of it, counted from `prefix_size` bytes before `dst`.
        progress_timeout_s: give up when no byte arrives for this long.
        slice_s: return after about this long, with at least one byte, so that the caller can report progress.
        cancel_fd: give up as soon as this descriptor is readable; -1: none.
        prefix_crc, prefix_size: CRC32C and length of the part of the first block that was received before;
            for the next slice these are `tail_crc` and the bytes since the last multiple of `block_size`.
    """
    _check_prefix(prefix_size, block_size)
    return Received(*_recv_blocks(fd, dst, block_size, progress_timeout_s, slice_s, cancel_fd, prefix_crc, prefix_size))


def recv_crc32c(
    fd: int,
    dst: WriteableBuffer,
    *,
    block_size: int = BLOCK_SIZE,
    progress_timeout_s: float,
    cancel_fd: int = -1,
    prefix_crc: int = 0,
    prefix_size: int = 0,
) -> list[int]:
    """Receive exactly `len(dst)` bytes as `receive` does, and return the CRC32C of every block, the last one too.

    Raises:
        TransferStalledError: no byte came for `progress_timeout_s`.
        TransferError: the peer closed the connection early, the socket failed, or `cancel_fd` became readable.
    """
    got = receive(
        fd,
        dst,
        block_size=block_size,
        progress_timeout_s=progress_timeout_s,
        cancel_fd=cancel_fd,
        prefix_crc=prefix_crc,
        prefix_size=prefix_size,
    )
    total = memoryview(dst).nbytes
    if got.error:
        raise receive_error(got.error, got.size, total, progress_timeout_s)
    if got.size and (prefix_size + got.size) % block_size:
        return [*got.block_crcs, got.tail_crc]
    return got.block_crcs


def receive_error(code: int, size: int, total: int, progress_timeout_s: float) -> TransferError:
    """The error for an errno of `Received.error`, after `size` of `total` bytes."""
    if code == errno.ETIME:
        return TransferStalledError(f"no byte for {progress_timeout_s:.1f} s, after {size} of {total} bytes")
    if code == errno.ENODATA:
        return TransferError(f"the peer closed the connection after {size} of {total} bytes")
    if code == errno.ECANCELED:
        return TransferError("cancelled")
    return TransferError(f"receive failed after {size} of {total} bytes: {os.strerror(code)}")


def _check_block_size(block_size: int) -> None:
    if block_size <= 0:
        raise ValueError(f"block_size: expected a positive number of bytes, found {block_size}")


def _check_prefix(prefix_size: int, block_size: int) -> None:
    _check_block_size(block_size)
    if not 0 <= prefix_size < block_size:
        raise ValueError(f"prefix_size: expected 0..{block_size - 1}, found {prefix_size}")
