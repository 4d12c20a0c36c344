"""What waits to be copied to one buddy: which objects go into the next offer, which are given up, and why.

No I/O and no clock of its own: `now` is a parameter, so that every decision can be tested by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from replicator.errors import NodeDrainingError, ReplicationError, ReplicatorError, StaleEpochError
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.packs import is_small
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2

MAX_OFFER_OBJECTS = 64
# Small ones are moved many at a time; several offers at once keep both sides busy.
MAX_OFFER_SMALL = 256
# Of block tables in one offer: a message may have 4 MiB.
MAX_OFFER_BLOCKS = 128 << 10
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
_SHOWN_ATTEMPTS = 4

# Gets the outcome of one object, or of several copies that were made.
Report = Callable[[local_pb2.ReplicationEvent | local_pb2.ReplicatedObjects], None]


@dataclass(slots=True, eq=False)
class Pending:
    """One object on its way to one buddy."""

    info: ObjectInfo
    epoch: int
    deadline_s: float
    asked_at: float
    outcomes: list[Report]
    not_before: float
    progressed_at: float | None = None  # since it was first offered
    offered: bool = False
    attempts: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def object(self) -> ObjectVersion:
        return self.info.object


class OfferQueue:
    """All objects on their way to one buddy. Bounded by `Replicator`.

    Args:
        background: these copies replace lost ones, and wait for those of what was just written.
    """

    def __init__(self, buddy: str, jitter: Callable[[], float] = random.random, *, background: bool = False) -> None:
        self.buddy = buddy
        self.background = background
        self.heard_at: float | None = None
        self._jitter = jitter
        self._pending: dict[ObjectVersion, Pending] = {}
        # Those that are in no offer at this moment, the ones that wait for longest first.
        self._waiting: dict[ObjectVersion, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, one: ObjectVersion) -> bool:
        return one in self._pending

    def of(self, version: ContainerVersion) -> list[Pending]:
        """All objects of a container that have no outcome yet."""
        return [item for one, item in self._pending.items() if one.version == version]

    def add(self, info: ObjectInfo, epoch: int, deadline_s: float, outcome: Report, now: float) -> None:
        """Take an object in; when it is on its way already, its outcome is told to `outcome` too."""
        known = self._pending.get(info.object)
        if known is not None:
            known.epoch = max(known.epoch, epoch)
            known.deadline_s = max(known.deadline_s, deadline_s)
            known.asked_at = now
            known.outcomes = [*known.outcomes[-7:], outcome]
            return
        item = Pending(info, epoch, deadline_s, now, [outcome], now)
        self._pending[info.object] = self._waiting[info.object] = item

    def take(self, now: float) -> list[Pending]:
        """The objects of the next offer, all of one epoch and deadline; empty when nothing is due."""
        batch: list[Pending] = []
        blocks = 0
        most = MAX_OFFER_OBJECTS
        for item in self._waiting.values():
            if item.not_before > now:
                continue
            small = is_small(item.info.size)
            if not batch:
                most = MAX_OFFER_SMALL if small else MAX_OFFER_OBJECTS
            elif small != is_small(batch[0].info.size):
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
            if len(batch) == most:
                break
        for item in batch:
            del self._waiting[item.object]
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
        self._waiting.pop(item.object, None)

    def failed(self, item: Pending, error: ReplicatorError, now: float) -> bool:
        """An attempt at the object failed. True when it is to be tried again, after a pause with jitter."""
        item.offered = False
        note = f"{error.kind}: {error}"
        if not item.failures or item.failures[-1] != note:
            item.failures = [*item.failures[:1], *item.failures[1:][-2:], note]
        if is_final(error) or now - self._silent_since(item) >= item.deadline_s:
            return False
        pause = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(item.attempts - 1, 10))
        self._waiting[item.object] = item
        item.not_before = now + min(pause * (0.5 + self._jitter()), item.deadline_s / 4)
        return True

    def overdue(self, now: float) -> list[Pending]:
        """Objects that were never offered although they have waited for their deadline: the buddy answers nothing."""
        return [
            item
            for item in self._waiting.values()
            if item.progressed_at is None and now - max(item.asked_at, self.heard_at or 0.0) >= item.deadline_s
        ]

    def next_due(self, now: float) -> float | None:
        """Seconds until an object may be offered again; None when none waits."""
        soonest: float | None = None
        for item in self._waiting.values():
            if item.not_before <= now:
                return 0.0
            soonest = item.not_before if soonest is None else min(soonest, item.not_before)
        return None if soonest is None else soonest - now

    def verdict(self, item: Pending, last: ReplicatorError, now: float) -> ReplicatorError:
        """The error that ends it, naming the buddy and the attempts."""
        if self.background or isinstance(last, StaleEpochError | NodeDrainingError):
            return last
        shown = item.failures[:_SHOWN_ATTEMPTS] or [f"{last.kind}: {last}"]
        attempts = f"{item.attempts} attempt{'' if item.attempts == 1 else 's'}"
        wrong = "; ".join(shown).rstrip(".")
        return ReplicationError(
            f"{item.object} was not copied to buddy {self.buddy}: {attempts} in {now - item.asked_at:.1f} s, the "
            f"deadline without progress is {item.deadline_s:.1f} s; what went wrong: {wrong}. The object is "
            "intact on this node; it is offered again when its container is committed, or when asked again"
        )

    def _silent_since(self, item: Pending) -> float:
        return max(item.asked_at, item.progressed_at or 0.0)


def is_final(error: ReplicatorError) -> bool:
    """Whether trying again cannot help: the buddy, or this node, refused for good."""
    return error.kind in _FINAL


_FINAL = frozenset(
    {"StaleEpochError", "ObjectExistsError", "InvalidIdError", "ObjectNotFoundError", "UnsupportedError"}
    | {"ReplicationError", "NodeDrainingError"}
)
