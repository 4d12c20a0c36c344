"""What this process asked its agent for and has not heard the end of: replications and commits.

The agent answers through events. When it is restarted it forgot what it was asked, and is asked again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeVar

from replicator.errors import ReplicationError, ReplicatorError, from_wire
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.v1 import local_pb2
from replicator.wire import object_from_pb, version_from_pb

MAX_OBJECTS = 1 << 18
MAX_COMMITS = 64

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A copy that a buddy verified and sealed. `lane` is empty when it had the object already."""

    object: ObjectVersion
    buddy_node_id: str
    size: int
    crc32c: int
    lane: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """A container whose manifest is stored on enough nodes (`stored_on`, as far as known at that time)."""

    version: ContainerVersion
    stored_on: tuple[str, ...]
    is_protected: bool


@dataclass(slots=True)
class Replication:
    """Of one object. Only `Outstanding` changes it."""

    epoch: int
    futures: dict[str, Future[ReplicaInfo]] = field(default_factory=dict)
    buddies: tuple[str, ...] | None = None  # None: the agent has not named them yet
    asked_at: float = field(default_factory=time.monotonic)

    def future(self, buddy: str) -> Future[ReplicaInfo]:
        if buddy not in self.futures:
            self.futures[buddy] = Future()
            self.futures[buddy].set_running_or_notify_cancel()
        return self.futures[buddy]

    @property
    def finished(self) -> bool:
        return self.buddies is not None and all(b in self.futures and self.futures[b].done() for b in self.buddies)


@dataclass(frozen=True, slots=True)
class CommitFutures:
    """`committed`: the manifest is on enough nodes. `protected`: also, every object is with all its buddies."""

    committed: Future[CommitInfo]
    protected: Future[CommitInfo]
    asked_at: float = field(default_factory=time.monotonic)


def _new_future() -> Future[CommitInfo]:
    future: Future[CommitInfo] = Future()
    future.set_running_or_notify_cancel()
    return future


class Outstanding:
    """Thread-safe. Futures are resolved outside the lock, so their callbacks may call in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replications: dict[ObjectVersion, Replication] = {}
        self._commits: dict[ContainerVersion, tuple[local_pb2.CommitRequest, CommitFutures]] = {}

    def expect_replicas(self, objects: Sequence[ObjectVersion], epoch: int) -> dict[ObjectVersion, Replication]:
        """Call before the agent is asked: its events may overtake its reply. Give the result to `name_buddies`."""
        result: dict[ObjectVersion, Replication] = {}
        dropped: list[tuple[ObjectVersion, Replication]] = []
        with self._lock:
            for one in objects:
                entry = self._replications.get(one)
                if entry is None or entry.finished:
                    entry = self._replications[one] = Replication(epoch)
                result[one] = entry
            while len(self._replications) > MAX_OBJECTS:
                oldest = next(iter(self._replications))
                dropped.append((oldest, self._replications.pop(oldest)))
        for one, entry in dropped:
            error = ReplicationError(f"gave up waiting for copies of {one}: more than {MAX_OBJECTS} are outstanding")
            _settle(entry.futures.values(), error)
        return result

    def name_buddies(
        self, entries: Mapping[ObjectVersion, Replication], buddies: Sequence[str]
    ) -> dict[ObjectVersion, list[Future[ReplicaInfo]]]:
        """Which nodes will hold copies. The futures of each object, one per buddy in order."""
        result: dict[ObjectVersion, list[Future[ReplicaInfo]]] = {}
        retired: list[tuple[ObjectVersion, Future[ReplicaInfo]]] = []
        with self._lock:
            for one, entry in entries.items():
                entry.buddies = tuple(buddies)
                result[one] = [entry.future(buddy) for buddy in buddies]
                retired += [(one, entry.futures.pop(buddy)) for buddy in entry.futures.keys() - set(buddies)]
                if entry.finished and self._replications.get(one) is entry:
                    del self._replications[one]
        for one, future in retired:
            _settle([future], ReplicationError(f"{one} is no longer meant for that node: the buddies changed"))
        return result

    def fail_replicas(self, entries: Mapping[ObjectVersion, Replication], error: ReplicatorError) -> None:
        """The agent refused the request."""
        with self._lock:
            for one, entry in entries.items():
                if self._replications.get(one) is entry:
                    del self._replications[one]
        for entry in entries.values():
            _settle(list(entry.futures.values()), error)

    def expect_commit(self, version: ContainerVersion, request: local_pb2.CommitRequest) -> CommitFutures:
        """The futures of a commit that is about to be asked for; the same ones when it is being asked for already."""
        dropped: CommitFutures | None = None
        with self._lock:
            known = self._commits.get(version)
            if known is not None:
                return known[1]
            futures = CommitFutures(_new_future(), _new_future())
            self._commits[version] = (request, futures)
            if len(self._commits) > MAX_COMMITS:
                dropped = self._commits.pop(next(iter(self._commits)))[1]
        if dropped is not None:
            error = ReplicationError(f"gave up waiting for a commit: more than {MAX_COMMITS} are outstanding")
            _settle([dropped.committed, dropped.protected], error)
        return futures

    def fail_commit(self, version: ContainerVersion, error: ReplicatorError) -> None:
        """The agent refused the request."""
        with self._lock:
            known = self._commits.pop(version, None)
        if known is not None:
            _settle([known[1].committed, known[1].protected], error)

    def on_event(self, event: local_pb2.AttachEvent) -> None:
        """Resolve what the event tells of. Events of things nobody waits for are ignored."""
        kind = event.WhichOneof("event")
        if kind == "replication":
            self._on_replication(event.replication)
        elif kind == "replicated":
            self._on_replicated(event.replicated)
        elif kind == "commit":
            self._on_commit(event.commit)

    def _on_replication(self, event: local_pb2.ReplicationEvent) -> None:
        one = object_from_pb(event.object)
        with self._lock:
            entry = self._replications.get(one)
            if entry is None:
                return
            future = entry.future(event.buddy_node_id)
        if event.ok:
            info = ReplicaInfo(
                object=one,
                buddy_node_id=event.buddy_node_id,
                size=event.verified.size_bytes,
                crc32c=event.verified.crc32c,
                lane=event.lane,
                duration_s=event.duration_ms / 1000,
            )
            _settle([future], info)
        else:
            _settle([future], from_wire(event.error_kind, event.error_message))
        with self._lock:
            if self._replications.get(one) is entry and entry.finished:
                del self._replications[one]

    def _on_replicated(self, many: local_pb2.ReplicatedObjects) -> None:
        """Copies of many objects of one container on one buddy."""
        version = version_from_pb(many.container)
        buddy, lane = many.buddy_node_id, many.lane
        ready: list[tuple[ObjectVersion, Replication, Future[ReplicaInfo], ReplicaInfo]] = []
        with self._lock:
            for name, size, crc, milliseconds in zip(
                many.names, many.size_bytes, many.crc32c, many.duration_ms, strict=True
            ):
                one = version.object(name)
                entry = self._replications.get(one)
                if entry is not None:
                    info = ReplicaInfo(one, buddy, size, crc, lane, milliseconds / 1000)
                    ready.append((one, entry, entry.future(buddy), info))
        for _, _, future, info in ready:
            _settle((future,), info)
        with self._lock:
            for one, entry, _, _ in ready:
                if entry.finished and self._replications.get(one) is entry:
                    del self._replications[one]

    def _on_commit(self, event: local_pb2.CommitEvent) -> None:
        version = version_from_pb(event.container)
        with self._lock:
            known = self._commits.get(version)
            if known is None:
                return
            if event.is_protected or not event.ok:
                del self._commits[version]
        futures = known[1]
        if not event.ok:
            _settle([futures.committed, futures.protected], from_wire(event.error_kind, event.error_message))
            return
        info = CommitInfo(version, tuple(event.stored_on), event.is_protected)
        _settle([futures.committed], info)
        if event.is_protected:
            _settle([futures.protected], info)

    def replications(self) -> dict[tuple[str, int], list[ObjectVersion]]:
        """Objects to ask for again, by job and epoch."""
        result: dict[tuple[str, int], list[ObjectVersion]] = {}
        with self._lock:
            for one, entry in self._replications.items():
                result.setdefault((one.version.container.job, entry.epoch), []).append(one)
        return result

    def commits(self) -> dict[ContainerVersion, local_pb2.CommitRequest]:
        """Commits to ask for again, oldest first."""
        with self._lock:
            return {version: request for version, (request, _) in self._commits.items()}

    def fail_late(self, since: float, limit_s: float, make_error: Callable[[str], ReplicatorError]) -> None:
        """Resolve with an error what has waited for `limit_s` while there was no agent, that is since `since`.

        Commits stay to be asked for again: the next agent may still make them visible.
        """
        now = time.monotonic()
        with self._lock:
            late = {
                one: entry for one, entry in self._replications.items() if now - max(entry.asked_at, since) >= limit_s
            }
            for one in late:
                del self._replications[one]
            commits = {
                version: futures
                for version, (_, futures) in self._commits.items()
                if now - max(futures.asked_at, since) >= limit_s
            }
        for one, entry in late.items():
            _settle(list(entry.futures.values()), make_error(f"copies of {one}"))
        for version, futures in commits.items():
            waiting = [future for future in (futures.committed, futures.protected) if not future.done()]
            if waiting:
                _settle(waiting, make_error(f"the commit of {version}"))

    def fail_all(self, make_error: Callable[[str], ReplicatorError]) -> None:
        """Resolve everything with an error; `make_error` gets what was waited for."""
        with self._lock:
            replications, self._replications = self._replications, {}
            commits, self._commits = self._commits, {}
        for one, entry in replications.items():
            _settle(entry.futures.values(), make_error(f"copies of {one}"))
        for version, (_, futures) in commits.items():
            _settle([futures.committed, futures.protected], make_error(f"the commit of {version}"))


def _settle(futures: Iterable[Future[ResultT]], outcome: ResultT | BaseException) -> None:
    for future in futures:
        try:
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        except InvalidStateError:
            pass  # resolved before, or cancelled by its owner
