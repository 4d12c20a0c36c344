"""The functions of native/module.cpp. replicator/native.py checks their arguments, and says better what is wrong."""

from _typeshed import ReadableBuffer, WriteableBuffer

def crc32c(buffer: ReadableBuffer, value: int, /) -> int: ...
def crc32c_combine(crc_a: int, crc_b: int, len_b: int, /) -> int: ...
def copy_crc32c(dst: WriteableBuffer, src: ReadableBuffer, value: int, /) -> int: ...
def copy_parts(
    parts: list[tuple[WriteableBuffer | None, ReadableBuffer]],
    block_size: int,
    prefix_crc: int,
    prefix_size: int,
    threads: int,
    /,
) -> tuple[list[int], int]: ...
def block_crcs(buffer: ReadableBuffer, block_size: int, /) -> list[int]: ...
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
) -> tuple[int, list[int], int, int]: ...
def kernels() -> list[str]: ...
def crc32c_by(kernel: str, buffer: ReadableBuffer, value: int, /) -> int: ...
def copy_crc32c_by(kernel: str, dst: WriteableBuffer, src: ReadableBuffer, value: int, /) -> int: ...
