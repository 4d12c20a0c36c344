"""What the bulk lane speaks: one kind of HTTP/1.1 request, and the few answers to it. Pure; no sockets.

GET /v1/object HTTP/1.1
Authorization: Bearer <ticket>
Range: bytes=0-1048575                     (optional; one range)
Replicator-Object: <object version>        (optional; refused when the ticket is for another one)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate

import h11

PATH = "/v1/object"
OBJECT_HEADER = "Replicator-Object"
MAX_HEAD_BYTES = 16 << 10

_RANGE = re.compile(r"bytes\s*=\s*(?:(?P<first>[0-9]{1,19})-(?P<last>[0-9]{0,19})|-(?P<suffix>[0-9]{1,19}))", re.ASCII)
_CONTENT_RANGE = re.compile(rb"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_REASONS = {
    200: b"OK",
    206: b"Partial Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    416: b"Range Not Satisfiable",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}

Headers = list[tuple[str, str]]


class RefusedError(Exception):
    """A request that gets no object.

    Args:
        status: of the answer.
        line: its body, one line for the person who reads it.
        headers: beside the usual ones.
    """

    def __init__(self, status: int, line: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(line)
        self.status = status
        self.line = line
        self.headers = tuple(headers)


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """A well-formed request for an object."""

    ticket: str
    expected_object: str
    """As in the Replicator-Object header; empty when the client did not say."""
    range: str
    """The Range header of a GET; empty for the whole object."""
    is_head: bool


def server_side() -> h11.Connection:
    """The state of one connection, for the server."""
    return h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)


def next_request(http: h11.Connection) -> h11.Request | None:
    """The next complete request among the bytes that `http` was given; None while more are needed.

    Raises:
        RefusedError: these bytes are no request; the connection can only be answered and closed.
        EOFError: the client closed the connection.
    """
    try:
        event = http.next_event()
        if event is h11.NEED_DATA:
            return None
        if isinstance(event, h11.ConnectionClosed):
            raise EOFError
        if isinstance(event, h11.Request):
            if isinstance(http.next_event(), h11.EndOfMessage):
                return event
            raise RefusedError(400, "a request must not have a body")
    except h11.RemoteProtocolError as error:
        status = error.error_status_hint
        raise RefusedError(
            status if status in _REASONS else 400, f"not a valid HTTP/1.1 request: {str(error)[:200]}"
        ) from None
    raise RefusedError(400, f"expected a request, found {event!r}")


def parse_request(request: h11.Request) -> ObjectRequest:
    """Check the parts of a request.

    Raises:
        RefusedError: with the status and the line to answer.
    """
    method, target = request.method.decode("ascii", "replace"), request.target.decode("ascii", "replace")
    if target != PATH:
        raise RefusedError(404, f"expected {PATH}, found {target[:80]!r}")
    if method not in ("GET", "HEAD"):
        raise RefusedError(405, f"expected GET or HEAD, found {method[:20]!r}", [("Allow", "GET, HEAD")])
    headers = {name.lower(): value.decode("latin-1") for name, value in request.headers}
    ticket = ticket_of(request)
    if not ticket:
        raise unauthorized("expected the header 'Authorization: Bearer <ticket>'")
    is_head = method == "HEAD"
    wanted = "" if is_head else headers.get(b"range", "").strip()
    return ObjectRequest(ticket, headers.get(OBJECT_HEADER.lower().encode(), ""), wanted, is_head)


def ticket_of(request: h11.Request) -> str:
    """The ticket that a request shows; empty when it shows none."""
    value = next((value for name, value in reversed(request.headers) if name == b"authorization"), b"")
    scheme, _, ticket = value.decode("latin-1").partition(" ")
    return ticket.strip() if scheme.lower() == "bearer" else ""


def unauthorized(line: str) -> RefusedError:
    """The answer to a ticket that is missing or not known."""
    return RefusedError(401, line, [("WWW-Authenticate", "Bearer")])


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """(offset, length) of a Range header for an object of `size` bytes; None: the whole object is wanted.

    Raises:
        RefusedError: it is malformed, has several ranges, or lies outside the object.
    """
    if not text or not re.match(r"bytes\s*=", text):
        return None  # of a unit that we do not know, which is to be ignored
    match = _RANGE.fullmatch(text)
    if match is None:
        raise RefusedError(400, f"expected one range like 'bytes=0-1048575', found {text[:80]!r}")
    if match["suffix"] is not None:
        length = min(int(match["suffix"]), size)
        offset = size - length
    else:
        offset = int(match["first"])
        last = min(int(match["last"] or size - 1), size - 1)
        if match["last"] and int(match["last"]) < offset:
            raise RefusedError(400, f"expected a range that does not end before it begins, found {text[:80]!r}")
        length = last - offset + 1
    if length <= 0:
        raise RefusedError(
            416, f"the object has {size} bytes, found {text[:80]!r}", [("Content-Range", f"bytes */{size}")]
        )
    return offset, length


def object_response(size: int, part: tuple[int, int] | None) -> h11.Response:
    """The head of the answer that carries the whole object (part None) or (offset, length) of it."""
    headers = [("Content-Type", "application/octet-stream"), ("Accept-Ranges", "bytes"), ("Cache-Control", "no-store")]
    if part is None:
        return _response(200, [*headers, ("Content-Length", str(size))])
    offset, length = part
    headers.append(("Content-Range", f"bytes {offset}-{offset + length - 1}/{size}"))
    return _response(206, [*headers, ("Content-Length", str(length))])


def refusal_response(refused: RefusedError) -> tuple[h11.Response, bytes]:
    """Head and body of the answer to a request that gets no object."""
    body = (" ".join(refused.line.split()) + "\n").encode("utf-8", "replace")
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *refused.headers]
    return _response(refused.status, headers), body


def _response(status: int, headers: Headers) -> h11.Response:
    return h11.Response(
        status_code=status, reason=_REASONS[status], headers=[("Date", formatdate(usegmt=True)), *headers]
    )


def range_request(host: str, ticket: str, object_text: str, offset: int, length: int) -> h11.Request:
    """The client's request for `length` bytes from `offset` on."""
    return h11.Request(
        method="GET",
        target=PATH,
        headers=[
            ("Host", host),
            ("Authorization", f"Bearer {ticket}"),
            ("Range", f"bytes={offset}-{offset + length - 1}"),
            (OBJECT_HEADER, object_text),
        ],
    )


def content_length(response: h11.Response) -> int | None:
    """Bytes of the body, which follows the head as it is; None when it is chunked, or ends with the connection."""
    headers = dict(response.headers)
    if b"transfer-encoding" in headers or b"content-length" not in headers:
        return None
    return int(headers[b"content-length"])


def content_range(response: h11.Response) -> tuple[int, int] | None:
    """(offset, length) that a 206 response says it carries; None when it does not say."""
    for name, value in response.headers:
        if name == b"content-range":
            match = _CONTENT_RANGE.fullmatch(value)
            if match is not None:
                return int(match[1]), int(match[2]) - int(match[1]) + 1
    return None
