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
from replicator.client.session import AGREEMENT_DEADLINES, Session
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

    Attributes:
        pulled: what other nodes had to send to this rank.
    """

    def __init__(
        self,
        ckpt_obj_manager: CheckpointObjectManager,
        replication_manager: ReplicationManager | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        self._objects = ckpt_obj_manager
        self._replication = replication_manager
        self._threads = threads or COPY_THREADS
        self._plan: Plan | None = None
        self._saved: SavedTensors | None = None
        self.pulled: list[Pulled] = []

    def get_latest_complete_checkpoint(self, base: str) -> CheckpointContainerId | None:
        """Raises like `Session.lookup`. What was found, `read_metadata` and `read_data` go on with."""
        self._check_base(base)
        self._use(self._objects.session.lookup())
        return None if self._plan is None else self._plan.container

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
        container = container_of(checkpoint_id, self._objects.session.job)
        if self._plan is None or self._plan.container != container:
            self._use(self._objects.session.lookup(container.step))
        metadata, pulled = metadata_of(self._objects.session, self._required(), object_name, self._threads)
        self._saved = SavedTensors(metadata)
        self.pulled += pulled
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
        if self._plan is None or self._saved is None or self._plan.container != object_id.container:
            raise ConfigError(f"read_data of {object_id} was called before read_metadata of its checkpoint")
        by_object = readings(read_items, storage_data, self._saved, object_id.name)
        self.pulled += fetch(self._objects.session, self._plan, by_object, planner, self._threads)

    def retrieve(self, checkpoint_id: CheckpointId) -> None:
        """Bring all objects of a checkpoint into this node's store, verified. Every rank must call it."""
        session = self._objects.session
        container = container_of(checkpoint_id, session.job)
        if self._plan is None or self._plan.container != container:
            self._use(session.lookup(container.step))
        (self._replication or session.replication).sync_bulk_retrieve(self._required())

    def _use(self, plan: Plan) -> None:
        self._plan, self._saved = plan, None

    def _required(self) -> Plan:
        if self._plan is None:
            raise ConfigError("nothing was looked up yet")
        self._plan.require()
        return self._plan

    def _check_base(self, base: str) -> None:
        job = self._objects.session.job
        if validate_job(base) != job:
            raise ConfigError(f"checkpoints of job {base!r} were asked for, and this session belongs to job {job!r}")


def metadata_of(session: Session, plan: Plan, name: str, threads: int) -> tuple[Metadata, list[Pulled]]:
    """The metadata of the checkpoint of a plan, and what other nodes had to send for it.

    Raises:
        NoRecoverableCheckpointError: the plan found nothing.
        ObjectNotFoundError: the checkpoint has no such object.
        CorruptObjectError: it holds something else.
    """
    with Fetcher(session, plan, threads) as fetcher:
        data = fetcher.read_bytes(name)
        pulled = list(fetcher.pulled)
    metadata = pickle.loads(data)
    if not isinstance(metadata, Metadata):
        raise CorruptObjectError(f"{plan.version}/{name} is a {type(metadata).__name__}, not DCP's Metadata")
    return metadata, pulled


def readings(
    items: Iterable[ReadItem],
    storage_data: Mapping[MetadataIndex, Any],
    saved: SavedTensors,
    only: str | None = None,
) -> dict[str, list[Reading]]:
    """How items are read, by object.

    Args:
        only: the object in which all of them must be.

    Raises:
        ObjectNotFoundError: the metadata does not say where an item is; with its key.
        ConfigError: an item is in another object.
    """
    by_object: dict[str, list[Reading]] = {}
    for item in items:
        info: _StorageInfo | None = storage_data.get(item.storage_index)
        if info is None:
            raise ObjectNotFoundError(f"key {item.storage_index.fqn!r} is in no object of the checkpoint")
        if only is not None and info.relative_path != only:
            raise ConfigError(f"key {item.storage_index.fqn!r} is in {info.relative_path!r}, and not in {only!r}")
        by_object.setdefault(info.relative_path, []).append(reading_of(item, info, saved))
    return by_object


def fetch(
    session: Session, plan: Plan, by_object: Mapping[str, Sequence[Reading]], planner: LoadPlanner, threads: int
) -> list[Pulled]:
    """Do all readings of a plan; what other nodes had to send. Raises like `Fetcher.read`."""
    with Fetcher(session, plan, threads) as fetcher:
        fetcher.read(by_object, planner)
        return list(fetcher.pulled)
