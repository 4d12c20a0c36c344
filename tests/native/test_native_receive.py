"""The receive that computes checksums: over real sockets, against both implementations."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from replicator.errors import TransferError, TransferStalledError

BLOCK = 4096
LONG_S = 30.0
SHORT_S = 0.2


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname(), timeout=LONG_S)
        right, _ = server.accept()
    left.settimeout(None)
    with left, right:
        yield left, right


def send_in_background(sock: socket.socket, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=sock.sendall, args=(data,))
    thread.start()
    return thread


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, (3 << 20) + 17])
@pytest.mark.parametrize("blocking", [True, False])
def test_receives_exactly_and_checks_every_block(
    native: ModuleType, pair: tuple[socket.socket, socket.socket], size: int, blocking: bool
) -> None:
    sender, receiver = pair
    receiver.setblocking(blocking)
    data = random.Random(size).randbytes(size)
    target = bytearray(b"\xa5" * (size + 1))
    thread = send_in_background(sender, data + b"next")
    crcs = native.recv_crc32c(receiver.fileno(), memoryview(target)[:size], block_size=BLOCK, progress_timeout_s=LONG_S)
    thread.join()
    assert target == data + b"\xa5"
    assert crcs == native.block_crcs(data, BLOCK)
    receiver.setblocking(True)
    assert receiver.recv(4, socket.MSG_WAITALL) == b"next", "took bytes beyond the target"


def test_nothing_to_receive(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    fd = pair[1].fileno()
    assert native.recv_crc32c(fd, bytearray(), block_size=BLOCK, progress_timeout_s=SHORT_S) == []


def test_goes_on_in_the_middle_of_a_block(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    data = random.Random(3).randbytes(2 * BLOCK + 100)
    prefix = data[:1000]
    sender.sendall(data[1000:])
    target = bytearray(len(data) - 1000)
    crcs = native.recv_crc32c(
        receiver.fileno(),
        target,
        block_size=BLOCK,
        progress_timeout_s=LONG_S,
        prefix_crc=native.crc32c(prefix),
        prefix_size=len(prefix),
    )
    assert prefix + target == data
    assert crcs == native.block_crcs(data, BLOCK)


def test_in_slices(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    """A slice of no time returns after each piece; put together they give what one call gives."""
    sender, receiver = pair
    data = random.Random(4).randbytes(40 * BLOCK + 5)
    thread = send_in_background(sender, data)
    target = bytearray(len(data))
    crcs: list[int] = []
    done, tail, slices = 0, 0, 0
    while done < len(data):
        got = native.receive(
            receiver.fileno(),
            memoryview(target)[done:],
            block_size=BLOCK,
            progress_timeout_s=LONG_S,
            slice_s=0.0,
            prefix_crc=tail,
            prefix_size=done % BLOCK,
        )
        assert got.error == 0
        assert got.size > 0
        crcs += got.block_crcs
        done, tail, slices = done + got.size, got.tail_crc, slices + 1
    thread.join()
    assert slices > 1
    assert target == data
    assert [*crcs, tail] == native.block_crcs(data, BLOCK)


def test_stall_is_a_typed_error_within_the_deadline(
    native: ModuleType, pair: tuple[socket.socket, socket.socket]
) -> None:
    sender, receiver = pair
    sender.sendall(b"x" * 100)
    begin = time.monotonic()
    with pytest.raises(TransferStalledError, match=r"no byte for 0\.2 s, after 100 of 200 bytes"):
        native.recv_crc32c(receiver.fileno(), bytearray(200), block_size=BLOCK, progress_timeout_s=SHORT_S)
    assert SHORT_S * 0.9 <= time.monotonic() - begin < SHORT_S + 5


def test_deadline_is_for_progress_and_not_for_the_whole(
    native: ModuleType, pair: tuple[socket.socket, socket.socket]
) -> None:
    """F47: a transfer of three times the deadline succeeds when no single pause reaches it."""
    sender, receiver = pair
    deadline_s = 0.5

    def drip() -> None:
        for _ in range(12):
            time.sleep(deadline_s / 4)
            sender.sendall(b"x" * 10)

    thread = threading.Thread(target=drip)
    thread.start()
    begin = time.monotonic()
    crcs = native.recv_crc32c(receiver.fileno(), bytearray(120), block_size=BLOCK, progress_timeout_s=deadline_s)
    thread.join()
    assert time.monotonic() - begin > 2 * deadline_s
    assert crcs == [native.crc32c(b"x" * 120)]


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("-inf"), float("nan")])
def test_a_deadline_that_is_no_time_is_over_at_once(
    native: ModuleType, pair: tuple[socket.socket, socket.socket], timeout_s: float
) -> None:
    got = native.receive(pair[1].fileno(), bytearray(10), block_size=BLOCK, progress_timeout_s=timeout_s)
    assert got == native.Received(0, [], 0, errno.ETIME)


def test_an_infinite_deadline_waits_for_the_bytes(
    native: ModuleType, pair: tuple[socket.socket, socket.socket]
) -> None:
    sender, receiver = pair
    timer = threading.Timer(0.05, sender.sendall, [b"abc"])
    timer.start()
    got = native.receive(receiver.fileno(), bytearray(3), block_size=BLOCK, progress_timeout_s=float("inf"))
    timer.join()
    assert got.error == 0
    assert got.size == 3


def test_peer_closes_early(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    sender.sendall(b"x" * (BLOCK + 1))
    sender.close()
    target = bytearray(2 * BLOCK)
    got = native.receive(receiver.fileno(), target, block_size=BLOCK, progress_timeout_s=LONG_S)
    assert got == native.Received(BLOCK + 1, [native.crc32c(b"x" * BLOCK)], native.crc32c(b"x"), errno.ENODATA)
    with pytest.raises(TransferError, match="closed the connection after 0 of 8192"):
        native.recv_crc32c(receiver.fileno(), target, block_size=BLOCK, progress_timeout_s=LONG_S)


def test_peer_resets(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sender.close()
    with pytest.raises(TransferError, match=os.strerror(errno.ECONNRESET)):
        native.recv_crc32c(receiver.fileno(), bytearray(10), block_size=BLOCK, progress_timeout_s=LONG_S)


def test_not_a_socket(native: ModuleType) -> None:
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, b"abc")
        with pytest.raises(TransferError, match="receive failed"):
            native.recv_crc32c(read_end, bytearray(3), block_size=BLOCK, progress_timeout_s=LONG_S)
        os.fstat(read_end)  # still open
    finally:
        os.close(read_end)
        os.close(write_end)


def test_cancel_wakes_a_waiting_receive(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    receiver = pair[1]
    read_end, write_end = os.pipe()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            native.recv_crc32c(
                receiver.fileno(), bytearray(10), block_size=BLOCK, progress_timeout_s=LONG_S, cancel_fd=read_end
            )
        except TransferError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    os.write(write_end, b"x")
    thread.join(5)
    assert not thread.is_alive()
    assert [str(error) for error in failed] == ["cancelled"]
    os.close(read_end)
    os.close(write_end)


def test_cancel_stops_a_receive_that_never_waits(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    """Bytes keep coming faster than they are taken, so only a look in between can notice."""
    sender, receiver = pair
    read_end, write_end = os.pipe()
    os.write(write_end, b"x")
    sender.sendall(b"x" * 10)
    got = native.receive(
        receiver.fileno(), bytearray(10), block_size=BLOCK, progress_timeout_s=LONG_S, cancel_fd=read_end
    )
    assert got.error == errno.ECANCELED
    os.close(read_end)
    os.close(write_end)


def test_sender_process_is_killed(native: ModuleType) -> None:
    """The other end is a real process that gets SIGKILL in the middle."""
    code = (
        "import socket, sys\n"
        "server = socket.create_server(('127.0.0.1', 0)); print(server.getsockname()[1], flush=True)\n"
        "sock, _ = server.accept(); sock.sendall(b'x' * 100000); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline())), timeout=LONG_S) as sock:
            first = native.recv_crc32c(sock.fileno(), bytearray(50000), block_size=BLOCK, progress_timeout_s=LONG_S)
            assert first == native.block_crcs(b"x" * 50000, BLOCK)
            process.send_signal(signal.SIGKILL)
            got = native.receive(sock.fileno(), bytearray(100000), block_size=BLOCK, progress_timeout_s=LONG_S)
    assert got.error in (errno.ENODATA, errno.ECONNRESET)
    assert got.size <= 50000


def test_wrong_arguments(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    fd = pair[1].fileno()
    with pytest.raises(ValueError, match="block_size"):
        native.receive(fd, bytearray(1), block_size=0, progress_timeout_s=1)
    with pytest.raises(ValueError, match="prefix_size"):
        native.receive(fd, bytearray(1), block_size=4, progress_timeout_s=1, prefix_size=4)
    with pytest.raises(BufferError):
        native.receive(fd, b"read-only", block_size=4, progress_timeout_s=1)


def test_other_threads_run_while_a_receive_waits(native: ModuleType, pair: tuple[socket.socket, socket.socket]) -> None:
    """The sender is a thread of the same process: were the GIL kept, it could never send."""
    sender, receiver = pair
    timer = threading.Timer(0.05, sender.sendall, [b"abc"])
    timer.start()
    assert native.recv_crc32c(receiver.fileno(), bytearray(3), block_size=BLOCK, progress_timeout_s=LONG_S) == [
        native.crc32c(b"abc")
    ]
    timer.join()
