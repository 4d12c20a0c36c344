"""The objects of the containers that a rank saves, by the ids that savers and loaders speak of.

A thin layer over a session: an id names a container, and the session writes attempts at it (`ContainerVersion`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from replicator.checkpoint.committing import commit, entry_of, give_up, replicate
from replicator.client.outstanding import CommitFutures, ReplicaInfo
from replicator.client.replication import ReplicationManager
from replicator.client.segments import SegmentObject
from replicator.client.session import Session, current_session, open_session
from replicator.decide.types import ManifestEntry
from replicator.errors import ConfigError
from replicator.ids import CheckpointContainerId, CheckpointObjectId, ContainerVersion, ObjectVersion
from replicator.store import unfinished
from replicator.store.paths import object_of_file
from replicator.store.reader import ObjectReader, open_object
from replicator.store.trailer import ObjectInfo

AnyObject = CheckpointObjectId | ObjectVersion


class CheckpointObjectManager:
    """Of one process. Thread-safe.

    May be pickled: the other process attaches to the same agent in the same epoch, and knows what was begun until then.
    In a forked child it raises ForkedClientError.

    Args:
        session: from `replicator.init`; default: the session of this process, made at the first use when there is
            none. All ranks must then use it together.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session
        self._versions: dict[CheckpointContainerId, ContainerVersion] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": self._session or open_session()}

    @property
    def session(self) -> Session:
        """The session it works in. Raises the errors of `replicator.init` when it has to be made."""
        if self._session is None:
            self._session = current_session()
        return self._session

    # -- attempts

    def begin(self, container: CheckpointContainerId, saver: object) -> ContainerVersion:
        """Create the container: a new attempt at it, which the other ranks `follow`. Raises like `Session.begin`."""
        return self.take_part(self.session.begin(container, saver))

    def follow(self, container: CheckpointContainerId) -> ContainerVersion:
        """The attempt that the coordinator began. Raises DeadlineExceededError when it began none."""
        return self.take_part(self.session.await_next(container))

    def catch_up(self, version: ContainerVersion) -> ContainerVersion:
        """On another rank: the coordinator's newest attempt, when it has given up `version` and begun anew."""
        return self.take_part(self.session.newer_than(version))

    def version(self, container: CheckpointContainerId) -> ContainerVersion:
        """The attempt of this process.

        Raises:
            ConfigError: it began and followed none.
        """
        try:
            return self._versions[container]
        except KeyError:
            raise ConfigError(f"{container} is not being saved; call initialize_checkpoint first") from None

    def forget(self, container: CheckpointContainerId) -> None:
        """This process has nothing more to do with its attempt at the container."""
        self._versions.pop(container, None)

    def delete_container(self, container: CheckpointContainerId) -> None:
        """Give up the attempt: its objects are dropped, on all nodes. A committed one stays."""
        version = self._versions.pop(container, None)
        if version is not None:
            self.abandon(version)

    def abandon(self, version: ContainerVersion) -> None:
        """Like `Session.abandon`; what goes wrong is logged."""
        give_up(self.session, version)

    def take_part(self, version: ContainerVersion) -> ContainerVersion:
        """What this process writes of the container belongs to this attempt from now on."""
        self._versions[version.container] = version
        return version

    # -- objects

    def acquire_buffer(self, one: AnyObject, size: int) -> SegmentObject:
        """A new object on this node, to be used in a `with` block; it grows when `size` (bytes) was too small.

        Raises:
            ConfigError: the container is not being saved. StoreFullError: no room, with numbers.
            ObjectExistsError: at the end of the block: this attempt has an object of this name with other content.
        """
        return self.session.create(self._at(one), size)

    def write_bytes(self, one: AnyObject, data: bytes) -> ObjectInfo:
        """Write a small object: it is there whole, or not at all. Raises like `acquire_buffer`."""
        with self.acquire_buffer(one, len(data)) as sink:
            sink.write(data)
        return sink.info

    def has(self, one: AnyObject) -> bool:
        """Whether this node holds it."""
        return self.session.agent.paths.object(self._at(one)).exists()

    def get_buffer(self, one: AnyObject) -> ObjectReader:
        """An object of this node, for reading.

        Raises:
            ObjectNotFoundError: it is not here. CorruptObjectError: it is damaged.
        """
        return open_object(self.session.agent.paths, self._at(one))

    def replicate(self, one: AnyObject, replication: ReplicationManager | None = None) -> list[Future[ReplicaInfo]]:
        """Have a sealed object copied to the buddies; one future for each. Trouble is logged, and in the futures.

        Raises:
            StaleEpochError: a newer incarnation of the job exists.
        """
        return replicate(self.session, [self._at(one)], replication)

    def entries(self, container: CheckpointContainerId) -> list[ManifestEntry]:
        """All objects of this process's attempt that ranks of this node wrote, whatever process it was."""
        version = self.version(container)
        try:
            names = sorted(path.name for path in self.session.agent.paths.objects_of(version).iterdir())
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            one = object_of_file(version, name)
            if one is not None:
                with self.get_buffer(one) as held:
                    found.append(entry_of(held.info))
        node_id = self.session.node.node_id
        return [entry for entry in found if entry.owner_node_id == node_id]

    def commit(
        self, version: ContainerVersion, entries: Iterable[ManifestEntry], world_size: int, resumable: bool = True
    ) -> CommitFutures:
        """On the coordinator, after every rank sealed: list all objects in a manifest, and commit it.

        Raises:
            InvalidIdError: a name occurs twice.
            ReplicatorError: the agent refused.
        """
        return commit(self.session, version, entries, world_size, resumable)

    def _at(self, one: AnyObject) -> ObjectVersion:
        return one if isinstance(one, ObjectVersion) else self.version(one.container).object(one.name)

    # -- marks of this node

    def mark_unfinished(self, container: CheckpointContainerId, local_rank: int, global_rank: int) -> None:
        """Say on this node that a rank saves the container. Raises like `store.unfinished.mark`."""
        session = self.session
        writer = unfinished.Writer(global_rank, os.getpid(), session.epoch)
        unfinished.mark(session.agent.paths, container, local_rank, writer)

    def mark_finished(self, container: CheckpointContainerId, local_rank: int) -> bool:
        """Take the mark away; whether there was one."""
        return unfinished.unmark(self.session.agent.paths, container, local_rank)

    def unfinished(self) -> dict[tuple[CheckpointContainerId, int], unfinished.Writer | None]:
        """The marks of the job on this node, by container and local rank."""
        return unfinished.marks(self.session.agent.paths, self.session.job)
