"""What every save does with objects that are sealed: copies, one commit for all of them, and what the caller waits for.

A save may have several parts, each a checkpoint of its own under a prefix ("model/.metadata", "optim/.metadata"), in
one container: then one manifest covers every object of the step, whatever wrote it (F07).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from replicator.client.outstanding import CommitFutures, ReplicaInfo
from replicator.client.replication import ReplicationManager
from replicator.client.session import Session
from replicator.decide.types import Manifest, ManifestEntry
from replicator.errors import ConfigError, DeadlineExceededError, ReplicatorError, SaveSkippedError, StaleEpochError
from replicator.ids import CheckpointContainerId, ContainerVersion, ObjectVersion
from replicator.store.trailer import ObjectInfo

logger = logging.getLogger("replicator.checkpoint")

WaitFor = Literal["seal", "commit", "protected"]
WAITS = ("seal", "commit", "protected")


def check_options(
    wait_for: WaitFor, limit_s: float | None = None, limit_name: str = "wait_deadline_s", thread_count: int = 1
) -> None:
    """What a save waits for, for how long at most (None: as long as is usual), and with how many threads it writes.

    Raises:
        ConfigError: something else.
    """
    if wait_for not in WAITS:
        raise ConfigError(f"wait_for: expected one of {', '.join(WAITS)}, found {wait_for!r}")
    if limit_s is not None and not limit_s > 0:
        raise ConfigError(f"{limit_name}: expected more than 0 seconds, or None, found {limit_s!r}")
    if thread_count < 1:
        raise ConfigError(f"thread_count: expected 1 or more, found {thread_count}")


def entry_of(info: ObjectInfo) -> ManifestEntry:
    """How a manifest lists a sealed object."""
    return ManifestEntry(info.object.name, info.size, info.crc32c, info.owner_node_id)


def replicate(
    session: Session, objects: Sequence[ObjectVersion], replication: ReplicationManager | None = None
) -> list[Future[ReplicaInfo]]:
    """Have sealed objects of one version copied to the buddies; one future per object and buddy.

    Trouble is logged, and in the futures: it is no trouble of the save (F40).

    Args:
        replication: default: that of the session.

    Raises:
        StaleEpochError: a newer incarnation of the job exists.
    """
    try:
        futures = (replication or session.replication).async_replicate_many(objects)
    except StaleEpochError:
        raise
    except ReplicatorError as error:
        what = str(objects[0]) if len(objects) == 1 else f"{len(objects)} objects of {objects[0].version}"
        logger.warning("on this node only: %s: %s", what, error)
        return []
    found = [future for of_one in futures.values() for future in of_one]
    for future in found:
        future.add_done_callback(log_failure(session))
    return found


def commit(
    session: Session, version: ContainerVersion, entries: Iterable[ManifestEntry], world_size: int, resumable: bool
) -> CommitFutures:
    """The coordinator commits what all ranks have sealed. Raises the errors of `LocalAgent.commit`."""
    manifest = Manifest(
        version=version,
        epoch=session.epoch,
        coordinator_node_id=session.node.node_id,
        replicas=session.replicas,
        world_size=world_size,
        created_unix_ms=time.time_ns() // 1_000_000,
        entries=tuple(sorted(entries, key=lambda entry: entry.name)),
        resumable=resumable,
    )
    return session.commit(manifest)


def wait_for_commit(
    session: Session, version: ContainerVersion, futures: CommitFutures, wait_for: WaitFor, deadline_s: float
) -> None:
    """Return when the save is as safe as the caller wants it; with `seal` at once, and trouble is logged.

    Raises:
        CommitError, ReplicationError: what went wrong.
        DeadlineExceededError: it took longer than `deadline_s`.
    """
    if wait_for == "seal":
        futures.committed.add_done_callback(log_failure(session))
        futures.protected.add_done_callback(_log_skip)
        return
    future = futures.committed if wait_for == "commit" else futures.protected
    try:
        future.result(deadline_s)
    except TimeoutError as error:
        if isinstance(error, ReplicatorError):
            raise
        raise DeadlineExceededError.of(
            f"{version} to be {'committed' if wait_for == 'commit' else 'protected'}",
            "the agents of the job",
            deadline_s,
        ) from None


def give_up(session: Session, version: ContainerVersion) -> None:
    """On the coordinator: the save has failed for all ranks, and what they wrote need not be kept."""
    try:
        session.abandon(version)
    except ReplicatorError as error:
        logger.warning("%s failed, and what was written of it is kept: %s", version, error)


def log_failure(session: Session) -> Callable[[Future[Any]], None]:
    """A callback that logs what a future of this session raised."""

    def log(future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, SaveSkippedError):
            return  # said once, of the whole container
        # After the end of the session nobody listens any more; the agents go on.
        if error is not None and not session.agent.closed:
            logger.warning("%s", error)

    return log


def _log_skip(future: Future[Any]) -> None:
    error = future.exception()
    if isinstance(error, SaveSkippedError):
        logger.warning("%s", error)


class SaveInParts:
    """One save of a container by several writers, one after another, and one commit at the end.

    Every rank makes one for each save and gives it to its writers (`part_of`). The coordinator, which is the same for
    all parts, collects what was sealed, and says `commit` or `give_up`. Not thread-safe. A container that was begun and
    not committed when this object is gone counts as failed.

    Attributes:
        version: the generation of this save; None before a rank has come to its first part.
    """

    def __init__(self, session: Session, container: CheckpointContainerId, *, resumable: bool = True) -> None:
        self.session = session
        self.container = container
        self.resumable = resumable
        self.version: ContainerVersion | None = None
        self._entries: dict[str, ManifestEntry] = {}

    def begin(self) -> ContainerVersion:
        """The generation of this save, the same for all parts. Raises the errors of `Session.begin`."""
        if self.version is None:
            self.version = self.session.begin(self.container, saver=self)
        return self.version

    def add(self, entries: Iterable[ManifestEntry]) -> None:
        """Objects that were sealed. Raises ConfigError for a name that another part has taken."""
        for entry in entries:
            if self._entries.setdefault(entry.name, entry) != entry:
                raise ConfigError(
                    f"{self.container}: two parts of the save wrote {entry.name!r}; give each a prefix of its own"
                )

    def commit(self, world_size: int) -> CommitFutures:
        """Raises ConfigError when nothing was saved, and the errors of `LocalAgent.commit`."""
        if self.version is None or not self._entries:
            raise ConfigError(f"{self.container}: no part was saved, so there is nothing to commit")
        return commit(self.session, self.version, self._entries.values(), world_size, self.resumable)

    def give_up(self) -> None:
        """The save has failed for all ranks. Nothing happens when it was not begun."""
        if self.version is not None:
            give_up(self.session, self.version)
