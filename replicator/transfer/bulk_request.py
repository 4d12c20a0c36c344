"""One bulk-lane request from the client's side: blocking, on a connected socket, ended early through a descriptor.

What the response's head is parsed by is h11; after it the bytes go straight from the socket into the target, and
their checksums are computed while they are in cache (`replicator.native.receive`).
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import h11

from replicator.errors import ObjectNotFoundError, TicketError, TransferError
from replicator.native import crc32c, receive, receive_error
from replicator.transfer import bulk_http
from replicator.transfer.sockets import wait_for

# How often the event loop hears of bytes that arrived. Between two of these the GIL is not needed.
SLICE_S = 0.25
_HEAD_READ_BYTES = 4096
_MAX_REFUSAL_BYTES = 4096
_MAX_REASON_CHARS = 600


class StaleConnectionError(Exception):
    """A connection that was kept ended before it brought a single byte: the request may be sent over a new one."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """What to ask for, and how long to wait for it."""

    host: str
    ticket: str
    object: str
    offset: int
    length: int
    block_size: int
    progress_timeout_s: float

    def encode(self) -> tuple[h11.Connection, bytes]:
        """The state to parse the response with, and the bytes of the request.

        Raises:
            TicketError: the ticket cannot be part of a header.
        """
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=bulk_http.MAX_HEAD_BYTES)
        try:
            request = bulk_http.range_request(self.host, self.ticket, self.object, self.offset, self.length)
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise TicketError(f"the ticket is not one: {str(error)[:200]}") from None
        head, end = http.send(request), http.send(h11.EndOfMessage())
        return http, (head or b"") + (end or b"")


Report = Callable[[int, int, Sequence[int]], None]
"""Called with: bytes that arrived since, number of the next complete block in this range, CRCs of those from it on."""


def perform(
    sock: socket.socket, request: RangeRequest, target: memoryview, cancel_fd: int, report: Report, is_reused: bool
) -> bool:
    """Send the request and receive the whole range into `target`.

    Args:
        is_reused: the connection was kept from an earlier request, so that the peer may have closed it since.

    Returns:
        Whether the connection can be used again. After an exception it never can.

    Raises:
        StaleConnectionError, TicketError, ObjectNotFoundError, TransferStalledError, TransferError.
    """
    http, encoded = request.encode()
    try:
        _send(sock, encoded, request.progress_timeout_s, cancel_fd)
        first = _receive_some(sock, request.progress_timeout_s, cancel_fd)
    except OSError as error:
        if is_reused:
            raise StaleConnectionError from None
        raise TransferError(f"the connection broke before an answer: {error.strerror or error}") from None
    if not first:
        if is_reused:
            raise StaleConnectionError
        raise TransferError("the connection was closed before an answer")
    response = _read_head(sock, http, first, request, cancel_fd)
    if response.status_code != 206:
        raise _refusal(sock, http, response, request, cancel_fd)
    found = bulk_http.content_range(response)
    if found != (request.offset, request.length):
        raise TransferError(
            f"asked for {request.length} bytes from {request.offset} on, but the answer carries "
            f"{f'{found[1]} from {found[0]} on' if found else 'no Content-Range'}"
        )
    if bulk_http.content_length(response) != request.length:
        raise TransferError(f"asked for {request.length} bytes, but the answer's Content-Length is not that")
    can_be_reused = http.our_state is h11.DONE  # else the answer said that the connection ends with it
    first = _first_bytes(http)
    goes_on = bool(http.trailing_data[0])
    _receive_body(sock, request, target, first, cancel_fd, report)
    return can_be_reused and not goes_on


def _send(sock: socket.socket, data: bytes, timeout_s: float, cancel_fd: int) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            wait_for(sock, select.POLLOUT, timeout_s, cancel_fd, "room to send a request")


def _receive_some(sock: socket.socket, timeout_s: float, cancel_fd: int, since: float | None = None) -> bytes:
    """Some bytes of an answer's head, awaited since then (default: now); none when the peer closed."""
    since = time.monotonic() if since is None else since
    while True:
        wait_for(sock, select.POLLIN, timeout_s, cancel_fd, "an answer", time.monotonic() - since)
        try:
            return sock.recv(_HEAD_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue


def _read_head(
    sock: socket.socket, http: h11.Connection, first: bytes, request: RangeRequest, cancel_fd: int
) -> h11.Response:
    """The response's head, within one deadline: a head is short, and its bytes are no progress."""
    since = time.monotonic()
    data = first
    try:
        taken = 0
        while True:
            http.receive_data(data)
            taken += len(data)
            while isinstance(event := http.next_event(), h11.InformationalResponse):
                pass
            if isinstance(event, h11.Response):
                return event
            if event is not h11.NEED_DATA:
                raise TransferError(f"expected the head of an answer, found {event!r}")
            if taken > bulk_http.MAX_HEAD_BYTES:  # only informational answers, without end
                raise TransferError(f"expected an answer in {bulk_http.MAX_HEAD_BYTES} bytes, found none in {taken}")
            data = _receive_some(sock, request.progress_timeout_s, cancel_fd, since)
    except h11.RemoteProtocolError as error:
        raise TransferError(f"the answer is not HTTP/1.1: {str(error)[:200]}") from None
    except OSError as error:
        raise TransferError(f"the connection broke in the head of the answer: {error.strerror or error}") from None


def _first_bytes(http: h11.Connection) -> bytes:
    """The bytes of the body that were received together with the head."""
    event = http.next_event()
    return bytes(event.data) if isinstance(event, h11.Data) else b""


def _receive_body(
    sock: socket.socket, request: RangeRequest, target: memoryview, first: bytes, cancel_fd: int, report: Report
) -> None:
    block_size, length = request.block_size, request.length
    target[: len(first)] = first
    crcs, tail = _crcs_of(first, block_size)
    if len(first) == length and length % block_size:
        crcs.append(tail)
    report(len(first), 0, crcs)
    size, blocks = len(first), len(crcs)
    while size < length:
        got = receive(
            sock.fileno(),
            target[size:length],
            block_size=block_size,
            progress_timeout_s=request.progress_timeout_s,
            slice_s=SLICE_S,
            cancel_fd=cancel_fd,
            prefix_crc=tail,
            prefix_size=size % block_size,
        )
        size += got.size
        tail = got.tail_crc
        crcs = got.block_crcs
        if size == length and length % block_size:
            crcs.append(tail)
        report(got.size, blocks, crcs)
        blocks += len(crcs)
        if got.error:
            if got.error == errno.EFAULT:
                raise TransferError("the target cannot be written to: is its segment's file shorter than its mapping?")
            raise receive_error(got.error, size, length, request.progress_timeout_s)


def _crcs_of(data: bytes, block_size: int) -> tuple[list[int], int]:
    """CRCs of the complete blocks in `data`, and of the rest after them."""
    whole = len(data) // block_size * block_size
    crcs = [crc32c(data[i : i + block_size]) for i in range(0, whole, block_size)]
    return crcs, crc32c(data[whole:])


def _refusal(
    sock: socket.socket, http: h11.Connection, response: h11.Response, request: RangeRequest, cancel_fd: int
) -> TransferError | ObjectNotFoundError:
    """The error for a status that brings no range, with the line that says why."""
    body = bytearray()
    since = time.monotonic()
    try:
        while len(body) < _MAX_REFUSAL_BYTES:
            event = http.next_event()
            if isinstance(event, h11.Data):
                body += event.data
            elif event is h11.NEED_DATA:
                http.receive_data(_receive_some(sock, request.progress_timeout_s, cancel_fd, since))
            else:
                break
    except (OSError, TransferError, h11.RemoteProtocolError):
        pass  # the status says enough
    words = " ".join(body.decode("utf-8", "replace").split()) or response.reason.decode("latin-1")
    line = f"{response.status_code} {words[:_MAX_REASON_CHARS]}"
    if response.status_code in (401, 403):
        return TicketError(line)
    if response.status_code == 404:
        return ObjectNotFoundError(line)
    return TransferError(f"the bulk lane answered {line}")
