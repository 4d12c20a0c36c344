"""What a client of the bulk lane does with answers that no server of this project gives."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from replicator.errors import TransferError
from replicator.native import crc32c
from replicator.transfer.bulk_request import RangeRequest, perform

BODY = bytes(range(100))
REQUEST = RangeRequest("host", "ticket", "job/step-1_ckpt@1.0/a", 0, 100, 64, 5.0)
RANGE = b"Content-Range: bytes 0-99/1000\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WHOLE = b"HTTP/1.1 206 Partial Content\r\n" + RANGE + b"Content-Length: 100\r\n\r\n" + BODY


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def ask(ours: socket.socket) -> tuple[bool, bytes, list[int]]:
    """(whether the connection can be used again, the bytes, their checksums)."""
    target, crcs = bytearray(100), list[int]()
    never = os.eventfd(0)
    try:
        reusable = perform(ours, REQUEST, memoryview(target), never, lambda _, __, some: crcs.extend(some), False)
    finally:
        os.close(never)
    return reusable, bytes(target), crcs


def test_informational_answers_before_the_real_one(ends: tuple[socket.socket, socket.socket]) -> None:
    """All in one segment: nothing more comes that would wake a client which waits between them."""
    ends[1].sendall(CONTINUE + CONTINUE + WHOLE)
    assert ask(ends[0]) == (True, BODY, [crc32c(BODY[:64]), crc32c(BODY[64:])])


def test_informational_answers_without_end(ends: tuple[socket.socket, socket.socket]) -> None:
    """F15: bytes that never end are neither an answer nor progress; before, this took memory for ever."""
    ours, theirs = ends
    sent = 0

    def talk() -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            while sent < 50_000_000:
                sent += theirs.send(CONTINUE * 100, socket.MSG_NOSIGNAL)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        with pytest.raises(TransferError, match="expected an answer in 16384 bytes, found none"):
            ask(ours)
    finally:
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert sent < 5_000_000


@pytest.mark.parametrize(
    "framing",
    [
        b"Transfer-Encoding: chunked\r\n\r\n64\r\n" + BODY + b"\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nno chunk at all\r\n",
        b"Content-Length: 99\r\n\r\n" + BODY,
        b"Content-Length: 101\r\n\r\n" + BODY + b"x",
        b"Connection: close\r\n\r\n" + BODY,
    ],
)
def test_a_body_that_is_not_the_range_as_it_is(ends: tuple[socket.socket, socket.socket], framing: bytes) -> None:
    ends[1].sendall(b"HTTP/1.1 206 Partial Content\r\n" + RANGE + framing)
    with pytest.raises(TransferError, match="Content-Length is not that"):
        ask(ends[0])


def test_a_length_that_nobody_can_mean(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(b"HTTP/1.1 206 P\r\n" + RANGE + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + BODY)
    with pytest.raises(TransferError, match=r"not HTTP/1\.1"):
        ask(ends[0])


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"),
        WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1),
        WHOLE + b"and more",
    ],
)
def test_a_connection_that_is_not_in_step_is_not_kept(ends: tuple[socket.socket, socket.socket], answer: bytes) -> None:
    """F45: the next request on it would be answered with what is left of this one, or not at all."""
    ends[1].sendall(answer)
    assert ask(ends[0])[:2] == (False, BODY)
