"""Tickets: what a bulk-lane request must show. Random, for one object, and short-lived."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from replicator.errors import TicketError
from replicator.ids import ObjectVersion

TTL_S = 120.0
MAX_TICKETS = 65536
TOKEN_BYTES = 32


@dataclass(slots=True)
class _Ticket:
    object: ObjectVersion
    expires: float
    background: bool


class TicketOffice:
    """Issues tickets and tells what they are for. Thread-safe.

    Args:
        ttl_s: a ticket expires this long after its last use.
        limit: most tickets at a time; beyond it the one that was unused for longest is dropped.
        clock: seconds, never going back.
    """

    def __init__(
        self, ttl_s: float = TTL_S, limit: int = MAX_TICKETS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: OrderedDict[str, _Ticket] = OrderedDict()  # the one that expires first, first

    def issue(self, object: ObjectVersion, background: bool = False) -> tuple[str, float]:
        """A new ticket for `object`, and how many seconds after its last use it expires.

        Args:
            background: remembered for `is_background`.
        """
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with self._lock:
            now = self._clock()
            self._drop_expired(now)
            while len(self._tickets) >= self._limit:
                self._tickets.popitem(last=False)
            self._tickets[token] = _Ticket(object, now + self._ttl_s, background)
        return token, self._ttl_s

    def resolve(self, token: str) -> ObjectVersion:
        """The object that a ticket is for; the ticket lives on.

        Raises:
            TicketError: nobody was given this ticket, or it has expired.
        """
        with self._lock:
            now = self._clock()
            self._drop_expired(now)
            ticket = self._tickets.get(token)
            if ticket is None:
                raise TicketError("the ticket is unknown or has expired; ask for a new one with OpenObject")
            ticket.expires = now + self._ttl_s
            self._tickets.move_to_end(token)
            return ticket.object

    def is_background(self, token: str) -> bool:
        """Whether the ticket was issued for something in the background; False when it is not known."""
        with self._lock:
            ticket = self._tickets.get(token)
            return ticket is not None and ticket.background

    def __len__(self) -> int:
        with self._lock:
            self._drop_expired(self._clock())
            return len(self._tickets)

    def _drop_expired(self, now: float) -> None:
        while self._tickets:
            token, ticket = next(iter(self._tickets.items()))
            if ticket.expires > now:
                return
            del self._tickets[token]
