"""The bulk server against curl, against raw sockets, and against clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transfer_support import BLOCK, Peer, eventually, some_bytes

from replicator.errors import ConfigError, StoreError
from replicator.store.trailer import ObjectInfo
from replicator.transfer.bulk_server import BulkLimits, BulkServer

CURL = shutil.which("curl")
DATA = some_bytes(5 * BLOCK + 321)
Serve = Callable[..., Peer]


@pytest.fixture
def serve(shm_root: Path) -> Iterator[Serve]:
    """Starts the bulk server of a peer with the given limits, and stops it after the test."""
    peers: list[Peer] = []
    loop = asyncio.new_event_loop()

    async def make(limits: BulkLimits | None) -> Peer:
        return Peer("node-a", shm_root / f"root-{len(peers)}", limits)

    def start(limits: BulkLimits | None = None) -> Peer:
        peer = loop.run_until_complete(make(limits))
        peers.append(peer)
        peer.bulk.start()
        return peer

    yield start
    for peer in peers:
        peer.bulk.stop()
        loop.run_until_complete(peer.grpc.stop(None))
    loop.close()


@pytest.fixture
def peer(serve: Serve) -> Peer:
    return serve()


def url(peer: Peer) -> str:
    return "http://{}:{}/v1/object".format(*peer.bulk.address)


def ticket(peer: Peer, info: ObjectInfo) -> str:
    return peer.tickets.issue(info.object)[0]


def bearer(peer: Peer, info: ObjectInfo) -> str:
    return f"Authorization: Bearer {ticket(peer, info)}"


def curl(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    assert CURL is not None, "curl is needed: apt-get install curl"
    return subprocess.run([CURL, "-sS", "--max-time", "20", *arguments], capture_output=True, timeout=30)


def connect(peer: Peer) -> socket.socket:
    return socket.create_connection(peer.bulk.address, timeout=10)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def raw_request(peer: Peer, info: ObjectInfo, *headers: str) -> bytes:
    lines = ["GET /v1/object HTTP/1.1", "Host: x", bearer(peer, info), *headers, "", ""]
    return "\r\n".join(lines).encode()


# -- curl


@pytest.mark.parametrize("size", [0, 1, BLOCK, 5 * BLOCK + 321])
def test_curl_fetches_a_whole_object(peer: Peer, size: int) -> None:
    info = peer.add("object", DATA[:size])
    got = curl("--fail", "-H", bearer(peer, info), url(peer))
    assert got.returncode == 0, got.stderr
    assert got.stdout == DATA[:size]


@pytest.mark.parametrize(
    ("text", "part"), [("0-0", slice(0, 1)), ("70000-", slice(70000, None)), ("-7", slice(-7, None))]
)
def test_curl_fetches_a_range(peer: Peer, text: str, part: slice) -> None:
    info = peer.add("object", DATA)
    got = curl("--fail", "-i", "-r", text, "-H", bearer(peer, info), url(peer))
    head, _, body = got.stdout.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 206 ")
    assert body == DATA[part]


def test_curl_goes_on_with_a_partial_download(peer: Peer, tmp_path: Path) -> None:
    info = peer.add("object", DATA)
    partial = tmp_path / "object"
    partial.write_bytes(DATA[:100_000])
    got = curl("--fail", "-C", "-", "-o", str(partial), "-H", bearer(peer, info), url(peer))
    assert got.returncode == 0, got.stderr
    assert partial.read_bytes() == DATA


def test_curl_reuses_its_connection(peer: Peer) -> None:
    info = peer.add("object", DATA)
    got = curl("--fail", "-w", "%{num_connects} ", "-o", "/dev/null", "-o", "/dev/null", "-o", "/dev/null",
               "-H", bearer(peer, info), url(peer), url(peer), url(peer))  # fmt: skip
    assert got.stdout.split() == [b"1", b"0", b"0"]


@pytest.mark.parametrize("version", ["--http1.0", "--http1.1"])
def test_curl_asks_for_the_head(peer: Peer, version: str) -> None:
    info = peer.add("object", DATA)
    got = curl(version, "-I", "-H", bearer(peer, info), url(peer))
    lines = got.stdout.lower().split(b"\r\n")
    assert lines[0].startswith(b"http/1.1 200")
    assert f"content-length: {len(DATA)}".encode() in lines
    assert b"accept-ranges: bytes" in lines
    body = curl("--fail", version, "-H", bearer(peer, info), url(peer))
    assert body.stdout == DATA


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["-H", "Authorization: Bearer wrong"], "401", b"the ticket is unknown or has expired"),
        ([], "401", b"expected the header"),
        (["-X", "POST", "-H", "Authorization: Bearer x"], "405", b"expected GET or HEAD"),
        (["-d", "body", "-H", "Authorization: Bearer x"], "400", b"must not have a body"),
        (["-H", "X: " + "x" * 40_000], "431", b"not a valid HTTP/1.1 request"),
    ],
)
def test_curl_is_refused(peer: Peer, arguments: list[str], status: str, line: bytes) -> None:
    got = curl("-w", "\n%{http_code}", *arguments, url(peer))
    body, _, code = got.stdout.rpartition(b"\n")
    assert code.decode() == status
    assert line in body
    assert body.count(b"\n") == 1


def test_curl_learns_why_there_is_no_such_object_or_range(peer: Peer) -> None:
    info = peer.add("object", DATA)
    got = curl("-w", "\n%{http_code}", "-r", f"{len(DATA)}-", "-H", bearer(peer, info), url(peer))
    assert got.stdout.endswith(b"\n416")
    got = curl("-w", "\n%{http_code}", "-r", "0-1,5-6", "-H", bearer(peer, info), url(peer))
    assert got.stdout.endswith(b"\n400")
    got = curl("-w", "\n%{http_code}", "-H", bearer(peer, info), url(peer) + "/x")
    assert got.stdout.endswith(b"\n404")
    token = bearer(peer, info)
    peer.path(info).unlink()
    got = curl("-w", "\n%{http_code}", "-H", token, url(peer))
    assert b"does not hold" in got.stdout
    assert got.stdout.endswith(b"\n404")


def test_a_ticket_for_another_object(peer: Peer) -> None:
    one, other = peer.add("one", DATA), peer.add("other", DATA)
    for expected, status in ((one, b"403"), (other, b"200")):
        got = curl("-o", "/dev/null", "-w", "%{http_code}", "-H", bearer(peer, other),
                   "-H", f"Replicator-Object: {expected.object}", url(peer))  # fmt: skip
        assert got.stdout == status


# -- connections


def test_requests_sent_ahead_are_answered_in_order(peer: Peer) -> None:
    info = peer.add("object", DATA)
    with connect(peer) as sock:
        asked = [raw_request(peer, info, f"Range: bytes={begin}-{begin}") for begin in range(50)]
        sock.sendall(b"".join(asked))
        sock.shutdown(socket.SHUT_WR)
        answers = read_all(sock).split(b"HTTP/1.1 206 Partial Content")
    assert [answer[-1:] for answer in answers[1:]] == [DATA[i : i + 1] for i in range(50)]


def test_a_request_in_many_pieces(peer: Peer) -> None:
    info = peer.add("object", DATA)
    with connect(peer) as sock:
        for byte in raw_request(peer, info, "Connection: close"):
            sock.sendall(bytes([byte]))
        assert read_all(sock).endswith(b"\r\n\r\n" + DATA)


def test_refusals_keep_the_connection(peer: Peer) -> None:
    info = peer.add("object", DATA)
    with connect(peer) as sock:
        sock.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n" + raw_request(peer, info, "Connection: close"))
        answers = read_all(sock)
    assert answers.startswith(b"HTTP/1.1 404 ")
    assert answers.endswith(DATA)


def test_small_answers_do_not_wait_for_acknowledgements(serve: Serve) -> None:
    """F46: TCP_NODELAY on every connection of the server."""
    peer = serve()
    accepted: list[int] = []
    wait = peer.bulk._wait

    def look(connection) -> None:  # type: ignore[no-untyped-def]
        accepted.append(connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        wait(connection)

    peer.bulk._wait = look  # type: ignore[method-assign]
    info = peer.add("object", DATA)
    assert curl("--fail", "-H", bearer(peer, info), url(peer)).returncode == 0
    assert accepted
    assert all(accepted)


def test_garbage_is_answered_and_closed(peer: Peer) -> None:
    for garbage in (b"\x16\x03\x01\x00\xee\r\n\r\n", b"\0" * 5000, b"GET\r\n\r\n", b"\r\n" * 3000 + b"x\r\n\r\n"):
        with connect(peer) as sock:
            sock.sendall(garbage)
            assert read_all(sock).startswith(b"HTTP/1.1 4")
    info = peer.add("object", DATA)
    assert curl("--fail", "-H", bearer(peer, info), url(peer)).stdout == DATA


def test_a_client_that_vanishes_in_the_middle(peer: Peer) -> None:
    info = peer.add("object", some_bytes(1 << 20) * 32)
    for _ in range(5):
        with connect(peer) as sock:
            sock.sendall(raw_request(peer, info))
            sock.recv(1000)
    assert eventually(lambda: not peer.bulk._answering)
    assert curl("--fail", "-r", "0-9", "-H", bearer(peer, info), url(peer)).returncode == 0


# -- bounds


def test_a_head_that_does_not_end(serve: Serve) -> None:
    peer = serve(BulkLimits(head_s=0.3))
    with connect(peer) as sock:
        sock.sendall(b"GET /v1/object HTTP/1.1\r\n")
        begin = time.monotonic()
        assert read_all(sock).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - begin < 5


def test_slow_heads_take_no_thread(serve: Serve) -> None:
    """One thread answers; twenty clients that never end their request do not keep it from others."""
    peer = serve(BulkLimits(answers=1))
    info = peer.add("object", DATA)
    slow = [connect(peer) for _ in range(20)]
    for sock in slow:
        sock.sendall(b"GET /v1/object HTTP/1.1\r\n")
    assert curl("--fail", "-H", bearer(peer, info), url(peer)).stdout == DATA
    for sock in slow:
        sock.close()


def test_an_idle_connection_is_closed(serve: Serve) -> None:
    peer = serve(BulkLimits(idle_s=0.3))
    info = peer.add("object", DATA)
    with connect(peer) as sock:
        sock.sendall(raw_request(peer, info, "Range: bytes=0-0"))
        assert read_all(sock).startswith(b"HTTP/1.1 206 ")


def test_too_many_connections(serve: Serve) -> None:
    """Those that were answered before are kept, and one more is refused."""
    peer = serve(BulkLimits(connections=2))
    info = peer.add("object", DATA)
    first, second = connect(peer), connect(peer)
    for sock in (first, second):
        sock.sendall(raw_request(peer, info, "Range: bytes=0-0"))
        assert sock.recv(1000).startswith(b"HTTP/1.1 206 ")
    with connect(peer) as third:
        assert read_all(third).startswith(b"HTTP/1.1 503 ")
    for sock in (first, second):
        sock.sendall(raw_request(peer, info, "Connection: close"))
        assert read_all(sock).endswith(DATA)
        sock.close()


def test_connections_that_are_opened_and_left_keep_nobody_out(serve: Serve) -> None:
    """F20: the oldest of them makes way, whether it sent nothing or the beginning of a request."""
    peer = serve(BulkLimits(connections=3))
    info = peer.add("object", DATA)
    kept = connect(peer)
    kept.sendall(raw_request(peer, info, "Range: bytes=0-0"))
    assert kept.recv(1000).startswith(b"HTTP/1.1 206 ")
    left = []
    for _ in range(20):
        left.append(connect(peer))
        left[-1].sendall(b"GET /v1/object HTTP/1.1\r\n")
    assert curl("--fail", "-H", bearer(peer, info), url(peer)).stdout == DATA
    with contextlib.suppress(ConnectionResetError):  # what it sent may not have been read
        assert read_all(left[0]) == b""
    kept.sendall(raw_request(peer, info, "Connection: close"))
    assert read_all(kept).endswith(DATA)
    for sock in (kept, *left):
        sock.close()


def test_a_reader_that_takes_nothing_is_given_up(serve: Serve) -> None:
    """It holds a thread and the object's lock no longer than the deadline."""
    peer = serve(BulkLimits(send_s=0.4, answers=1))
    info = peer.add("object", some_bytes(1 << 20) * 64)
    with connect(peer) as stuck:
        stuck.sendall(raw_request(peer, info))
        stuck.recv(100)
        got = curl("--fail", "-r", "0-9", "-H", bearer(peer, info), url(peer))
        assert got.returncode == 0, got.stderr


def test_waiting_for_a_thread_has_an_end(serve: Serve) -> None:
    peer = serve(BulkLimits(send_s=60, answers=1, queue_s=0.3))
    info = peer.add("object", some_bytes(1 << 20) * 64)
    with connect(peer) as stuck:
        stuck.sendall(raw_request(peer, info))
        stuck.recv(100)
        got = curl("-w", "\n%{http_code}", "-H", bearer(peer, info), url(peer))
        assert got.stdout.endswith(b"\n503")
        assert b"are taken" in got.stdout


def test_a_slow_reader_is_not_given_up(serve: Serve) -> None:
    """F47: so slow that the server's send buffer frees no room for several deadlines, but never without progress."""
    peer = serve(BulkLimits(send_s=0.6))
    data = some_bytes(1 << 20) * 24
    info = peer.add("object", data)
    with connect(peer) as sock:
        sock.sendall(raw_request(peer, info, "Connection: close"))
        received = bytearray()
        begin = time.monotonic()
        while piece := sock.recv(16 << 10 if time.monotonic() - begin < 3 else 1 << 20):
            received += piece
            if time.monotonic() - begin < 3:
                time.sleep(0.05)
    assert received.endswith(data)
    assert time.monotonic() - begin > 2


# -- the object while it is served, and the end


def is_locked(peer: Peer, info: ObjectInfo) -> bool:
    """Whether the recycler would leave the object alone."""
    fd = os.open(peer.path(info), os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_the_lock_is_held_until_the_client_has_read(peer: Peer, connection: str) -> None:
    """The tenth promise: sent bytes are the object's own memory until they are read; nothing copies them before."""
    info = peer.add("object", some_bytes(64 << 10))
    other = peer.add("other", b"x")
    with connect(peer) as sock:
        sock.sendall(raw_request(peer, info, f"Connection: {connection}"))
        arrived = len(sock.recv(1 << 20, socket.MSG_PEEK))
        while arrived < info.size:
            arrived = len(sock.recv(arrived + 1, socket.MSG_PEEK | socket.MSG_WAITALL))
        with connect(peer) as second:
            second.sendall(raw_request(peer, other, "Connection: close"))
            assert read_all(second).endswith(b"x")
        assert is_locked(peer, info)
        if connection == "keep-alive":
            sock.sendall(raw_request(peer, other, "Connection: close"))
        assert len(read_all(sock)) > info.size
    assert eventually(lambda: not is_locked(peer, info))


def test_the_lock_is_held_while_serving(peer: Peer) -> None:
    """Decision 11: the recycler cannot take the object's memory from under the send."""
    info = peer.add("object", some_bytes(1 << 20) * 64)

    with connect(peer) as sock:
        sock.sendall(raw_request(peer, info, "Connection: close"))
        assert sock.recv(1000)
        assert is_locked(peer, info)
        received = sum(len(piece) for piece in iter(lambda: sock.recv(1 << 20), b""))
        assert received > info.size - 1000
    assert eventually(lambda: not is_locked(peer, info))


def test_an_object_that_cannot_be_opened(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def fail(ticket: str) -> None:
        raise StoreError("the store is on fire")

    peer = serve()
    peer.bulk._open_object = fail  # type: ignore[assignment]
    got = curl("-w", "\n%{http_code}", "-H", "Authorization: Bearer x", url(peer))
    assert got.stdout == b"the store is on fire\n\n500"
    assert "on fire" in caplog.text


def test_stop_cuts_short_what_is_under_way(peer: Peer) -> None:
    info = peer.add("object", some_bytes(1 << 20) * 64)
    idle, busy = connect(peer), connect(peer)
    busy.sendall(raw_request(peer, info))
    assert busy.recv(100)
    threads = threading.active_count()
    begin = time.monotonic()
    peer.bulk.stop()
    assert time.monotonic() - begin < 3
    assert read_all(idle) == b""
    received = 0
    try:
        while piece := busy.recv(1 << 20):
            received += len(piece)
    except ConnectionResetError:
        pass
    assert received < info.size
    assert eventually(lambda: threading.active_count() < threads)
    with pytest.raises(ConnectionRefusedError):
        connect(peer)
    peer.bulk.stop()


def test_a_server_that_fails_refuses_connections(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F15: who is accepted by the kernel and never answered would wait for his deadline, instead of using gRPC."""
    peer = serve()

    def out_of_memory() -> None:
        raise MemoryError("for this test")

    monkeypatch.setattr(peer.bulk, "_accept", out_of_memory)
    with socket.create_connection(peer.bulk.address, 5) as accepted, contextlib.suppress(ConnectionResetError):
        assert accepted.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(peer.bulk.address, 5)
    assert "served over gRPC only" in caplog.text


def test_a_port_that_is_taken(peer: Peer) -> None:
    """F35: bind and publish; a port in use is a clear error and never shared."""
    host, port = peer.bulk.address
    other = BulkServer(host, port, peer.open_by_ticket)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}.*bulk_port"):
        other.start()
    other.stop()


def test_the_port_is_free_again_at_once(serve: Serve) -> None:
    """F45: also while old connections linger."""
    peer = serve()
    info = peer.add("object", DATA)
    host, port = peer.bulk.address
    with connect(peer) as sock:
        sock.sendall(raw_request(peer, info))
        sock.recv(100)
        peer.bulk.stop()
        again = BulkServer(host, port, peer.open_by_ticket)
        again.start()
        try:
            assert again.address == (host, port)
        finally:
            again.stop()


def test_an_unknown_congestion_control() -> None:
    with pytest.raises(ConfigError, match="no-such-algorithm"):
        BulkServer("127.0.0.1", 0, lambda ticket: None, congestion="no-such-algorithm")  # type: ignore[arg-type, return-value]


def test_connections_have_the_congestion_control_from_the_start(peer: Peer) -> None:
    """One that began with bbr would stay paced: the listener has it, and what it accepts."""
    server = BulkServer("127.0.0.1", 0, peer.open_by_ticket, congestion="reno")
    server.start()
    try:
        with socket.create_connection(server.address):
            deadline = time.monotonic() + 5
            while not server._waiting:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            (accepted,) = server._waiting
            assert server._listener is not None
            for sock in (server._listener, accepted.sock):
                name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert name.rstrip(b"\0") == b"reno"
    finally:
        server.stop()
