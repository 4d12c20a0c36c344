"""Serves sealed objects over plain TCP, HTTP/1.1, to whoever shows a ticket. Anything can fetch one, curl too.

One thread accepts connections, reads request heads and keeps the connections that wait; a bounded pool of threads
answers, one request each. So a client that sends nothing, or a byte a second, costs no thread, and
everything has a bound: connections, answers at a time, bytes of a head, and how long each may take.

    waiting --head complete--> queued --thread free--> answering --> waiting ...
       \\--head or idle deadline, or no request: refused--> draining --> closed
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import h11

from replicator.errors import ConfigError
from replicator.transfer import bulk_http, bulk_response
from replicator.transfer.bulk_http import RefusedError
from replicator.transfer.bulk_response import OpenObject
from replicator.transfer.serve_limit import PacedSocket, ServeLimit
from replicator.transfer.sockets import check_congestion, listen, tune

_BACKLOG = 256
_READ_BYTES = 4096
_SCAN_S = 0.25
_DRAIN_S = 1.0
_STOP_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """Bounds of a BulkServer; times in seconds.

    Attributes:
        connections: open at a time; one more takes the place of that which has waited longest without ever sending a
            whole request, or is refused with 503 when there is none.
        answers: sent at a time, each by a thread of its own; more requests wait.
        head_s: from the first byte of a request to its last.
        idle_s: between two requests on a connection.
        queue_s: a request waits for a thread no longer than this, then it is refused with 503.
        send_s: an answer of which the client takes nothing for this long is given up.
    """

    connections: int = 512
    answers: int = 32
    head_s: float = 10.0
    idle_s: float = 60.0
    queue_s: float = 10.0
    send_s: float = 30.0


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    http: h11.Connection = field(default_factory=bulk_http.server_side)
    deadline: float = 0.0
    in_head: bool = False
    draining: bool = False
    has_asked: bool = False
    request: h11.Request | None = None
    # Objects whose bytes the client may not have read yet. Its next request, or its end of the connection, shows
    # that it has; a client that sends requests ahead is answered all the same, and checks what it reads.
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def close(self) -> None:
        self.sock.close()
        self.held.close()


class BulkServer:
    """Made, started, stopped; not started again.

    Args:
        host, port: to listen on; port 0 takes a free one.
        open_object: called with the ticket of a request, in several threads at a time.
        congestion: TCP congestion control of its connections; empty: the system's.
        serve_limit: shared with whatever else sends; None: no limit.
    """

    def __init__(
        self,
        host: str,
        port: int,
        open_object: OpenObject,
        *,
        limits: BulkLimits | None = None,
        congestion: str = "",
        serve_limit: ServeLimit | None = None,
    ) -> None:
        check_congestion(congestion)
        self._host = host
        self._port = port
        self._open_object = open_object
        self._limits = limits or BulkLimits()
        self._congestion = congestion
        self._serve_limit = serve_limit or ServeLimit()
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[_Connection, None] = {}  # in the order in which they began to wait
        self._queue: deque[_Connection] = deque()
        self._answering: dict[_Connection, Future[None]] = {}
        self._finished: deque[tuple[_Connection, bool]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)  # not before the last thread that could still write to it
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._address: tuple[str, int] | None = None
        self._accepting = False
        self._thread = threading.Thread(target=self._run, name="replicator-bulk-server", daemon=True)
        self._pool = ThreadPoolExecutor(self._limits.answers, thread_name_prefix="replicator-bulk-answer")

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) that it listens on (or did), once started."""
        assert self._address is not None, "start() comes first"
        return self._address

    def start(self) -> None:
        """Listen, and serve from now on.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            self._listener = listen(self._host, self._port, _BACKLOG, self._congestion)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host} port {self._port} for the bulk lane: {error.strerror or error}; "
                "choose another bind address or bulk_port (0 takes a free one)"
            ) from None
        self._address = self._listener.getsockname()[:2]
        self._listener.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accept_again()
        self._thread.start()

    def stop(self) -> None:
        """Close all connections, cutting short answers under way. Returns within a few seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread.ident is not None:
            self._notify()
            self._thread.join(_STOP_S)
        if self._listener is not None:
            self._listener.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        ended, _ = wait(self._answering.values(), timeout=_STOP_S)
        for connection, future in self._answering.items():
            if future in ended:
                connection.close()

    # -- the thread that accepts and reads

    def _run(self) -> None:
        try:
            last_scan = time.monotonic()
            while not self._stopping.is_set():
                for key, _ in self._selector.select(_SCAN_S if self._has_deadlines() else None):
                    if isinstance(key.data, _Connection):
                        self._read_or_close(key.data)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                self._take_back()
                self._dispatch()
                now = time.monotonic()
                if now - last_scan >= _SCAN_S:
                    last_scan = now
                    self._expire(now)
        except Exception:
            log.exception("the bulk server failed; objects are served over gRPC only")
            # Else the kernel would go on accepting connections that nobody reads.
            if self._listener is not None:
                self._listener.close()
        finally:
            self._close_all()

    def _has_deadlines(self) -> bool:
        return bool(self._waiting or self._queue or not self._accepting)

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _accept_again(self) -> None:
        assert self._listener is not None
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accepting = True

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # The listener would stay readable: look at it again only at the next scan.
                log.warning("bulk lane: cannot accept a connection: %s", error.strerror)
                self._selector.unregister(self._listener)
                self._accepting = False
            return
        sock.setblocking(True)
        try:
            tune(sock, self._limits.send_s)
            bulk_response.set_send_timeout(sock, self._limits.send_s)
        except OSError:
            sock.close()
            return
        connection = _Connection(sock)
        if self._is_full() and not self._make_way():
            busy = RefusedError(503, f"more than {self._limits.connections} connections")
            self._refuse(connection, busy, drain=False)
        else:
            self._wait(connection)

    def _is_full(self) -> bool:
        return len(self._waiting) + len(self._queue) + len(self._answering) >= self._limits.connections

    def _make_way(self) -> bool:
        """Close the one that has waited longest without a request: many that are opened and left keep nobody out."""
        silent = next((one for one in self._waiting if not one.has_asked), None)
        if silent is not None:
            self._close(silent)
        return silent is not None

    def _wait(self, connection: _Connection) -> None:
        """Wait for the next request of a connection."""
        connection.deadline = time.monotonic() + self._limits.idle_s
        connection.in_head = False
        self._waiting[connection] = None
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def _stop_waiting(self, connection: _Connection) -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            self._selector.unregister(connection.sock)

    def _read_or_close(self, connection: _Connection) -> None:
        if connection not in self._waiting:
            return
        try:
            self._read(connection)
        except Exception:
            # One client's bytes must never end the service of all others.
            log.exception("bulk lane: a connection failed")
            self._close(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        if connection.draining:
            if not data:
                self._close(connection)
            return
        if data and not connection.in_head:
            connection.in_head = True
            connection.deadline = time.monotonic() + self._limits.head_s
        connection.http.receive_data(data)
        self._advance(connection)

    def _advance(self, connection: _Connection) -> None:
        """Queue the next request among what was received."""
        try:
            request = bulk_http.next_request(connection.http)
        except EOFError:
            self._close(connection)
        except RefusedError as refused:
            self._refuse(connection, refused)
        else:
            if request is not None:
                self._stop_waiting(connection)
                connection.request = request
                connection.has_asked = True
                connection.deadline = time.monotonic() + self._limits.queue_s
                self._queue.append(connection)

    def _refuse(self, connection: _Connection, refused: RefusedError, *, drain: bool = True) -> None:
        """Answer from this thread, and close once the client has had time to read it: closing at once may reset."""
        self._stop_waiting(connection)
        try:
            answer = bulk_response.refusal_bytes(connection.http, refused, connection.request)
            connection.sock.send(answer, socket.MSG_DONTWAIT)
            connection.sock.shutdown(socket.SHUT_WR)
        except (OSError, h11.LocalProtocolError):
            drain = False
        if not drain:
            connection.close()
            return
        self._wait(connection)
        connection.draining = True
        connection.deadline = time.monotonic() + _DRAIN_S

    def _close(self, connection: _Connection) -> None:
        self._stop_waiting(connection)
        connection.close()

    def _expire(self, now: float) -> None:
        for connection in [one for one in self._waiting if one.deadline <= now]:
            if connection.in_head and not connection.draining:
                line = f"the request did not end within {self._limits.head_s:.1f} s"
                self._refuse(connection, RefusedError(408, line))
            else:
                self._close(connection)
        while self._queue and self._queue[0].deadline <= now:
            busy = f"all {self._limits.answers} answers at a time are taken, for {self._limits.queue_s:.1f} s now"
            self._refuse(self._queue.popleft(), RefusedError(503, busy, [("Retry-After", "1")]))
        if not self._accepting:
            self._accept_again()

    # -- the pool that answers

    def _dispatch(self) -> None:
        while self._queue and len(self._answering) < self._limits.answers:
            connection = self._queue.popleft()
            self._answering[connection] = self._pool.submit(self._answer, connection)

    def _answer(self, connection: _Connection) -> None:
        keep = False
        try:
            assert connection.request is not None
            connection.held.close()
            background = self._serve_limit.is_background(bulk_http.ticket_of(connection.request))
            with self._serve_limit.sending(PacedSocket(connection.sock), background):
                keep = bulk_response.answer(
                    connection.sock, connection.http, connection.request, self._open_object, connection.held
                )
        except Exception:
            log.exception("bulk lane: a request failed")
        finally:
            self._finished.append((connection, keep))
            self._notify()

    def _take_back(self) -> None:
        while self._finished:
            connection, keep = self._finished.popleft()
            del self._answering[connection]
            connection.request = None
            if keep:
                self._wait(connection)
                self._advance(connection)  # it may have sent the next request already
            else:
                self._end(connection)

    def _end(self, connection: _Connection) -> None:
        """Say that no more comes, and close when the client has read what is on its way, or takes too long."""
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            connection.close()
            return
        self._wait(connection)
        connection.draining = True
        connection.deadline = time.monotonic() + self._limits.send_s

    def _close_all(self) -> None:
        for connection in [*self._waiting, *self._queue]:
            connection.close()
        for connection in self._answering:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that sends
        self._selector.close()
