"""The bulk lane's requests and answers as text."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.transfer.bulk_http import (
    RefusedError,
    content_range,
    next_request,
    object_response,
    parse_range,
    parse_request,
    range_request,
    refusal_response,
    server_side,
)

BIG = 5 << 32


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("", 10, None),
        ("items=1-2", 10, None),
        ("bytes=0-0", 10, (0, 1)),
        ("bytes=0-9", 10, (0, 10)),
        ("bytes=0-10", 10, (0, 10)),
        ("bytes=3-", 10, (3, 7)),
        ("bytes=9-", 10, (9, 1)),
        ("bytes=-1", 10, (9, 1)),
        ("bytes=-11", 10, (0, 10)),
        (f"bytes={BIG - 1}-{BIG - 1}", BIG, (BIG - 1, 1)),
        (f"bytes=-{BIG}", BIG, (0, BIG)),
        ("bytes=0-9999999999999999999", 10, (0, 10)),
    ],
)
def test_range(text: str, size: int, expected: tuple[int, int] | None) -> None:
    """F29: numbers of more than 32 bits."""
    assert parse_range(text, size) == expected


@pytest.mark.parametrize(
    ("text", "size", "status"),
    [
        ("bytes=10-", 10, 416),
        ("bytes=10-12", 10, 416),
        ("bytes=0-", 0, 416),
        ("bytes=-0", 10, 416),
        ("bytes=-5", 0, 416),
        ("bytes=5-4", 10, 400),
        ("bytes=", 10, 400),
        ("bytes=-", 10, 400),
        ("bytes=a-b", 10, 400),
        ("bytes=0-1,3-4", 10, 400),
        ("bytes=--1", 10, 400),
        ("bytes=1-2x", 10, 400),
        ("bytes=99999999999999999999-", 10, 400),
        ("bytes=\u0660-\u0669", 10, 400),
    ],
)
def test_bad_range(text: str, size: int, status: int) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_range(text, size)
    assert caught.value.status == status
    if status == 416:
        assert ("Content-Range", f"bytes */{size}") in caught.value.headers


@given(st.text(max_size=40), st.integers(0, 1000))
def test_any_range_is_inside_the_object_or_refused(text: str, size: int) -> None:
    try:
        part = parse_range(f"bytes={text}", size)
    except RefusedError:
        return
    assert part is not None
    offset, length = part
    assert 0 <= offset < offset + length <= size


@given(st.integers(0, 2**62), st.integers(1, 2**62))
def test_the_client_reads_what_the_server_writes(offset: int, length: int) -> None:
    size = offset + length
    request = range_request("host:1", "ticket", "object", offset, length)
    http = server_side()
    client = h11.Connection(h11.CLIENT)
    http.receive_data((client.send(request) or b"") + (client.send(h11.EndOfMessage()) or b""))
    received = next_request(http)
    assert received is not None
    parsed = parse_request(received)
    assert (parsed.ticket, parsed.expected_object, parsed.is_head) == ("ticket", "object", False)
    assert parse_range(parsed.range, size) == (offset, length)
    assert content_range(object_response(size, (offset, length))) == (offset, length)


def request_of(data: bytes) -> h11.Request | None:
    http = server_side()
    http.receive_data(data)
    return next_request(http)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /v1/object\r\n\r\n", 400),
        (b"GET /v1/object HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/object HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"GET /v1/object HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /v1/object HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20000, 431),
    ],
)
def test_not_a_request(data: bytes, status: int) -> None:
    with pytest.raises(RefusedError) as caught:
        request_of(data)
    assert caught.value.status == status


def test_half_a_request_is_awaited() -> None:
    assert request_of(b"GET /v1/object HTTP/1.1\r\nHost: a\r\n") is None


def test_end_of_connection() -> None:
    with pytest.raises(EOFError):
        request_of(b"")


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        (b"GET /other", b"Authorization: Bearer x", 404),
        (b"GET /v1/object/../x", b"Authorization: Bearer x", 404),
        (b"POST /v1/object", b"Authorization: Bearer x", 405),
        (b"GET /v1/object", b"X: y", 401),
        (b"GET /v1/object", b"Authorization: Bearer", 401),
        (b"GET /v1/object", b"Authorization: Bearer  ", 401),
        (b"GET /v1/object", b"Authorization: Basic eDp5", 401),
    ],
)
def test_refused(line: bytes, headers: bytes, status: int) -> None:
    request = request_of(line + b" HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n\r\n")
    assert request is not None
    with pytest.raises(RefusedError) as caught:
        parse_request(request)
    assert caught.value.status == status
    _, body = refusal_response(caught.value)
    assert body.count(b"\n") == 1


def test_a_refusal_is_one_line_whatever_it_says() -> None:
    response, body = refusal_response(RefusedError(404, "a\r\nb\nc"))
    assert body == b"a b c\n"
    assert response.status_code == 404
