"""Who reaches whom, how fast, and what goes wrong on the way.

Knows addresses and processes, and nothing of what is said. A link delivers in order, like the TCP connection that it
stands for; what the network does to it is late, cut, mute, said twice (by a retry below), or one bit other.
"""

from __future__ import annotations

import contextvars
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .loop import Process, VirtualLoop

KEEPALIVE_S = 15.0
"""A connection over which nothing comes is given up after so long, as `rpc_options` has it."""
CONNECT_S = 3.0


@dataclass
class Weather:
    """Odds of what happens to one call or one message, 0 to 1, and the usual delay in seconds."""

    delay_s: float = 0.002
    late: float = 0.0
    late_s: float = 0.5
    refused: float = 0.0
    request_lost: float = 0.0
    reply_lost: float = 0.0
    duplicated: float = 0.0
    cut: float = 0.0
    flipped: float = 0.0

    @classmethod
    def bad(cls, rng: random.Random) -> Weather:
        """Something between a light breeze and a storm."""
        strength = rng.choice((0.02, 0.05, 0.15))

        def odds() -> float:
            return strength * rng.random() if rng.random() < 0.6 else 0.0

        return cls(
            delay_s=rng.choice((0.001, 0.005, 0.05)),
            late=odds() * 2,
            late_s=rng.choice((0.3, 1.5, 4.0)),
            refused=odds(),
            request_lost=odds(),
            reply_lost=odds(),
            duplicated=odds() * 2,
            cut=odds(),
            flipped=odds() * 4,
        )


class Endpoint:
    """What listens at an address: a gRPC server, or a bulk endpoint, of one process."""

    def __init__(self, process: Process, address: str, node: str, service: Any) -> None:
        self.process = process
        self.address = address
        self.node = node
        self.service = service
        self.calls: dict[Any, None] = {}
        process.on_killed.append(self._died)

    def _died(self) -> None:
        for call in list(self.calls):
            call.peer_died(self)


class Network:
    """All links between all nodes.

    Attributes:
        weather: of all links between different nodes.
        faults: how often each kind of fault really happened to something.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, faults: Counter[str]) -> None:
        self.loop = loop
        self.rng = rng
        self.faults = faults
        self.weather = Weather()
        self.context = contextvars.Context()
        self._listening: dict[str, Endpoint] = {}
        self._cut: set[tuple[str, str]] = set()
        self._gone: set[str] = set()

    @property
    def weather(self) -> Weather:
        return self._weather

    @weather.setter
    def weather(self, weather: Weather) -> None:
        self._weather = weather
        self._is_fine = weather == Weather()

    # -- addresses

    def listen(self, endpoint: Endpoint) -> None:
        """From now on until its process dies, or somebody else listens there."""
        self._listening[endpoint.address] = endpoint

    def close(self, endpoint: Endpoint) -> None:
        """Nobody is there any more."""
        if self._listening.get(endpoint.address) is endpoint:
            del self._listening[endpoint.address]

    def find(self, address: str) -> Endpoint | None:
        """Who listens there now."""
        found = self._listening.get(address)
        return found if found is not None and found.process.alive else None

    # -- partitions

    def partition(self, one_side: set[str], others: set[str], both_ways: bool) -> None:
        """Nothing gets from one side to the others any more; nor back, with `both_ways`."""
        for a in one_side:
            for b in others:
                if a != b:
                    self._cut.add((a, b))
                    if both_ways:
                        self._cut.add((b, a))

    def heal(self) -> None:
        """All links are whole, and the weather is fine."""
        self._cut.clear()
        self.weather = Weather()

    def host_gone(self, node: str, gone: bool) -> None:
        """A host that is switched off answers nothing; one whose process died refuses connections."""
        (self._gone.add if gone else self._gone.discard)(node)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing can go wrong at this moment."""
        return not self._cut and self._is_fine

    def reaches(self, sender: str, receiver: str) -> bool:
        """Whether a message sent now arrives."""
        if sender == receiver:
            return True
        return receiver not in self._gone and sender not in self._gone and (sender, receiver) not in self._cut

    def known_cut(self, a: str, b: str) -> bool:
        """Whether a call from `a` to `b` cannot succeed now."""
        return not (self.reaches(a, b) and self.reaches(b, a))

    # -- messages

    def happens(self, kind: str, sender: str, receiver: str) -> bool:
        """Whether a fault happens to this call or message; counted."""
        if self._is_fine or sender == receiver:
            return False
        odds: float = getattr(self._weather, kind)
        if not odds or self.rng.random() >= odds:
            return False
        self.faults[kind] += 1
        return True

    def delay_s(self, sender: str, receiver: str) -> float:
        """How long the next message takes."""
        if sender == receiver:
            return 0.0002 * self.rng.random()
        delay = self._weather.delay_s * (0.5 + self.rng.random())
        if not self._is_fine and self.happens("late", sender, receiver):
            delay += self._weather.late_s * self.rng.random()
        return delay

    def flip(self, data: bytes, sender: str, receiver: str) -> bytes:
        """The bytes as they arrive."""
        if data and self.happens("flipped", sender, receiver):
            return flipped(data, self.rng)
        return data

    def later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        """Something happens on the network, whoever is dead by then."""
        self.loop.call_later(delay_s, callback, *args, context=self.context)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one bit turned."""
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)
