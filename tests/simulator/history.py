"""What the job saw, in order, and whether a checkpoint store that keeps its promises can have behaved like that.

The check knows nothing of agents, placement or the wire: only what was promised to whom, and what was lost since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from replicator.decide.types import recency
from replicator.ids import ContainerVersion


@dataclass(frozen=True)
class Opened:
    """A new incarnation got its epoch.

    Attributes:
        known: the highest epoch of the job that any node knew when it was asked for.
        calm: nothing was wrong anywhere meanwhile.
    """

    begin: float
    end: float
    epoch: int
    known: int
    calm: bool


@dataclass(frozen=True)
class CommitAsked:
    """From now on the container may become visible.

    Attributes:
        resumable: a job can go on from it; not from the model alone, which nobody is promised.
    """

    at: float
    version: ContainerVersion
    replicas: int
    resumable: bool = True


@dataclass(frozen=True)
class Committed:
    """The coordinator was told of success."""

    at: float
    version: ContainerVersion


@dataclass(frozen=True)
class Protected:
    """Every object has all its copies, says the coordinator's agent."""

    at: float
    version: ContainerVersion


@dataclass(frozen=True)
class Damaged:
    """Something of the container that was on a node is lost or has other bits."""

    at: float
    version: ContainerVersion
    node: str


@dataclass(frozen=True)
class Restored:
    """All ranks of an incarnation loaded a checkpoint, or found that there is none (version None).

    Attributes:
        calm: nothing was wrong anywhere from the lookup on.
        by_rank: what each rank loaded.
        wrong: names of objects whose bytes were not those saved.
    """

    begin: float
    end: float
    epoch: int
    version: ContainerVersion | None
    calm: bool
    by_rank: tuple[ContainerVersion | None, ...] = ()
    wrong: tuple[str, ...] = ()


Event = Opened | CommitAsked | Committed | Protected | Damaged | Restored


@dataclass
class History:
    """Of one job. Events are recorded when they end."""

    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        self.events.append(event)


def problems(history: History) -> Iterator[str]:
    """What cannot have happened, in words."""
    yield from _epochs(history)
    asked = {event.version: event for event in history.events if isinstance(event, CommitAsked)}
    for event in history.events:
        if isinstance(event, Committed | Protected) and event.version not in asked:
            yield f"{event.version} was committed, and nobody had asked for it"
        if isinstance(event, Restored):
            yield from _restore(event, history, asked)


def _epochs(history: History) -> Iterator[str]:
    for event in history.events:
        if isinstance(event, Opened) and event.calm and event.epoch <= event.known:
            yield f"epoch {event.epoch} was given at {event.end:.3f} s, while a node knew epoch {event.known} already"


def _restore(event: Restored, history: History, asked: dict[ContainerVersion, CommitAsked]) -> Iterator[str]:
    version = event.version
    if event.wrong:
        yield f"{version} was restored with other bytes than were saved: {', '.join(event.wrong)}"
    if any(one != version for one in event.by_rank):
        yield f"ranks restored different checkpoints: {sorted(set(map(str, event.by_rank)))}"
    if version is not None:
        if version not in asked or asked[version].at > event.end:
            yield f"{version} was restored, and never committed"
        elif not asked[version].resumable:
            yield f"{version} was restored, and is the model alone: no job goes on from it"
        if version.epoch > event.epoch:
            yield f"epoch {event.epoch} restored {version}, of a later one"
    if not event.calm:
        return
    promised = newest_promised(history, event.begin, event.end, asked)
    if promised is not None and (version is None or recency(version) < recency(promised)):
        yield f"{version} was restored, but {promised} is newer, was protected, and lost no more than it survives"


def newest_promised(
    history: History, begin: float, end: float, asked: dict[ContainerVersion, CommitAsked]
) -> ContainerVersion | None:
    """The newest container protected before `begin`, unless more nodes than it survives were lost before `end`.

    Of those that a job can go on from: how many newer ones are the model alone makes no difference.
    """
    protected = [
        event.version
        for event in history.events
        if isinstance(event, Protected)
        and event.at < begin
        and (event.version not in asked or asked[event.version].resumable)
    ]
    newest = max(protected, key=recency, default=None)
    if newest is None or newest not in asked:
        return None
    lost = {
        event.node
        for event in history.events
        if isinstance(event, Damaged) and event.version == newest and event.at <= end
    }
    return newest if len(lost) <= asked[newest].replicas else None
