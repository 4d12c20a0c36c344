"""Checksums against published vectors, against PyPI crc32c, and against each other."""

from __future__ import annotations

import array
import mmap
import platform
import random
import re
import threading
from pathlib import Path
from types import ModuleType

import crc32c as reference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicator import _fallback, _native

MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PIECES = st.binary(max_size=3000)

# RFC 3720, appendix B.4, and the check value of the CRC catalogue.
READ_10 = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"
)
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (READ_10, 0xD9963A56),
]


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_published_vectors(native: ModuleType, data: bytes, expected: int) -> None:
    assert native.crc32c(data) == expected
    assert native.copy_crc32c(bytearray(len(data)), data) == expected


@pytest.mark.parametrize("kernel", _native.kernels())
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_every_kernel_on_published_vectors(kernel: str, data: bytes, expected: int) -> None:
    assert _native.crc32c_by(kernel, data, 0) == expected


@pytest.mark.parametrize("kernel", _native.kernels())
def test_every_kernel_at_every_length_and_alignment(kernel: str) -> None:
    data = random.Random(1).randbytes(1400)
    for size in range(1300):
        view = memoryview(data)[size % 17 : size % 17 + size]
        assert _native.crc32c_by(kernel, view, 0x12345678) == reference.crc32c(view, 0x12345678), size


@pytest.mark.parametrize("kernel", _native.kernels())
def test_every_kernel_copies_past_the_caches_at_every_alignment(kernel: str) -> None:
    """From 1 MiB on: the ends that are no whole lines, and nothing beyond them."""
    size = 1 << 20
    data = random.Random(3).randbytes(size + 300)
    for at in (0, 1, 31, 64, 127, 255):
        for more in (0, 1, 63, 128, 255, 256):
            source = memoryview(data)[at % 17 : at % 17 + size + more]
            target = bytearray(size + 800)
            crc = _native.copy_crc32c_by(kernel, memoryview(target)[at:], source, 0x12345678)
            assert crc == reference.crc32c(source, 0x12345678), (at, more)
            assert target == bytes(at) + source.tobytes() + bytes(len(target) - at - len(source)), (at, more)


@MANY
@given(
    pieces=st.lists(st.tuples(PIECES, st.booleans()), max_size=6),
    block_size=st.integers(1, 700),
    prefix=st.integers(0, 2000),
    start=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 5),
)
def test_copied_parts_have_a_checksum_per_block_of_their_stream(
    native: ModuleType,
    pieces: list[tuple[bytes, bool]],
    block_size: int,
    prefix: int,
    start: int,
    threads: int,
) -> None:
    prefix %= block_size
    parts = [(bytearray(len(source)) if wanted else None, source) for source, wanted in pieces]
    crcs, tail = native.copy_parts(parts, block_size=block_size, prefix_crc=start, prefix_size=prefix, threads=threads)
    assert all(target is None or target == source for target, source in parts)
    data = b"".join(source for source, _ in pieces)
    ends = [*range(block_size - prefix, len(data) + 1, block_size)]
    blocks = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]
    assert [*crcs, tail] == [reference.crc32c(block, 0 if n else start) for n, block in enumerate(blocks)]


def test_a_part_whose_target_is_too_short_is_refused(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="at least 4 bytes, found 3"):
        native.copy_parts([(bytearray(3), b"abcd")])
    with pytest.raises(BufferError):
        native.copy_parts([(b"abcd", b"abcd")])


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("prefix", [0, 1, (4 << 20) - 1])
def test_a_large_copy_by_several_threads(native: ModuleType, threads: int, prefix: int) -> None:
    block = 4 << 20
    data = random.Random(4).randbytes(1 << 20) * 21 + b"odd"
    target = bytearray(len(data) + 1)
    crcs, tail = native.copy_parts([(target, data)], prefix_crc=5, prefix_size=prefix, threads=threads)
    assert target == data + b"\0"
    first = block - prefix
    assert crcs[0] == reference.crc32c(data[:first], 5)
    assert crcs[1:] == [reference.crc32c(data[i : i + block]) for i in range(first, len(data) - block, block)]
    rest = (len(data) - first) % block
    assert tail == (reference.crc32c(data[len(data) - rest :]) if rest else 0)


@pytest.mark.parametrize("name", _fallback.ENGINES)
def test_every_engine_of_the_fallback(name: str) -> None:
    try:
        engine = _fallback.load_engine(name)
    except ImportError:
        assert name == "google_crc32c", "crc32c is among the packages for tests"
        return
    data = random.Random(2).randbytes(5000)
    assert engine(memoryview(data), 7) == reference.crc32c(data, 7)


@MANY
@given(data=PIECES, value=st.integers(0, 2**32 - 1))
def test_equals_reference(native: ModuleType, data: bytes, value: int) -> None:
    assert native.crc32c(data, value) == reference.crc32c(data, value)


@MANY
@given(first=PIECES, second=PIECES)
def test_continues_and_combines(native: ModuleType, first: bytes, second: bytes) -> None:
    whole = reference.crc32c(first + second)
    assert native.crc32c(second, native.crc32c(first)) == whole
    assert native.crc32c_combine(native.crc32c(first), native.crc32c(second), len(second)) == whole


@pytest.mark.parametrize("length", [0, 1, 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1])
def test_combine_of_long_pieces_is_the_same_in_both(length: int) -> None:
    """F29: lengths of more than 32 bits."""
    a, b = 0xE3069283, 0x8A9136AA
    assert _native.crc32c_combine(a, b, length) == _fallback.crc32c_combine(a, b, length)


def test_combine_beyond_4_gib_equals_running_over_the_bytes(native: ModuleType) -> None:
    """F29: 4 GiB + 1 of zeros, its checksum made by doubling, so that no 4 GiB are needed."""
    crc, size = native.crc32c(b"\0"), 1
    while size < 2**32:
        crc, size = native.crc32c_combine(crc, crc, size), size * 2
    assert native.crc32c_combine(crc, native.crc32c(b"\0"), 1) == native.crc32c(b"\0", crc)


@MANY
@given(data=PIECES, block_size=st.integers(1, 700))
def test_blocks_combine_into_the_whole(native: ModuleType, data: bytes, block_size: int) -> None:
    crcs = native.block_crcs(data, block_size)
    assert crcs == [reference.crc32c(data[i : i + block_size]) for i in range(0, len(data), block_size)]
    assert native.combine_blocks(crcs, len(data), block_size) == reference.crc32c(data)


def test_wrong_arguments_of_blocks(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected 2 block checksums for 5 bytes, found 1"):
        native.combine_blocks([1], 5, 4)
    with pytest.raises(ValueError, match="block_size"):
        native.block_crcs(b"abc", 0)
    with pytest.raises(ValueError, match="len_b"):
        native.crc32c_combine(1, 2, -1)


@MANY
@given(data=PIECES, value=st.integers(0, 2**32 - 1), before=st.integers(0, 70), after=st.integers(0, 70))
def test_copy_touches_nothing_else(native: ModuleType, data: bytes, value: int, before: int, after: int) -> None:
    target = bytearray(b"\xa5" * (before + len(data) + after))
    crc = native.copy_crc32c(memoryview(target)[before:], data, value)
    assert crc == reference.crc32c(data, value)
    assert target == b"\xa5" * before + data + b"\xa5" * after


@pytest.mark.parametrize("offset", [0, 1, 15, 63, 64])
@pytest.mark.parametrize("extra", [-1, 0, 1, 63, 64, 32767])
def test_large_copies_at_odd_sizes_and_alignments(native: ModuleType, offset: int, extra: int) -> None:
    """Around the size from which stores bypass the cache, and at every kind of head and tail."""
    size = (1 << 20) + extra
    data = random.Random(offset * 100 + extra).randbytes(size + 7)
    with mmap.mmap(-1, size + 4096) as target:
        assert native.copy_crc32c(memoryview(target)[offset:], memoryview(data)[7:]) == reference.crc32c(data[7:])
        assert target[offset : offset + size] == data[7:]
        assert target[:offset] == bytes(offset)
        assert not any(target[offset + size :])


@pytest.mark.parametrize("kernel", _native.kernels())
@MANY
@given(data=PIECES, cut=st.integers(0, 3000), value=st.integers(0, 2**32 - 1))
def test_every_kernel_equals_reference(kernel: str, data: bytes, cut: int, value: int) -> None:
    first = _native.crc32c_by(kernel, data[:cut], value)
    assert _native.crc32c_by(kernel, data[cut:], first) == reference.crc32c(data, value)


def test_a_kernel_for_what_this_processor_says_it_can() -> None:
    """Dispatch neither forgets an instruction set nor takes one that is not there."""
    info = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
    flags = set(re.findall(r"\w+", (re.search(r"^flags.*$", info, re.M) or [""])[0]))
    found = set(_native.kernels())
    assert "portable" in found
    assert ("sse4.2" in found) == ("sse4_2" in flags)
    assert ("pclmul" in found) == ("pclmulqdq" in flags)
    assert ("vpclmul" in found) == ({"avx2", "vpclmulqdq"} <= flags)
    assert ("avx512" in found) == ({"avx2", "vpclmulqdq", "avx512f"} <= flags)


def test_copy_refuses_a_short_or_read_only_target(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected a target of at least 4 bytes, found 3"):
        native.copy_crc32c(bytearray(3), b"abcd")
    with pytest.raises(BufferError):
        native.copy_crc32c(memoryview(b"abcd"), b"abcd")


def test_any_contiguous_buffer_is_taken_as_bytes(native: ModuleType) -> None:
    numbers = array.array("d", [1.5, -2.25, 3.0])
    assert native.crc32c(numbers) == reference.crc32c(numbers.tobytes())
    assert native.crc32c(memoryview(numbers).cast("B").cast("B", (3, 8))) == reference.crc32c(numbers.tobytes())
    target = array.array("d", [0.0, 0.0, 0.0])
    native.copy_crc32c(target, numbers)
    assert target == numbers
    with pytest.raises(BufferError):
        native.crc32c(memoryview(b"abcdef")[::2])


def test_other_threads_run_during_a_long_checksum() -> None:
    """With the GIL kept, the ticks of the other thread could only fall before or after the call."""
    # Untouched private pages all map to one page of zeros, so this takes no memory.
    data = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ticking, stop = threading.Event(), threading.Event()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.0001):
            ticks += 1
            ticking.set()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        assert ticking.wait(10)
        before = ticks
        _native.crc32c(data, 0)
        during = ticks - before
    finally:
        stop.set()
        thread.join()
    assert during > 5
