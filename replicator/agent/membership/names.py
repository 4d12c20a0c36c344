"""Addresses by name: one that stands for many nodes (a Kubernetes headless service) becomes all of them.

Names are looked up at the start, again and again while the agent runs, and whenever a connection is lost: DNS may not
know the others yet when an agent starts, and nodes move (F34). Whoever is found there still has to say who it is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from replicator.agent.membership.source import MAX_ADDRESSES, Source
from replicator.config import AgentConfig, split_address

_FIRST_RETRY_S = 0.25
# Between two lookups, however many connections are lost.
_LEAST_S = 0.5

log = logging.getLogger(__name__)

# The numeric addresses of a host name; OSError when there are none.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class Names:
    """What names resolve to. Used in the event loop only.

    Args:
        peers: `host:port` each, as configured.
        resolve: replaced in tests.
        stand_in: a name is never an address itself; else it is, until it resolves to several.
    """

    def __init__(self, peers: Sequence[str], resolve: Resolver | None = None, *, stand_in: bool = False) -> None:
        self._peers = tuple(peers)
        self._resolve = resolve or _resolve
        self._stand_in = stand_in
        self._found: dict[str, tuple[str, ...]] = {}
        self._asking: dict[str, asyncio.Task[Sequence[str]]] = {}
        self.problems: dict[str, str] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """What is known now, without duplicates."""
        found = (address for peer in self._peers for address in self._found.get(peer, self._unresolved(peer)))
        return tuple(dict.fromkeys(found))[:MAX_ADDRESSES]

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that have to be looked up."""
        return tuple(peer for peer in self._peers if not _is_numeric(split_address(peer)[0]))

    async def refresh(self, deadline_s: float) -> None:
        """Look every name up once. What cannot be looked up keeps the addresses that it had. Never raises."""
        await asyncio.gather(*(self._refresh(peer, deadline_s) for peer in self.names))

    async def _refresh(self, peer: str, deadline_s: float) -> None:
        try:
            hosts = await self._ask(peer, deadline_s)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {deadline_s:.1f} s"
            self.problems[peer] = f"{peer} cannot be looked up, and will be tried again: {reason}"
            return
        self.problems.pop(peer, None)
        if len(hosts) < 2 and not self._stand_in:
            found: tuple[str, ...] = (peer,)
        else:
            _, port = split_address(peer)
            found = tuple(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in sorted(hosts))
        if found != self._found.get(peer, self._unresolved(peer)):
            log.info("peer %s is %d nodes: %s", peer, len(found), ", ".join(found[:8]))
        self._found[peer] = found

    async def _ask(self, peer: str, deadline_s: float) -> Sequence[str]:
        """A lookup cannot be stopped: one that takes longer than its deadline is waited for again the next time."""
        asking = self._asking.get(peer)
        if asking is None:
            asking = asyncio.ensure_future(self._resolve(*split_address(peer)))
            self._asking[peer] = asking
        await asyncio.wait([asking], timeout=deadline_s)
        if not asking.done():
            raise TimeoutError
        del self._asking[peer]
        return asking.result()

    def _unresolved(self, peer: str) -> tuple[str, ...]:
        return () if self._stand_in and not _is_numeric(split_address(peer)[0]) else (peer,)

    def close(self) -> None:
        """Wait for no lookup any more."""
        for asking in self._asking.values():
            asking.cancel()


class NameSource(Source):
    """A source whose addresses are what names resolve to."""

    def __init__(self, config: AgentConfig, names: Names) -> None:
        super().__init__()
        self._config = config
        self._names = names

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._names.addresses

    async def run(self) -> None:
        """Look up for ever; ends at once when there is no name to look up."""
        retry_s = _FIRST_RETRY_S
        try:
            while self._names.names:
                before = self.addresses
                await self._names.refresh(self._config.rpc_deadline_s)
                self._report("; ".join(self._names.problems.values()))
                if self.addresses != before:
                    self._changed()
                every_s = self._config.resolve_interval_s
                retry_s = min(2 * retry_s, every_s) if self._names.problems else _FIRST_RETRY_S
                await self._pause(min(_LEAST_S, every_s / 10), retry_s if self._names.problems else every_s)
        finally:
            self._names.close()


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
