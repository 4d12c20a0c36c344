"""Answering one bulk-lane request on a blocking socket: the head from here, the bytes straight from the file.

The socket has a send timeout (`set_send_timeout`), so the kernel ends a send that makes no progress, and one
`sendfile` can carry gigabytes without this process doing anything, its GIL included.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack

import h11

from replicator.errors import NotFoundError, ReplicatorError, TicketError, TransferError, TransferStalledError
from replicator.faultpoints import reach
from replicator.transfer import bulk_http
from replicator.transfer.bulk_http import ObjectRequest, RefusedError
from replicator.transfer.lane import ServedObject

OpenObject = Callable[[str], ServedObject]
"""Gives the object that a ticket is for. Raises TicketError or ObjectNotFoundError."""

# The most that Linux sends in one call.
_MAX_SENDFILE = 0x7FFFF000

log = logging.getLogger(__name__)


def set_send_timeout(sock: socket.socket, seconds: float) -> None:
    """Sends give up when they make no progress for about `seconds`. Two waits in a row must fail for that."""
    half = seconds / 2
    whole, micro = int(half), int(half % 1 * 1e6)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, max(micro, 0 if whole else 1)))


def answer(
    sock: socket.socket, http: h11.Connection, request: h11.Request, open_object: OpenObject, held: ExitStack
) -> bool:
    """Answer one request. True when the connection can take another one; False when it must be closed.

    An object whose bytes were sent stays open in `held`: what is on its way still lies in the object's own memory
    (`sendfile` copies nothing), which must not be recycled before the client has read it.
    """
    try:
        try:
            _answer_object(sock, http, bulk_http.parse_request(request), open_object, held)
        except (RefusedError, ReplicatorError, OSError) as error:
            if http.our_state is not h11.SEND_RESPONSE:
                raise
            sock.sendall(refusal_bytes(http, _refusal_for(error), request))
    except (ReplicatorError, OSError) as error:
        log.info("bulk lane: an answer was cut short: %s", error)
        return False
    if http.our_state is h11.DONE and http.their_state is h11.DONE:
        http.start_next_cycle()
        return True
    return False


def _refusal_for(error: Exception) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, TicketError):
        return bulk_http.unauthorized(str(error))
    if isinstance(error, NotFoundError):
        return RefusedError(404, str(error))
    log.warning("bulk lane: an object could not be opened: %s", error)
    return RefusedError(500, str(error))


def _answer_object(
    sock: socket.socket, http: h11.Connection, request: ObjectRequest, open_object: OpenObject, held: ExitStack
) -> None:
    with ExitStack() as opened:
        served = opened.enter_context(open_object(request.ticket))
        size = served.info.size
        found = str(served.info.object)
        if request.expected_object and request.expected_object != found:
            raise RefusedError(403, f"the ticket is for {found}, not for {request.expected_object[:400]!r}")
        part = bulk_http.parse_range(request.range, size)
        offset, length = part or (0, size)
        head = http.send(bulk_http.object_response(size, part))
        assert head is not None
        if request.is_head or length == 0:
            sock.sendall(head)
        else:
            held.push(opened.pop_all())
            sock.sendall(head, socket.MSG_MORE)
            http.send_with_data_passthrough(h11.Data(data=_FilePart(length)))  # type: ignore[arg-type]
            send_file(sock, served.fd, offset, length)
        http.send(h11.EndOfMessage())


class _FilePart:
    """Bytes that h11 only counts; they are sent without it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def refusal_bytes(http: h11.Connection, refused: RefusedError, request: h11.Request | None) -> bytes:
    """The whole answer to a request that gets no object, or (None) to something that is no request."""
    response, body = bulk_http.refusal_response(refused)
    parts = [http.send(response)]
    if request is None or request.method != b"HEAD":
        parts.append(http.send(h11.Data(data=body)))
    parts.append(http.send(h11.EndOfMessage()))
    return b"".join(part or b"" for part in parts)


def send_file(sock: socket.socket, fd: int, offset: int, length: int) -> None:
    """Send `length` bytes of a file from `offset` on, over a blocking socket that has a send timeout.

    Raises:
        TransferStalledError: the other side took nothing for that long.
        TransferError: the file ends before.
        OSError: the connection broke.
    """
    end = offset + length
    waited_before = False
    while offset < end:
        try:
            count = os.sendfile(sock.fileno(), fd, offset, min(end - offset, _MAX_SENDFILE))
        except BlockingIOError:
            # The kernel wakes a sender only when much room is free; a slow reader may have made a little (F47).
            if waited_before:
                raise TransferStalledError(f"the client took nothing, with {end - offset} bytes to go") from None
            waited_before = True
            continue
        if count == 0:
            raise TransferError(f"the file of a sealed object ends at {offset}, {end - offset} bytes too early")
        offset += count
        waited_before = False
        reach("pull.serving")
