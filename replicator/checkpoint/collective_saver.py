"""The stages of a save where collectives of the caller carry what the ranks have to tell each other."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from replicator.checkpoint.buckets import LateBucket, ObjectWriteBucket
from replicator.checkpoint.committing import SaveInParts
from replicator.checkpoint.default_saver import Constant, DefaultCheckpointSaver, OneSave, no_barrier
from replicator.checkpoint.names import folder_of
from replicator.checkpoint.objects import CheckpointObjectManager
from replicator.client.outstanding import CommitFutures, CommitInfo, ReplicaInfo
from replicator.client.session import Session
from replicator.decide.types import ManifestEntry
from replicator.errors import ConfigError
from replicator.ids import CheckpointContainerId, CheckpointObjectId, ContainerVersion


class CollectiveSaver(DefaultCheckpointSaver):
    """Of a `ReplicatedStorageWriter`, whose save is one of `torch.distributed.checkpoint`.

    It needs no word in the ranks' store and no barrier: plans bring the attempt to the ranks, and results what they
    sealed to the coordinator. Whoever does not coordinate is done when its objects are sealed, so `finalize_checkpoint`
    returns at once there. Ranks that are lost are the caller's to tell, so there are no marks.

    Attributes:
        coordinates: whether this rank begins and commits.
        gathered: on the coordinator, what the ranks say they sealed; with the number of them in `world_size`.
        futures: of the commit, on the coordinator. replica_futures: of this rank's objects.
        prefix: the folder of its objects, or nothing. part_of: the save that this is a part of, and that commits it.
    """

    def __init__(self, session: Session | None, prefix: str, part_of: SaveInParts | None) -> None:
        super().__init__(int, int, no_barrier, CheckpointObjectManager(session))
        self.prefix = folder_of(prefix)
        self.part_of = part_of
        self.restart(False, True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "futures": None, "replica_futures": [], "_save": None}

    def restart(self, coordinates: bool, resumable: bool) -> None:
        """What is known of an earlier save is of no use any more."""
        if self._save is not None:
            self._objects.forget(self._save.version.container)
        self.coordinates = coordinates
        self._resumable = resumable
        self._told: ContainerVersion | None = None
        self._save = None
        self.gathered: list[ManifestEntry] = []
        self.world_size = 1
        self.futures: CommitFutures | None = None
        self.replica_futures: list[Future[ReplicaInfo]] = []

    def take_turn(self, container: CheckpointContainerId, told: ContainerVersion, rank: int) -> ContainerVersion:
        """This rank's number, and the attempt that it writes: what the coordinator told it, maybe long ago."""
        self._global_rank = Constant(rank)
        if not self.coordinates:
            self._told = told
            self.initialize_checkpoint(container)
        return self.version_of(container)

    def version_of(self, container: CheckpointContainerId) -> ContainerVersion:
        """The attempt. Raises ConfigError when the container is not being saved."""
        return self._begun(container).version

    def sealed(self, container: CheckpointContainerId) -> tuple[ManifestEntry, ...]:
        """What this rank has sealed; unless it coordinates, its part is done."""
        entries = tuple(self._begun(container).sealed.values())
        if not self.coordinates:
            self.finalize_checkpoint(container)
        return entries

    @contextmanager
    def giving_up(self, version: ContainerVersion) -> Iterator[None]:
        """An error of the coordinator's is one of the save."""
        try:
            yield
        except Exception:
            self._give_up(version)
            raise

    @property
    def session(self) -> Session:
        """The session it saves into. Raises the errors of `replicator.init` when it has to be made."""
        return self._objects.session

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy on the CPU of a state that need not be flat."""
        return self._stager.stage(state_dict)

    def async_replicate_object(self, object_id: CheckpointObjectId) -> list[Future[ReplicaInfo]]:
        futures = super().async_replicate_object(object_id)
        self.replica_futures += futures
        return futures

    # -- how the ranks come together

    def _mark(self, container: CheckpointContainerId) -> None:
        pass

    def _unmark(self, container: CheckpointContainerId) -> None:
        pass

    def _begin(self, container: CheckpointContainerId) -> ContainerVersion:
        session, part = self.session, self.part_of
        if self._told is None:
            return session.begin(container, saver=self) if part is None else part.begin()
        # A planner that caches plans gives back that of an earlier save; then the coordinator is asked.
        version = (part and part.version) or session.follow(container, self._told)
        if version.container != container:
            raise ConfigError(f"the coordinator saves {version.container}, this rank was told to save {container}")
        if part is not None:
            part.version = version
        return version

    def _newest(self, version: ContainerVersion) -> ContainerVersion:
        return version

    def _gather(self, save: OneSave) -> list[ManifestEntry] | None:
        if not self.coordinates:
            return None
        return list({entry.name: entry for entry in (*self.gathered, *save.sealed.values())}.values())

    def _commit(self, version: ContainerVersion, entries: list[ManifestEntry]) -> Future[CommitInfo] | None:
        if self.part_of is not None:
            self.part_of.add(entries)
            return None
        self.futures = self._objects.commit(version, entries, self.world_size, self._resumable)
        return self.futures.protected

    def _give_up(self, version: ContainerVersion) -> None:
        if self.coordinates:
            self._objects.abandon(version)

    def _serialised(self, metadata: Metadata) -> bytes:
        """Smaller: one rank writes the metadata, so that nobody has to write the same."""
        return pickle.dumps(metadata)

    def _bucket(self, container: CheckpointContainerId, prefix: str, number: int) -> ObjectWriteBucket:
        name = f"{prefix}_{number}.distcp"
        return LateBucket(CheckpointObjectId(container, self.prefix + name), name)
