"""The stages of a save, for trainers that do not save through `torch.distributed.checkpoint.save`.

Every rank calls them, for one container at a time, in one of two orders:

    Megatron    initialize, prepare_write_data, stage_data, write_data, write_metadata, finalize
    DCP         initialize, stage_data, prepare_write_data, write_data, write_metadata, finalize

Training waits for the stages up to and with `stage_data`; the rest may run in a thread, or `write_data` in another
process to which saver and buckets were pickled. An error in any stage fails the save alone: the step before stays
recoverable, and the next save begins with `initialize_checkpoint`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from replicator.checkpoint.buckets import ObjectWriteBucket, WriteItemResolver
from replicator.checkpoint.names import METADATA_NAME, CheckpointId
from replicator.client.outstanding import CommitInfo, ReplicaInfo
from replicator.ids import CheckpointObjectId


class CheckpointSaver(abc.ABC):
    """See `DefaultCheckpointSaver`, which does what is said here."""

    @abc.abstractmethod
    def initialize_checkpoint(self, checkpoint_id: CheckpointId) -> None:
        """Begin a save: mark the container as unfinished for this local rank, then let it be created.

        Args:
            checkpoint_id: names the step: a container id, `step-5`, `5`, or a path that ends in one of these.
        """

    @abc.abstractmethod
    def stage_data(
        self, checkpoint_id: CheckpointId, state_dict: dict[str, Any], non_blocking: bool = True
    ) -> dict[str, Any]:
        """A copy of a flattened state dict in host memory, complete when this returns.

        Args:
            non_blocking: let copies from devices run side by side; they are waited for all the same.
        """

    @abc.abstractmethod
    def prepare_write_data(
        self,
        checkpoint_id: CheckpointId,
        write_items: Sequence[WriteItem],
        resolver: WriteItemResolver,
        object_name_prefix: str,
        bucket_count: int,
    ) -> list[ObjectWriteBucket]:
        """Resolve the items, and divide them into `max(bucket_count, 1)` objects (fewer, when there are fewer items).

        The objects are called `<prefix>_<n>_src<global rank>.distcp`.
        """

    @abc.abstractmethod
    def write_data(
        self,
        checkpoint_id: CheckpointId,
        write_buckets: Sequence[ObjectWriteBucket],
        replicate_after_write: bool,
        thread_count: int = 1,
    ) -> list[WriteResult]:
        """Write and seal the objects; where each item is, as `(relative_path, offset, length)`.

        Args:
            replicate_after_write: have each object copied to the buddies as soon as it is sealed; else
                `async_replicate_object` is to be called for each.
        """

    @abc.abstractmethod
    def async_replicate_object(self, object_id: CheckpointObjectId) -> list[Future[ReplicaInfo]]:
        """Have a sealed object copied to this node's buddies; one future for each."""

    @abc.abstractmethod
    def write_metadata(
        self, checkpoint_id: CheckpointId, metadata: Metadata, md_object_name: str = METADATA_NAME
    ) -> None:
        """Write and replicate the metadata, as a whole or not at all: once on each node whose ranks call this.

        Args:
            md_object_name: the paths in `metadata.storage_data` are seen from the folder that this is in.
        """

    @abc.abstractmethod
    def finalize_checkpoint(self, checkpoint_id: CheckpointId) -> Future[CommitInfo] | None:
        """End a save: take the mark away, wait for all ranks, and commit.

        Returns:
            On the rank that commits a future, which is done when the checkpoint is protected and supersedes older
            ones; elsewhere None.
        """
