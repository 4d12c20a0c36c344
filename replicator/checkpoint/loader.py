"""The stages of a load: which checkpoint, its metadata, and its tensors, from wherever they are."""

from __future__ import annotations

import abc
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from replicator.checkpoint.fetch import Fetcher, Pulled
from replicator.checkpoint.loading import Reading, SavedTensors, reading_of
from replicator.checkpoint.names import METADATA_NAME, CheckpointId, container_of
from replicator.checkpoint.objects import CheckpointObjectManager
from replicator.client.plan import Plan
from replicator.client.replication import ReplicationManager
from replicator.client.retrieval import recoverable
from replicator.client.session import AGREEMENT_DEADLINES
from replicator.errors import ConfigError, CorruptObjectError, ObjectNotFoundError
from replicator.ids import CheckpointContainerId, CheckpointObjectId, validate_job
from replicator.native import COPY_THREADS


class CheckpointLoader(abc.ABC):
    """See `DefaultCheckpointLoader`, which does what is said here."""

    @abc.abstractmethod
    def read_metadata(self, checkpoint_id: CheckpointId, object_name: str = METADATA_NAME) -> Metadata:
        """What the checkpoint has, as it was given to `write_metadata`."""

    @abc.abstractmethod
    def read_data(
        self,
        object_id: CheckpointObjectId,
        read_items: Sequence[ReadItem],
        planner: LoadPlanner,
        storage_data: Mapping[MetadataIndex, _StorageInfo],
    ) -> None:
        """Read items of one object, and hand them to the planner.

        Args:
            storage_data: where each item is, from the metadata.
        """

    @abc.abstractmethod
    def get_latest_complete_checkpoint(self, base: str) -> CheckpointContainerId | None:
        """The newest checkpoint that can be loaded, the same on all ranks; None when there is none.

        Args:
            base: what the containers are in: the job.
        """

    @abc.abstractmethod
    def get_candidate_checkpoints(self, base: str) -> list[CheckpointContainerId]:
        """All checkpoints that can be loaded, newest first, the same on all ranks."""


class DefaultCheckpointLoader(CheckpointLoader):
    """From the memory of the nodes. Not thread-safe.

    What this node does not hold comes from the nodes that hold it: byte ranges where less than half of an object is
    wanted, as it happens when a job comes back with another number of ranks; else the object, which then stays here.
    Every byte is checked against the checksums of the committed manifest before the planner has it.

    Every rank must call `get_latest_complete_checkpoint`, `get_candidate_checkpoints`, and `read_metadata` of another
    checkpoint than that of the last plan: these agree on one answer.

    Args:
        ckpt_obj_manager: its session is the one to load in.
        replication_manager: brings whole checkpoints for `retrieve`; default: that of the session.
        threads: that copy and check; default: as many as there are processors, at most 4.
        plan: from `session.lookup()`, maybe of another job: what to load.

    Attributes:
        plan: what was looked up last. pulled: what other nodes had to send of it to this rank.
    """

    def __init__(
        self,
        ckpt_obj_manager: CheckpointObjectManager,
        replication_manager: ReplicationManager | None = None,
        *,
        threads: int | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._objects = ckpt_obj_manager
        self._replication = replication_manager
        self._threads = threads or COPY_THREADS
        self.plan = plan
        self._saved: SavedTensors | None = None
        self.pulled: list[Pulled] = []

    def get_latest_complete_checkpoint(self, base: str) -> CheckpointContainerId | None:
        """Raises like `Session.lookup`. What was found, `read_metadata` and `read_data` go on with."""
        self._check_base(base)
        self.use(self._objects.session.lookup())
        return None if self.plan is None else self.plan.container

    def get_candidate_checkpoints(self, base: str) -> list[CheckpointContainerId]:
        """Committed, and each object is verified on a node that answers. Raises like `Session.lookup`."""
        self._check_base(base)
        session = self._objects.session

        def ask(_: object) -> bytes:
            found = recoverable(session.agent, session.job, session.deadline_s / 3)
            return json.dumps([version.container.step for version in found]).encode()

        answer = session.ranks.agree("the list of checkpoints", bytes, ask, AGREEMENT_DEADLINES * session.deadline_s)
        steps = dict.fromkeys(json.loads(answer))
        return [CheckpointContainerId(session.job, step) for step in steps]

    def read_metadata(self, checkpoint_id: CheckpointId, object_name: str = METADATA_NAME) -> Metadata:
        """Raises NoRecoverableCheckpointError when it cannot be loaded, with the reason, and like `read_data`."""
        self._look_up(checkpoint_id)
        with self._fetcher() as fetcher:
            metadata = pickle.loads(fetcher.read_bytes(object_name))
            self.pulled += fetcher.pulled
        if not isinstance(metadata, Metadata):
            name = f"{self._required().version}/{object_name}"
            raise CorruptObjectError(f"{name} is a {type(metadata).__name__}, not DCP's Metadata")
        self._saved = SavedTensors(metadata)
        return metadata

    def read_data(
        self,
        object_id: CheckpointObjectId,
        read_items: Sequence[ReadItem],
        planner: LoadPlanner,
        storage_data: Mapping[MetadataIndex, _StorageInfo],
    ) -> None:
        """The metadata of the checkpoint must have been read before.

        Raises:
            ConfigError: it was not, or an item is of another object.
            ObjectNotFoundError: the checkpoint has no such object.
            CorruptObjectError: no holder has bytes that match their checksums; what was being read is all zeros then.
        """
        if self.plan is None or self.plan.container != object_id.container:
            raise ConfigError(f"read_data of {object_id} was called before read_metadata of its checkpoint")
        for item in read_items:
            info = storage_data.get(item.storage_index)
            if info is not None and info.relative_path != object_id.name:
                raise ConfigError(
                    f"key {item.storage_index.fqn!r} is in {info.relative_path!r}, and not in {object_id.name!r}"
                )
        self.read_items(read_items, planner, storage_data)

    def read_items(
        self,
        read_items: Iterable[ReadItem],
        planner: LoadPlanner,
        storage_data: Mapping[MetadataIndex, Any],
        prefix: str = "",
    ) -> None:
        """Items of any objects, in one go, which is faster than one by one. Raises like `read_data`.

        Args:
            prefix: what the names of the objects have beside what the metadata say, for instance "model/".
        """
        if self._saved is None:
            raise ConfigError("items are to be read, and read_metadata of their checkpoint was not called before")
        by_object: dict[str, list[Reading]] = {}
        for item in read_items:
            info: _StorageInfo | None = storage_data.get(item.storage_index)
            if info is None:
                raise ObjectNotFoundError(f"key {item.storage_index.fqn!r} is in no object of the checkpoint")
            by_object.setdefault(prefix + info.relative_path, []).append(reading_of(item, info, self._saved))
        with self._fetcher() as fetcher:
            fetcher.read(by_object, planner)
            self.pulled += fetcher.pulled

    def retrieve(self, checkpoint_id: CheckpointId) -> None:
        """Bring all objects of a checkpoint into this node's store, verified. Every rank must call it."""
        self._look_up(checkpoint_id)
        (self._replication or self._objects.session.replication).sync_bulk_retrieve(self._required())

    def _look_up(self, checkpoint_id: CheckpointId) -> None:
        if self.plan is not None and checkpoint_id == self.plan.container:
            return  # maybe of another job
        session = self._objects.session
        container = container_of(checkpoint_id, session.job)
        if self.plan is None or self.plan.container != container:
            self.use(session.lookup(container.step))

    def _fetcher(self) -> Fetcher:
        return Fetcher(self._objects.session, self._required(), self._threads)

    def use(self, plan: Plan) -> None:
        """Load what this plan says, which all ranks have."""
        self.plan, self._saved, self.pulled = plan, None, []

    def _required(self) -> Plan:
        if self.plan is None:
            raise ConfigError("nothing was looked up yet")
        self.plan.require()
        return self.plan

    def _check_base(self, base: str) -> None:
        job = self._objects.session.job
        if validate_job(base) != job:
            raise ConfigError(f"checkpoints of job {base!r} were asked for, and this session belongs to job {job!r}")
