"""Configured peers as addresses: a name that stands for many nodes (a Kubernetes headless service) becomes all of them.

Names are looked up at the start and again while the agent runs, because DNS may not know the others yet when an
agent starts, and nodes move (F34). Whoever is found there still has to say who it is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from replicator.config import split_address

MAX_ADDRESSES = 8192

log = logging.getLogger(__name__)

# The numeric addresses of a host name; OSError when there are none.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class Discovery:
    """Used in the event loop only.

    Args:
        peers: `host:port` each, as configured.
        resolve: replaced in tests.
    """

    def __init__(self, peers: Sequence[str], resolve: Resolver | None = None) -> None:
        self._peers = tuple(peers)
        self._resolve = resolve or _resolve
        self._found: dict[str, tuple[str, ...]] = {}
        self._failing: set[str] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """What is known now, without duplicates. A name not resolved yet, or to one address only, stays a name."""
        found = (address for peer in self._peers for address in self._found.get(peer, (peer,)))
        return tuple(dict.fromkeys(found))[:MAX_ADDRESSES]

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that have to be looked up."""
        return tuple(peer for peer in self._peers if not _is_numeric(split_address(peer)[0]))

    async def refresh(self, deadline_s: float) -> None:
        """Look every name up once. What cannot be looked up keeps the addresses that it had. Never raises."""
        await asyncio.gather(*(self._refresh(peer, deadline_s) for peer in self.names))

    async def run(self, every_s: float, deadline_s: float) -> None:
        """Refresh for ever; ends at once when there is no name to look up."""
        while self.names:
            await self.refresh(deadline_s)
            await asyncio.sleep(every_s)

    async def _refresh(self, peer: str, deadline_s: float) -> None:
        host, port = split_address(peer)
        try:
            hosts = await asyncio.wait_for(self._resolve(host, port), deadline_s)
        except (OSError, TimeoutError) as error:
            if peer not in self._failing:
                self._failing.add(peer)
                log.warning("peer %s cannot be looked up, and will be tried again: %s", peer, error or "no answer")
            return
        self._failing.discard(peer)
        if len(hosts) < 2:
            # gRPC looks a single name up by itself, and a certificate may be issued to it.
            found: tuple[str, ...] = (peer,)
        else:
            found = tuple(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in sorted(hosts))
        if found != self._found.get(peer, (peer,)):
            log.info("peer %s is %d nodes: %s", peer, len(found), ", ".join(found[:8]))
        self._found[peer] = found


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _resolve(host: str, port: int) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(answer[4][0]) for answer in answers})
