"""Asks those who may have something in turn, and those who refused again: an agent that is started again does so.

While any other source is left, nobody waits for one that refused. One that was silent for a whole deadline has had its
chance: nothing else of the same errand is awaited from it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from replicator.errors import DeadlineExceededError, PeerUnavailableError, ReplicatorError


class HasNode(Protocol):
    """What is asked: it is at a node."""

    @property
    def node_id(self) -> str: ...


SourceT = TypeVar("SourceT", bound=HasNode)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class PullPolicy:
    """How to pull.

    Attributes:
        progress_timeout_s: a source from which nothing comes for this long is given up.
        lane: `bulk`, `grpc`, or `auto`: bulk where the source offers it and a connection can be made, else grpc.
        attempts: at one source, each after a connection that broke or a ticket that had expired.
        backoff_s: before another attempt at the same source; a random part of it is waited.
        patience_s: a source that refuses connections is asked again for this long, from its first refusal on, when
            no other one gives what is missing.
    """

    progress_timeout_s: float = 30.0
    lane: str = "auto"
    attempts: int = 3
    backoff_s: float = 0.2
    patience_s: float = 0.0

    async def pause(self) -> None:
        """Before another attempt."""
        await asyncio.sleep(self.backoff_s * random.uniform(0.5, 1))


class Patience:
    """Which nodes refuse, and which are silent, as all pulls of one errand have found. Used in the event loop only.

    Refusals count for what was asked for: who describes an object may refuse to send its bytes.
    """

    def __init__(self, policy: PullPolicy) -> None:
        self.policy = policy
        # Node and what it was asked for -> when it first refused that since it gave it, and when last.
        self._refused: dict[tuple[str, str], tuple[float, float]] = {}
        self._silent: dict[str, DeadlineExceededError] = {}

    def require_heard(self, node_id: str) -> None:
        """Raises DeadlineExceededError when the node was silent for a whole deadline."""
        silence = self._silent.get(node_id)
        if silence is not None:
            raise DeadlineExceededError(str(silence))

    def answered(self, node_id: str, what: str) -> None:
        """The node gave what it was asked for."""
        self._refused.pop((node_id, what), None)
        self._silent.pop(node_id, None)

    def failed(self, node_id: str, what: str, error: ReplicatorError) -> None:
        """It did not."""
        if isinstance(error, PeerUnavailableError):
            now = asyncio.get_running_loop().time()
            first, _ = self._refused.get((node_id, what), (now, now))
            self._refused[node_id, what] = first, now
        elif isinstance(error, DeadlineExceededError):
            self._silent[node_id] = error

    def lasts(self, node_id: str, what: str, error: ReplicatorError) -> bool:
        """Whether a node that failed with `error` is to be asked again.

        It is once more in any case when it was not asked again before the time was over.
        """
        if not isinstance(error, PeerUnavailableError) or not self.policy.patience_s:
            return False
        first, last = self._refused.get((node_id, what), (0.0, 0.0))
        return last - first < self.policy.patience_s


@dataclass(frozen=True, slots=True)
class Asked(Generic[ResultT]):
    """What came of it: the first result (None: nobody gave one), and why nodes (by id) did not, in this order."""

    result: ResultT | None
    failures: tuple[tuple[str, ReplicatorError], ...]


async def ask_in_turn(
    sources: Sequence[SourceT], ask: Callable[[SourceT], Awaitable[ResultT]], patience: Patience, what: str
) -> Asked[ResultT]:
    """Ask one source after the other until one gives a result; in the end, again those that refused.

    Args:
        sources: best first.
        ask: what it raises of ReplicatorError is why that source fails.
        what: is asked for.
    """
    failures: dict[str, ReplicatorError] = {}
    left = list(sources)
    while left:
        again: list[SourceT] = []
        for source in left:
            node_id = source.node_id
            try:
                patience.require_heard(node_id)
                result = await ask(source)
            except ReplicatorError as error:
                failures.pop(node_id, None)
                failures[node_id] = error
                patience.failed(node_id, what, error)
                if patience.lasts(node_id, what, error):
                    again.append(source)
            else:
                patience.answered(node_id, what)
                return Asked(result, tuple(failures.items()))
        if again:
            await patience.policy.pause()
        left = again
    return Asked(None, tuple(failures.items()))
