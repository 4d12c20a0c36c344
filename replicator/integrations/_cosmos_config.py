"""The settings of a Cosmos-style checkpointer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from replicator.errors import ConfigError, UnsupportedError

# Settings of theirs that would change what is saved or loaded, and that this checkpointer does not have.
_UNSUPPORTED = ("load_ema_to_reg", "dcp_allow_mismatched_size", "broadcast_via_filesystem")


class AsyncMode(enum.StrEnum):
    """How saves go on."""

    DISABLED = "disabled"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


@dataclass
class CheckpointConfig:
    """The settings that are used, by the names they have there; any object with these attributes will do.

    Attributes:
        dcp_async_mode_enabled: save in a background process.
        load_path: where to start from while this job has saved nothing: a directory, or `replicator://<job>[/step-<N>]`.
        load_training_state: take all keys from there, and not the model alone. only_load_scheduler_state: the model
            and the scheduler.
        strict_resume: what is asked for and not there is an error; else it stays as it is.
        keys_not_to_resume: of `CHECKPOINT_KEYS`. keys_to_skip_loading: parts of names of the model's and optimizer's
            tensors that are not taken from `load_path`.
    """

    dcp_async_mode_enabled: bool = False
    load_path: str = ""
    load_training_state: bool = False
    only_load_scheduler_state: bool = False
    strict_resume: bool = True
    keys_not_to_resume: list[str] = field(default_factory=list)
    keys_to_skip_loading: list[str] = field(default_factory=list)


def checked_config(config: Any, keys: Sequence[str]) -> CheckpointConfig:
    """The settings that are used, of any object that has them. ConfigError or UnsupportedError: one that is wrong."""
    known = CheckpointConfig()
    found = CheckpointConfig(**{name: getattr(config, name, default) for name, default in vars(known).items()})
    found.load_path = str(found.load_path or "")
    for name in _UNSUPPORTED:
        if getattr(config, name, False):
            raise UnsupportedError(f"{name}: expected it not to be set, found {getattr(config, name)!r}; leave it out")
    for name in ("save_to_object_store", "load_from_object_store"):
        if getattr(getattr(config, name, None), "enabled", False):
            raise UnsupportedError(f"{name}.enabled: expected False; iterations are kept in the memory of the nodes")
    for key in found.keys_not_to_resume:
        if key not in keys:
            raise ConfigError(f"keys_not_to_resume: expected some of {', '.join(keys)}, found {key!r}")
    return found
