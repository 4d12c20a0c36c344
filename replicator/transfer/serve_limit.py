"""How fast one node serves objects at most: a rate that all who send at the moment share evenly, over all lanes.

On the bulk lane the kernel paces each socket (SO_MAX_PACING_RATE: exact, and costs no thread). gRPC has many streams
on one socket, so there each stream has a token bucket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

# <asm-generic/socket.h>; Python has no name for it.
_SO_MAX_PACING_RATE = 47
# To the kernel: no pacing at all.
_UNLIMITED = (1 << 64) - 1
_BURST_S = 0.05
# A bucket that waits looks this often whether its rate has changed.
_LOOK_S = 0.1

SetRate = Callable[[int], None]
"""Told how many bytes per second one sender may send from now on, in any thread."""


class ServeLimit:
    """Thread-safe. Who sends is within `sending`; each gets an even share, anew whenever one begins or ends.

    Args:
        bytes_per_s: of all together; 0: no limit.
        background_bytes_per_s: of all together that send in the background, within the other limit; 0: no other one.
            Without any limit nobody is told a rate.
        is_background: whether a ticket of the bulk lane is for something in the background. In any thread.
    """

    def __init__(
        self,
        bytes_per_s: int = 0,
        background_bytes_per_s: int = 0,
        is_background: Callable[[str], bool] = lambda ticket: False,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._background_bytes_per_s = background_bytes_per_s
        self.is_background = is_background
        self._senders: list[tuple[SetRate, bool]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def sending(self, set_rate: SetRate, background: bool = False) -> Iterator[None]:
        """Within the block somebody sends. `set_rate` must not raise, and is not called after the block."""
        if not self._bytes_per_s and not self._background_bytes_per_s:
            yield
            return
        with self._lock:
            self._senders.append((set_rate, background))
            self._share()
        try:
            yield
        finally:
            with self._lock:
                self._senders.remove((set_rate, background))
                self._share()

    def _share(self) -> None:
        share = _share_of(self._bytes_per_s, len(self._senders))
        behind = _share_of(self._background_bytes_per_s, sum(background for _, background in self._senders))
        for set_rate, background in self._senders:
            set_rate(min(share, behind) if background else share)


def _share_of(bytes_per_s: int, senders: int) -> int:
    return max(1, bytes_per_s // senders) if bytes_per_s and senders else _UNLIMITED


class PacedSocket:
    """A TCP socket whose rate the kernel limits. Call it with bytes per second; what fails leaves it as it was."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __call__(self, bytes_per_s: int) -> None:
        # The connection may have broken meanwhile.
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("L", bytes_per_s))


class TokenBucket:
    """One stream of an event loop. Call it with bytes per second, which may change while `take` waits."""

    def __init__(self) -> None:
        self._rate = 0
        self._tokens = 0.0
        self._at = time.monotonic()

    def __call__(self, bytes_per_s: int) -> None:
        self._rate = bytes_per_s

    async def take(self, size: int) -> None:
        """Wait until the bytes taken before have had their time, then take `size` more. At once without a rate."""
        while self._rate:
            now = time.monotonic()
            self._tokens = min(self._tokens + (now - self._at) * self._rate, self._rate * _BURST_S)
            self._at = now
            if self._tokens >= 0:
                self._tokens -= size
                return
            await asyncio.sleep(min(-self._tokens / self._rate, _LOOK_S))
