"""One save of a checkpoint whose objects are any bytes: write them, have them copied, commit. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from replicator.checkpoint.committing import commit, entry_of, give_up, replicate, wait_for_commit
from replicator.client.outstanding import CommitFutures, ReplicaInfo
from replicator.client.segments import SegmentObject
from replicator.client.session import Session
from replicator.decide.types import ManifestEntry
from replicator.ids import ContainerVersion

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class PlainSave:
    """Of one rank at one version. `write` is thread-safe.

    Attributes:
        replica_futures: of what this rank wrote, one per object and buddy.
    """

    def __init__(self, session: Session, version: ContainerVersion) -> None:
        self._session = session
        self.version = version
        self.replica_futures: list[Future[ReplicaInfo]] = []

    def write(self, name: str, size: int, fill: Callable[[SegmentObject], None]) -> ManifestEntry:
        """A new object, sealed when `fill` has written it; `size` in bytes as far as known.

        Raises:
            StoreFullError: no room, with numbers.
            StaleEpochError: a newer incarnation of the job exists.
        """
        with self._session.create(self.version.object(name), size) as sink:
            fill(sink)
        return entry_of(sink.info)

    def write_many(self, contents: Sequence[tuple[str, ReadableBuffer]]) -> list[ManifestEntry]:
        """New objects whose bytes are here already, (name, bytes) of each. Raises like `Session.create_many`."""
        infos = self._session.create_many([(self.version.object(name), data) for name, data in contents])
        return [entry_of(info) for info in infos]

    def replicate(self, names: Sequence[str]) -> None:
        """Have sealed objects copied to the buddies. Trouble is logged, and in the futures.

        Raises:
            StaleEpochError: a newer incarnation of the job exists.
        """
        self.replica_futures += replicate(self._session, [self.version.object(name) for name in names])

    def commit(self, entries: Iterable[ManifestEntry], world_size: int, *, resumable: bool = True) -> CommitFutures:
        """On the coordinator, after every rank sealed: list all objects in a manifest, and commit it.

        Raises:
            InvalidIdError: a name occurs twice.
            ReplicatorError: the agent refused.
        """
        futures = commit(self._session, self.version, entries, world_size, resumable)
        wait_for_commit(self._session, self.version, futures, "seal", 0)
        return futures

    def give_up(self) -> None:
        """The save has failed, and nothing of it need be kept. What goes wrong is logged."""
        give_up(self._session, self.version)
