"""One attempt at a checkpoint whose objects are any bytes: write them, have them copied, commit. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from replicator.client.outstanding import CommitFutures, ReplicaInfo
from replicator.client.segments import SegmentObject
from replicator.client.session import Session
from replicator.decide.types import Manifest, ManifestEntry
from replicator.errors import ReplicatorError, SaveSkippedError, StaleEpochError
from replicator.ids import ContainerVersion

logger = logging.getLogger("replicator.checkpoint")


class Attempt:
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
        info = sink.info
        return ManifestEntry(name, info.size, info.crc32c, info.owner_node_id)

    def replicate(self, names: Sequence[str]) -> None:
        """Have sealed objects copied to the buddies. Trouble is logged, and in the futures.

        Raises:
            StaleEpochError: a newer incarnation of the job exists.
        """
        try:
            futures = self._session.replication.async_replicate_many([self.version.object(name) for name in names])
        except StaleEpochError:
            raise
        except ReplicatorError as error:
            logger.warning("%d objects of %s are on this node only: %s", len(names), self.version, error)
            return
        for of_one in futures.values():
            self.replica_futures += of_one
            for future in of_one:
                future.add_done_callback(self._log_failure)

    def commit(self, entries: Iterable[ManifestEntry], world_size: int, *, resumable: bool = True) -> CommitFutures:
        """On the coordinator, after every rank sealed: list all objects in a manifest, and commit it.

        Raises:
            InvalidIdError: a name occurs twice.
            ReplicatorError: the agent refused.
        """
        manifest = Manifest(
            version=self.version,
            epoch=self._session.epoch,
            coordinator_node_id=self._session.node.node_id,
            replicas=self._session.replicas,
            world_size=world_size,
            created_unix_ms=time.time_ns() // 1_000_000,
            entries=tuple(sorted(entries, key=lambda entry: entry.name)),
            resumable=resumable,
        )
        futures = self._session.commit(manifest)
        futures.committed.add_done_callback(self._log_failure)
        futures.protected.add_done_callback(self._log_skip)
        return futures

    def give_up(self) -> None:
        """The attempt has failed, and nothing of it need be kept. What goes wrong is logged."""
        try:
            self._session.abandon(self.version)
        except ReplicatorError as error:
            logger.warning("%s failed, and what was written of it is kept: %s", self.version, error)

    def _log_failure(self, future: Future[Any]) -> None:
        error = future.exception()
        # A skip is said once, of the whole container. After the end of the session nobody listens; the agents go on.
        if error is not None and not isinstance(error, SaveSkippedError) and not self._session.agent.closed:
            logger.warning("%s", error)

    def _log_skip(self, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, SaveSkippedError):
            logger.warning("%s", error)
