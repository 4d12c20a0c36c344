"""What a `checkpoint_id` means here, and how objects of a container are named."""

from __future__ import annotations

import os
import re

from replicator.errors import ConfigError, InvalidIdError
from replicator.ids import CheckpointContainerId, parse_step_name, validate_object_name, validate_step

METADATA_NAME = ".metadata"
_NUMBER = re.compile(r"[0-9]{1,19}")

CheckpointId = str | os.PathLike[str] | CheckpointContainerId | int


def container_of(checkpoint_id: CheckpointId, job: str) -> CheckpointContainerId:
    """The container that a checkpoint id means in `job`.

    A container id, `<job>/step-5`, `step-5`, `step-5_ckpt`, `5`, or a path that ends in one of the last three;
    only the last part of a path counts, because a container is a name in the job and not a place.

    Raises:
        InvalidIdError: no step can be read from it.
        ConfigError: it names another job.
    """
    if isinstance(checkpoint_id, CheckpointContainerId):
        return _of_job(checkpoint_id, job)
    if isinstance(checkpoint_id, int) and not isinstance(checkpoint_id, bool):
        return CheckpointContainerId(job, validate_step(checkpoint_id))
    text = os.fspath(checkpoint_id).rstrip("/") if isinstance(checkpoint_id, str | os.PathLike) else ""
    try:
        named = CheckpointContainerId.parse(text)
    except InvalidIdError:
        return CheckpointContainerId(job, _step_of(text.rsplit("/", 1)[-1], checkpoint_id))
    return _of_job(named, job)


def is_container(checkpoint_id: object) -> bool:
    """Whether `container_of` understands it, in some job."""
    try:
        container_of(checkpoint_id, "any")  # type: ignore[arg-type]
    except ConfigError:
        return True
    except InvalidIdError:
        return False
    return True


def folder_of(prefix: str) -> str:
    """The prefix of objects that are in a folder, "model/" for instance, or in none.

    Raises:
        ConfigError: it is no folder: metadata would not find their objects. InvalidIdError: no folder is called so.
    """
    if prefix and not prefix.endswith("/"):
        raise ConfigError(f"prefix: expected a folder, like 'model/', or nothing, found {prefix!r}")
    validate_object_name(prefix + METADATA_NAME)
    return prefix


def _of_job(container: CheckpointContainerId, job: str) -> CheckpointContainerId:
    if container.job != job:
        raise ConfigError(
            f"checkpoint id {container} names job {container.job!r}, and this session belongs to job {job!r}; "
            f"use {container.step_name!r}, or a session of that job"
        )
    return container


def _step_of(name: str, checkpoint_id: object) -> int:
    if _NUMBER.fullmatch(name):
        return validate_step(int(name))
    try:
        return parse_step_name(name)
    except InvalidIdError:
        raise InvalidIdError(
            f"expected a checkpoint id that ends in a step, like 'step-100', 'my-job/step-100_ckpt' or '100', "
            f"found {str(checkpoint_id)[:200]!r}"
        ) from None
