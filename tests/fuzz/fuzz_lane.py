"""What comes over the bulk lane, on either side, and packed objects."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

import h11
from fuzz_engine import Target

from replicator.errors import ObjectNotFoundError, TicketError, TransferError
from replicator.packs import MAX_PIECE_OBJECTS
from replicator.transfer import bulk_http, bulk_response, packed
from replicator.transfer.bulk_http import RefusedError
from replicator.transfer.bulk_request import RangeRequest, StaleConnectionError, perform

_TOKENS = (
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b": ",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"HTTP/1.0",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: " + b"9" * 5000 + b"\r\n",
    b"Content-Length: 18446744073709551616\r\n",
    b"Content-Range: bytes 0-99/1000\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"Range: bytes=-9999999999999999999\r\n",
    b"Range: bytes=0-1,2-3\r\n",
    b"Authorization: Bearer \xff\r\n",
    b"HEAD /v1/object HTTP/1.1\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"0",
    b"9",
)

_SIZE = 1000


def _read_requests(data: bytes) -> None:
    """All requests of one connection, received in two pieces, each answered with an empty object's head."""
    http = bulk_http.server_side()
    cut = len(data) // 3
    for piece in (data[:cut], data[cut:]):
        if not piece:
            continue  # to h11 it would be the end of the connection
        http.receive_data(piece)
        while True:
            request: h11.Request | None = None
            try:
                request = bulk_http.next_request(http)
                if request is None:
                    break
                asked = bulk_http.parse_request(request)
                part = bulk_http.parse_range(asked.range, _SIZE)
                offset, length = part or (0, _SIZE)
                assert 0 <= offset < offset + length <= _SIZE, part
                http.send(bulk_http.object_response(_SIZE, part))
                if not asked.is_head:
                    http.send(h11.Data(data=bytes(length)))
                http.send(h11.EndOfMessage())
            except EOFError:
                return
            except RefusedError as refused:
                # A refusal that cannot be put into words would leave the client without an answer.
                with contextlib.suppress(h11.LocalProtocolError):
                    bulk_response.refusal_bytes(http, refused, request)
                raise
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                return
            http.start_next_cycle()


def _request(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


_REQUESTS = [
    _request("GET /v1/object HTTP/1.1", "Host: a", "Authorization: Bearer abc_-1"),
    _request("GET /v1/object HTTP/1.1", "Host: a", "Authorization: Bearer abc", "Range: bytes=0-99"),
    _request("GET /v1/object HTTP/1.1", "Host: a", "Authorization: Bearer abc", "Range: bytes=-7")
    + _request("GET /v1/object HTTP/1.1", "Host: a", "Authorization: Bearer abc", "Range: bytes=900-"),
    _request(
        "HEAD /v1/object HTTP/1.1", "Host: a:1", "Authorization: bearer x", "Replicator-Object: job/step-1_ckpt@1.1/a"
    ),
]

_ASKED = RangeRequest("host", "ticket", "job/step-1_ckpt@1.1/a", 0, 100, 64, 5.0)
_BODY = bytes(range(100))
_RANGE = "bytes 0-99/1000"


def _read_response(data: bytes) -> None:
    """A whole exchange over a socket whose other end has said `data` and nothing more."""
    ours, theirs = socket.socketpair()
    never = os.eventfd(0)
    target = bytearray(b"\xa5" * 200)
    arrived: list[int] = []
    with ours, theirs:
        try:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            theirs.sendall(data, socket.MSG_DONTWAIT)
            theirs.shutdown(socket.SHUT_WR)
            perform(ours, _ASKED, memoryview(target)[:100], never, lambda size, *_: arrived.append(size), False)
        except StaleConnectionError:
            raise AssertionError("a new connection cannot be a stale one") from None
        finally:
            os.close(never)
    assert sum(arrived) == 100
    assert target[100:] == b"\xa5" * 100


def _response(body: bytes, *lines: str) -> bytes:
    return _request(*lines) + body


_RESPONSES = [
    _response(_BODY, "HTTP/1.1 206 Partial Content", f"Content-Range: {_RANGE}", "Content-Length: 100"),
    b"HTTP/1.1 100 Continue\r\n\r\n"
    + _response(_BODY, "HTTP/1.1 206 Partial Content", f"Content-Range: {_RANGE}", "Content-Length: 100"),
    _response(
        b"64\r\n" + _BODY + b"\r\n0\r\n\r\n",
        "HTTP/1.1 206 P",
        f"Content-Range: {_RANGE}",
        "Transfer-Encoding: chunked",
    ),
    _response(_BODY, "HTTP/1.0 206 P", f"Content-Range: {_RANGE}"),
    _response(b"no\n", "HTTP/1.1 404 Not Found", "Content-Length: 3", "Connection: close"),
    _response(b"2\r\nno\r\n0\r\n\r\n", "HTTP/1.1 401 Unauthorized", "Transfer-Encoding: chunked"),
    _response(b"busy", "HTTP/1.1 503 Service Unavailable"),
]


def _read_piece(data: bytes) -> None:
    payloads = packed.decode_piece(data)
    assert packed.encode_piece([None if one is None else bytes(one) for one in payloads]) == data


_PIECES = [
    packed.encode_piece(payloads)
    for payloads in ([], [b"a"], [None], [b"", b"abc", None, bytes(300)], [b"x"] * MAX_PIECE_OBJECTS)
]


def targets() -> list[Callable[[], Target]]:
    answers = (TransferError, TicketError, ObjectNotFoundError)
    return [
        lambda: Target("bulk-request", _REQUESTS, _read_requests, (RefusedError,), _TOKENS, cost=3),
        lambda: Target("bulk-response", _RESPONSES, _read_response, answers, _TOKENS, cost=6),
        lambda: Target("packed-piece", _PIECES, _read_piece, (TransferError,)),
    ]
