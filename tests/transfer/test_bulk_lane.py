"""What only the bulk lane does: tickets, kept connections, and servers that do not speak HTTP as they should."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_support import BLOCK, Peer, eventually, fetch, node_address, open_lanes, policy_for, some_bytes

from replicator.errors import (
    ConfigError,
    ObjectNotFoundError,
    PeerUnavailableError,
    TicketError,
    TransferError,
    TransferStalledError,
)
from replicator.store.trailer import ObjectInfo
from replicator.transfer.bulk_lane import BulkLane, cut
from replicator.transfer.lane import Lane, Source
from replicator.transfer.pull import PullReport, PullSource, pull
from replicator.transfer.turns import PullPolicy

Lanes = dict[str, Lane]
MakePeer = Callable[[str], Awaitable[Peer]]
DATA = some_bytes(3 * BLOCK + 5)


async def pull_all(lanes: Lanes, sources: list[PullSource], info: ObjectInfo, policy: PullPolicy) -> PullReport:
    target = bytearray(info.size)
    report = await pull(info, sources, memoryview(target), lanes=lanes, policy=policy)
    assert target == DATA
    return report


@pytest.fixture
def lane(lanes: Lanes) -> BulkLane:
    bulk = lanes["bulk"]
    assert isinstance(bulk, BulkLane)
    return bulk


# -- tickets


async def test_unknown_ticket(lane: BulkLane, peer: Peer) -> None:
    info = peer.add("object", DATA)
    source = Source(peer.node, peer.bulk_address, "guess")
    with pytest.raises(TicketError, match=r"node-a .*401 the ticket is unknown"):
        await fetch(lane, source, info)


async def test_ticket_for_another_object(lane: BulkLane, peer: Peer) -> None:
    info, other = peer.add("object", DATA), peer.add("other", DATA)
    with pytest.raises(TicketError, match=r"403 the ticket is for .*/other, not for .*/object"):
        await fetch(lane, peer.source(other.object), info)


async def test_expired_ticket_is_asked_for_anew(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", DATA)
    opened: list[str] = []

    async def open_it() -> Source:
        source = peer.source(info.object)
        opened.append(source.ticket)
        if len(opened) == 1:
            # As if it had been unused for longer than it lives.
            peer.tickets._tickets[source.ticket].expires = 0
            peer.tickets._tickets.move_to_end(source.ticket, last=False)
        return source

    report = await pull_all(lanes, [PullSource("node-a", open_it)], info, policy_for("bulk"))
    assert len(opened) == 2
    assert report.failures == ()


async def test_ticket_that_is_never_accepted(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", DATA)
    opened = 0

    async def open_it() -> Source:
        nonlocal opened
        opened += 1
        return Source(peer.node, peer.bulk_address, "guess")

    with pytest.raises(TransferError, match="401"):
        await pull_all(lanes, [PullSource("node-a", open_it)], info, PullPolicy(lane="bulk", backoff_s=0.01))
    assert opened == PullPolicy().attempts


@pytest.mark.parametrize("ticket", ["x\r\nX-Injected: y", "x\ny", "\0", "\u00e9\u4e2d"])
async def test_a_ticket_that_is_more_than_a_ticket(lane: BulkLane, peer: Peer, ticket: str) -> None:
    """F37: what a peer gave as a ticket cannot become another header or request."""
    info = peer.add("object", DATA)
    with pytest.raises(TicketError, match=r"node-a .*the ticket is not one"):
        await fetch(lane, Source(peer.node, peer.bulk_address, ticket), info)
    assert peer.asked == []


# -- auto


async def test_auto_takes_bulk_when_it_is_offered(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", DATA)
    report = await pull_all(lanes, [peer.pull_source(info)], info, policy_for("auto"))
    assert [part.lane for part in report.parts] == ["bulk"]


async def test_auto_takes_grpc_when_there_is_no_bulk_lane(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", DATA)

    async def open_it() -> Source:
        return Source(peer.node)

    report = await pull_all(lanes, [PullSource("node-a", open_it)], info, policy_for("auto"))
    assert [part.lane for part in report.parts] == ["grpc"]
    with pytest.raises(TransferError, match="offers no bulk lane"):
        await pull_all(lanes, [PullSource("node-a", open_it)], info, policy_for("bulk"))


async def test_auto_falls_back_when_the_bulk_port_is_closed(lanes: Lanes, peer: Peer) -> None:
    """Only the gRPC port is open, as behind a firewall."""
    info = peer.add("object", DATA)
    peer.bulk.stop()
    report = await pull_all(lanes, [peer.pull_source(info)], info, policy_for("auto"))
    assert [part.lane for part in report.parts] == ["grpc"]
    with pytest.raises(TransferError, match=r"node node-a \(bulk lane.*cannot be reached"):
        await pull_all(lanes, [peer.pull_source(info)], info, policy_for("bulk"))


# -- connections


def accepted(peer: Peer) -> list[int]:
    """Counts the connections that the server accepts from now on."""
    seen: list[int] = []
    accept = peer.bulk._accept

    def counted() -> None:
        seen.append(1)
        accept()

    peer.bulk._accept = counted  # type: ignore[method-assign]
    return seen


async def test_connections_are_kept_and_few(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", DATA)
    seen = accepted(peer)
    for _ in range(10):
        await pull_all(lanes, [peer.pull_source(info)], info, policy_for("bulk"))
    assert len(seen) == 1
    await asyncio.gather(*(pull_all(lanes, [peer.pull_source(info)], info, policy_for("bulk")) for _ in range(30)))
    assert len(seen) <= 2


async def test_refused_connections_are_not_kept(lane: BulkLane, peer: Peer) -> None:
    """F45: a connection over which anything went wrong is never used again, nor others to the same peer."""
    info = peer.add("object", DATA)
    large = peer.add("large", some_bytes(1 << 20) * 16)
    await fetch(lane, peer.source(large.object), large)
    (state,) = lane._peers.values()
    assert len(state.idle) == 2
    with pytest.raises(TicketError):
        await fetch(lane, Source(peer.node, peer.bulk_address, "guess"), info)
    assert all(not one.idle for one in lane._peers.values())
    assert await fetch(lane, peer.source(info.object), info) == DATA


async def test_no_nagle_and_a_noticed_death(lane: BulkLane, peer: Peer) -> None:
    """F46, and half-open connections: options of the client's sockets."""
    info = peer.add("object", DATA)
    await fetch(lane, peer.source(info.object), info, timeout_s=7.0)
    (state,) = lane._peers.values()
    sock = state.idle[0].sock
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


async def test_connections_that_grew_old_are_closed(
    lane: BulkLane, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = peer.add("object", DATA)
    seen = accepted(peer)
    await fetch(lane, peer.source(info.object), info)
    monkeypatch.setattr("replicator.transfer.bulk_lane.MAX_IDLE_S", -1.0)
    assert await fetch(lane, peer.source(info.object), info) == DATA
    assert len(seen) == 2
    assert not lane._peers


async def test_a_name_is_resolved(lane: BulkLane, peer: Peer) -> None:
    """F34: a host name instead of an address."""
    info = peer.add("object", DATA)
    source = peer.source(info.object)
    port = source.bulk_address.rpartition(":")[2]
    assert await fetch(lane, Source(source.node, f"localhost:{port}", source.ticket), info) == DATA
    with pytest.raises(PeerUnavailableError, match="cannot be reached"):
        await fetch(lane, Source(source.node, "no-such-host.invalid:1", source.ticket), info)
    with pytest.raises(PeerUnavailableError, match="expected an address"):
        await fetch(lane, Source(source.node, "no port", source.ticket), info)


async def test_no_connection_in_time(peer: Peer) -> None:
    """A queue of connections that is full drops new ones silently, as a firewall does."""
    info = peer.add("object", DATA)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = full.getsockname()
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(address)
        async with open_lanes(connect_timeout_s=0.3) as lanes:
            source = Source(peer.node, "{}:{}".format(*address), "ticket")
            with pytest.raises(PeerUnavailableError, match=r"no connection within 0\.3 s"):
                await fetch(lanes["bulk"], source, info)


async def test_congestion_control(peer: Peer) -> None:
    with pytest.raises(ConfigError, match="no-such-algorithm"):
        BulkLane(congestion="no-such-algorithm")
    info = peer.add("object", DATA)
    lane = BulkLane(congestion="reno")
    try:
        await fetch(lane, peer.source(info.object), info)
        (state,) = lane._peers.values()
        name = state.idle[0].sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"reno"
    finally:
        await lane.close()


async def test_close_ends_threads_and_connections(peer: Peer) -> None:
    info = peer.add("object", DATA)

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("replicator-bulk-lane")]

    lane = BulkLane()
    await fetch(lane, peer.source(info.object), info)
    (state,) = lane._peers.values()
    sock = state.idle[0].sock
    assert threads()
    await lane.close()
    assert sock.fileno() == -1
    assert await asyncio.to_thread(eventually, lambda: not threads())


async def test_a_cancelled_fetch_waits_for_its_thread(
    lane: BulkLane, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the thread takes to notice, and however often the task is cancelled: it may still write."""
    info = peer.add("object", DATA)
    running, ended = threading.Event(), threading.Event()

    def slow_to_notice(*arguments: object) -> bool:
        cancel_fd = arguments[3]
        assert isinstance(cancel_fd, int)
        running.set()
        cancelled = select.poll()
        cancelled.register(cancel_fd, select.POLLIN)
        cancelled.poll(10_000)
        time.sleep(0.3)
        ended.set()
        return True

    monkeypatch.setattr("replicator.transfer.bulk_lane.perform", slow_to_notice)
    fetching = asyncio.ensure_future(fetch(lane, peer.source(info.object), info))
    assert await asyncio.to_thread(running.wait, 5)
    for _ in range(3):
        fetching.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert ended.is_set()
    assert not any(state.idle for state in lane._peers.values())


@given(st.integers(0, 200 << 20), st.sampled_from([4096, 1 << 20, 4 << 20, 64 << 20]), st.integers(1, 8))
def test_pieces_cover_the_range(length: int, block_size: int, most: int) -> None:
    pieces = cut(length, block_size, most)
    assert len(pieces) <= most
    assert sum(size for _, size in pieces) == length
    expected = 0
    for begin, size in pieces:
        assert begin == expected
        assert begin % block_size == 0
        assert size > 0
        expected += size


# -- servers that do not do as they should


class Scripted:
    """Answers each request on each connection with the next of the given byte strings, then closes."""

    def __init__(self, *answers: bytes, pause_s: float = 0.0) -> None:
        self._answers = list(answers)
        self._pause_s = pause_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.requests = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                while self._answers and self._read_request(sock):
                    answer = self._answers.pop(0)
                    if not self._pause_s:
                        sock.sendall(answer)
                        if not answer:
                            break
                    for byte in answer if self._pause_s else b"":
                        sock.sendall(bytes([byte]))
                        time.sleep(self._pause_s)

    def _read_request(self, sock: socket.socket) -> bool:
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            piece = sock.recv(4096)
            if not piece:
                return False
            data += piece
        self.requests += 1
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)

    @property
    def source(self) -> Source:
        return Source(node_address("liar", self.address), self.address, "ticket")


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    made: list[Scripted] = []

    def make(*answers: bytes, pause_s: float = 0.0) -> Scripted:
        made.append(Scripted(*answers, pause_s=pause_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


SIZE = len(DATA)
GOOD_HEAD = f"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-{SIZE - 1}/{SIZE}\r\nContent-Length: {SIZE}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (b"", TransferError, "closed before an answer"),
        (b"nonsense\r\n\r\n", TransferError, "not HTTP"),
        (b"HTTP/1.1 206 OK\r\nX: " + b"x" * 40_000, TransferError, "not HTTP"),
        (b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\n\r\nabcde", TransferError, "no Content-Range"),
        (GOOD_HEAD.replace(b"bytes 0-", b"bytes 1-"), TransferError, "the answer carries"),
        (GOOD_HEAD.replace(b" 206 ", b" 200 ") + DATA, TransferError, "answered 200"),
        (GOOD_HEAD + DATA[:-1], TransferError, f"after {SIZE - 1} of {SIZE} bytes"),
        (GOOD_HEAD, TransferError, f"after 0 of {SIZE} bytes"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 9\r\n\r\non fire\r\n", TransferError, "500 on fire"),
        (b"HTTP/1.1 500 Oops\r\n\r\n", TransferError, "500 Oops"),
        (b"HTTP/1.1 404 Gone\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000, ObjectNotFoundError, "404 x"),
        (b"HTTP/1.1 302 Elsewhere\r\nLocation: http://evil/\r\nContent-Length: 0\r\n\r\n", TransferError, "302"),
    ],
)
async def test_wrong_answers(
    lane: BulkLane,
    peer: Peer,
    scripted: Callable[..., Scripted],
    answer: bytes,
    expected: type[Exception],
    message: str,
) -> None:
    """Each is a typed error that names the node; none hangs, and none is taken for the object."""
    info = peer.add("object", DATA)
    server = scripted(answer)
    with pytest.raises(expected, match=r"node liar \(bulk lane") as caught:
        await fetch(lane, server.source, info)
    assert message in str(caught.value)


async def test_a_head_that_drips_is_no_progress(lane: BulkLane, peer: Peer, scripted: Callable[..., Scripted]) -> None:
    info = peer.add("object", DATA)
    server = scripted(GOOD_HEAD, pause_s=0.05)
    begin = time.monotonic()
    with pytest.raises(TransferStalledError, match=r"waited 0\.5 s for an answer"):
        await fetch(lane, server.source, info, timeout_s=0.5)
    assert time.monotonic() - begin < 3


async def test_a_kept_connection_that_ends_with_the_next_request(
    lane: BulkLane, peer: Peer, scripted: Callable[..., Scripted]
) -> None:
    """The server closes just when the request is sent: it is sent again over a new connection, once."""
    info = peer.add("object", DATA)
    server = scripted(GOOD_HEAD + DATA, b"", GOOD_HEAD + DATA, b"")
    for _ in range(2):
        assert await fetch(lane, server.source, info) == DATA
    assert server.requests == 3
    with pytest.raises(TransferError):
        await fetch(lane, server.source, info)


async def test_bytes_beyond_the_answer_do_not_reach_the_next(
    lane: BulkLane, peer: Peer, scripted: Callable[..., Scripted]
) -> None:
    """A kept connection with bytes that nobody asked for is closed, not read as the next answer."""
    info = peer.add("object", DATA)
    server = scripted(GOOD_HEAD + DATA + GOOD_HEAD + bytes(SIZE), GOOD_HEAD + DATA)
    assert await fetch(lane, server.source, info) == DATA
    assert await fetch(lane, server.source, info) == DATA
