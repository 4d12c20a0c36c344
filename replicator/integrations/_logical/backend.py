"""The manager of `torch_checkpointing` that does a trainer's saves: its parts, and its end."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, CheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.schema import ItemSpec

from replicator.integrations._logical.storage import ReplicatorStorage
from replicator.integrations.torch_checkpointing import JobBarrierConfig, ReplicatorStorageConfig

logger = logging.getLogger("replicator.integrations")

START_S = 300
"""For the start of a process beside the trainer, which imports torch, maybe on a busy machine."""

# What is cut over the ranks, and cut anew when it is loaded by others.
RESHARDED = ("model", "optimizer")


def item_specs(shared: Sequence[str]) -> dict[str, ItemSpec]:
    """Of a trainer's state: `RESHARDED`, and in a file that all ranks read what is `shared`."""
    try:
        module, name = importlib.import_module("torch_checkpointing.dtensor_resharder"), "DTensorResharder"
    except ImportError:  # renamed in 0.1.1
        module, name = importlib.import_module("torch_checkpointing.default_resharder"), "DefaultResharder"
    resharder = getattr(module, name)()
    specs = {key: ItemSpec(resharder=resharder, required=False) for key in RESHARDED}
    for key in shared:
        specs[key] = ItemSpec(layout=LayoutInfo(f"{key}.pt", TorchSerialization()), required=False)
    return specs


def saver_config(
    storage: ReplicatorStorageConfig, timeout_s: int, *, synchronous: bool, barrier: bool
) -> CheckpointSaverConfig:
    """Of a saver in the trainer or in a process beside it; several ranks wait for each other when `barrier`."""
    writer = CheckpointWriterConfig(checkpoint_write_barrier_timeout_sec=timeout_s)
    # Without one, 0.1.1 would have to be told at once that it is not to write under a temporary name either.
    writer.barrier_config = JobBarrierConfig(timeout_s, storage) if barrier and storage.world_size > 1 else None
    if writer.barrier_config is None and hasattr(writer, "write_to_temp_dir"):
        writer.write_to_temp_dir = False
    if synchronous:
        return SyncCheckpointSaverConfig(writer_config=writer, wait_timeout_secs=timeout_s)
    save = AsyncCheckpointSaverConfig(writer_config=writer, wait_timeout_secs=timeout_s)
    save.process_config.subprocess_init_timeout_secs = max(timeout_s, START_S)
    return save


def storage_of(manager: CheckpointManager) -> ReplicatorStorage:
    """The storage in this process of a manager that was made on one."""
    config: Any = manager._storage_config
    storage: ReplicatorStorage = config.create_storage()
    return storage


def close_backend(manager: CheckpointManager) -> None:
    """However its last save ended."""
    try:
        manager.close()
    except Exception as error:
        logger.error("the last save failed: %s", error)
