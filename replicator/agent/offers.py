"""What waits to be copied to one buddy: which objects go into the next offer, which are given up, and why.

No I/O and no clock of its own: `now` is a parameter, so that every decision can be tested by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from replicator.errors import ReplicationError, ReplicatorError, StaleEpochError
from replicator.ids import ObjectVersion
from replicator.store.trailer import ObjectInfo

MAX_OFFER_OBJECTS = 64
# Of block tables in one offer: a message may have 4 MiB.
MAX_OFFER_BLOCKS = 128 << 10
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
_SHOWN_ATTEMPTS = 4

# (what was verified, None) or (None, error), then the lane and the seconds since it was asked for.
Outcome = Callable[[ObjectInfo | None, ReplicatorError | None, str, float], None]


@dataclass(slots=True, eq=False)
class Pending:
    """One object on its way to one buddy."""

    info: ObjectInfo
    epoch: int
    deadline_s: float
    asked_at: float
    outcomes: list[Outcome]
    not_before: float
    progressed_at: float | None = None  # since it was first offered
    offered: bool = False
    attempts: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def object(self) -> ObjectVersion:
        return self.info.object


class OfferQueue:
    """All objects on their way to one buddy. Bounded by `Replicator`."""

    def __init__(self, buddy: str, jitter: Callable[[], float] = random.random) -> None:
        self.buddy = buddy
        self.heard_at: float | None = None
        self._jitter = jitter
        self._pending: dict[ObjectVersion, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, one: ObjectVersion) -> bool:
        return one in self._pending

    def add(self, info: ObjectInfo, epoch: int, deadline_s: float, outcome: Outcome, now: float) -> None:
        """Take an object in; when it is on its way already, its outcome is told to `outcome` too."""
        known = self._pending.get(info.object)
        if known is not None:
            known.epoch = max(known.epoch, epoch)
            known.deadline_s = max(known.deadline_s, deadline_s)
            known.asked_at = now
            known.outcomes = [*known.outcomes[-7:], outcome]
            return
        self._pending[info.object] = Pending(info, epoch, deadline_s, now, [outcome], now)

    def take(self, now: float) -> list[Pending]:
        """The objects of the next offer, all of one epoch and deadline; empty when nothing is due."""
        batch: list[Pending] = []
        blocks = 0
        for item in self._pending.values():
            if item.offered or item.not_before > now:
                continue
            blocks += len(item.info.block_crcs)
            if batch and (
                blocks > MAX_OFFER_BLOCKS
                or item.epoch != batch[0].epoch
                or item.deadline_s != batch[0].deadline_s
                or item.object.version.container.job != batch[0].object.version.container.job
            ):
                break
            batch.append(item)
            if len(batch) == MAX_OFFER_OBJECTS:
                break
        for item in batch:
            item.offered = True
            item.attempts += 1
            if item.progressed_at is None:
                item.progressed_at = now
        return batch

    def progressed(self, item: Pending, now: float) -> None:
        """Bytes of the object arrived."""
        self.heard_at = item.progressed_at = now

    def done(self, item: Pending) -> None:
        """Its outcome is known."""
        self._pending.pop(item.object, None)

    def failed(self, item: Pending, error: ReplicatorError, now: float) -> bool:
        """An attempt at the object failed. True when it is to be tried again, after a pause with jitter."""
        item.offered = False
        note = f"{error.kind}: {error}"
        if not item.failures or item.failures[-1] != note:
            item.failures = [*item.failures[:1], *item.failures[1:][-2:], note]
        if is_final(error) or now - self._silent_since(item) >= item.deadline_s:
            return False
        pause = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(item.attempts - 1, 10))
        item.not_before = now + min(pause * (0.5 + self._jitter()), item.deadline_s / 4)
        return True

    def overdue(self, now: float) -> list[Pending]:
        """Objects that were never offered although they have waited for their deadline: the buddy answers nothing."""
        return [
            item
            for item in self._pending.values()
            if item.progressed_at is None and now - max(item.asked_at, self.heard_at or 0.0) >= item.deadline_s
        ]

    def next_due(self, now: float) -> float | None:
        """Seconds until an object may be offered again; None when none waits."""
        waits = [item.not_before - now for item in self._pending.values() if not item.offered]
        return max(0.0, min(waits)) if waits else None

    def verdict(self, item: Pending, last: ReplicatorError, now: float) -> ReplicatorError:
        """The error that ends it, naming the buddy and the attempts."""
        if isinstance(last, StaleEpochError):
            return last
        shown = item.failures[:_SHOWN_ATTEMPTS] or [f"{last.kind}: {last}"]
        attempts = f"{item.attempts} attempt{'' if item.attempts == 1 else 's'}"
        return ReplicationError(
            f"{item.object} was not copied to buddy {self.buddy}: {attempts} in {now - item.asked_at:.1f} s, the "
            f"deadline without progress is {item.deadline_s:.1f} s; what went wrong: {'; '.join(shown)}. The object is "
            "intact on this node; it is offered again when its container is committed, or when asked again"
        )

    def _silent_since(self, item: Pending) -> float:
        return max(item.asked_at, item.progressed_at or 0.0)


def is_final(error: ReplicatorError) -> bool:
    """Whether trying again cannot help: the buddy, or this node, refused for good."""
    return error.kind in _FINAL


_FINAL = frozenset(
    {"StaleEpochError", "ObjectExistsError", "InvalidIdError", "ObjectNotFoundError", "UnsupportedError"}
    | {"ReplicationError"}
)
