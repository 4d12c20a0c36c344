"""TCP options of bulk-lane sockets, the same on both sides, and waiting for one with a deadline."""

from __future__ import annotations

import select
import socket

from replicator.errors import ConfigError, TransferError, TransferStalledError

_KEEPALIVE_PROBES = 3


def check_congestion(name: str) -> None:
    """Raise ConfigError when this machine has no TCP congestion control of that name. Empty is the system's own."""
    if not name:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            _set_congestion(probe, name)
        except OSError as error:
            raise ConfigError(
                f"congestion: this machine cannot use {name!r} ({error.strerror}); see "
                "/proc/sys/net/ipv4/tcp_allowed_congestion_control for what it can, or leave it empty"
            ) from None


def listen(host: str, port: int, backlog: int, congestion: str = "") -> socket.socket:
    """A listening TCP socket; connections that it accepts have the congestion control from their first packet on.

    One that begins with another, of which bbr is the system's on many machines, stays paced by timers for its whole
    life, which a fast network does not need and is slowed down by.

    Raises:
        OSError: the address cannot be bound.
    """
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if congestion:
            _set_congestion(sock, congestion)
        sock.bind(where)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket, silence_s: float, congestion: str = "") -> None:
    """Set the options of a connection: no Nagle (F46), and a peer that is silently gone is noticed in `silence_s`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle_s = max(1, round(silence_s / 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(silence_s / 2 / _KEEPALIVE_PROBES)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(silence_s * 1000)))
    if congestion:
        _set_congestion(sock, congestion)


def _set_congestion(sock: socket.socket, name: str) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def wait_for(
    sock: socket.socket, event: int, timeout_s: float, cancel_fd: int, awaited: str, spent_s: float = 0.0
) -> None:
    """Wait until a socket is ready for `event` (select.POLLIN or POLLOUT).

    Args:
        timeout_s: for the whole of what is `awaited`, of which `spent_s` have gone by before.

    Raises:
        TransferStalledError: it was not ready in time; the message names what was `awaited`, and how long.
        TransferError: `cancel_fd` became readable.
    """
    poller = select.poll()
    poller.register(sock, event)
    poller.register(cancel_fd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll(max(0.0, timeout_s - spent_s) * 1000)}
    if cancel_fd in ready:
        raise TransferError("cancelled")
    if not ready:
        raise TransferStalledError(f"waited {timeout_s:.1f} s for {awaited}, in vain")
