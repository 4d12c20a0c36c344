"""Which job this process belongs to: a name that stays the same when the job is started again."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from replicator.errors import InvalidIdError
from replicator.ids import validate_job

DEFAULT_JOB = "default"
# In this order; what launchers keep over a restart of the job.
SOURCES = ("REPLICATOR_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "JOBSET_NAME")


@dataclass(frozen=True, slots=True)
class JobName:
    """The job's id, where it comes from, and what the user should know about it (may be empty)."""

    job: str
    origin: str
    note: str = ""


def find_job(given: str | None = None, environ: Mapping[str, str] | None = None) -> JobName:
    """The job's id: the argument, else the first of SOURCES that is set, else "default".

    torchrun's run id is "none" unless it was given one, and that counts as unset.

    Raises:
        InvalidIdError: what was found cannot be a job id.
    """
    if given is not None:
        return JobName(_checked(given, "the job argument"), "the job argument")
    environ = os.environ if environ is None else environ
    for name in SOURCES:
        value = environ.get(name, "")
        if not value or (name == "TORCHELASTIC_RUN_ID" and value == "none"):
            continue
        note = ""
        if name == "TORCHELASTIC_RUN_ID" and _is_random(value):
            note = (
                f"job {value} is a random run id of torchrun: it lasts over elastic restarts, and a new launch will "
                "not find its checkpoints. Set REPLICATOR_JOB to a lasting name; or torchrun --rdzv-id, which on a "
                "single node counts only together with --rdzv-endpoint"
            )
        return JobName(_checked(value, name), name, note)
    return JobName(
        DEFAULT_JOB,
        "the default",
        f"no job name was given and none of {', '.join(SOURCES)} is set; using {DEFAULT_JOB!r}. "
        "Two jobs of that name on the same nodes would supersede each other",
    )


def _checked(value: str, origin: str) -> str:
    try:
        return validate_job(value)
    except InvalidIdError as error:
        source = f"{origin} (torchrun --rdzv-id)" if origin == "TORCHELASTIC_RUN_ID" else origin
        raise InvalidIdError(f"{source}: {error}; give the job another name with REPLICATOR_JOB or init(job)") from None


def _is_random(value: str) -> bool:
    try:
        uuid.UUID(value)
    except ValueError:
        return False
    return True
