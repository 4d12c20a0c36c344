"""Where the job's name comes from."""

from __future__ import annotations

import pytest

from replicator.client.job import find_job
from replicator.errors import InvalidIdError

ALL = {"REPLICATOR_JOB": "mine", "TORCHELASTIC_RUN_ID": "run7", "SLURM_JOB_ID": "123", "JOBSET_NAME": "set"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (ALL, "mine"),
        ({k: v for k, v in ALL.items() if k != "REPLICATOR_JOB"}, "run7"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "123", "JOBSET_NAME": "set"}, "123"),
        ({"SLURM_JOB_ID": "", "JOBSET_NAME": "set"}, "set"),
    ],
)
def test_order(environ: dict[str, str], expected: str) -> None:
    found = find_job(None, environ)
    assert found.job == expected
    assert found.note == ""


def test_argument_wins() -> None:
    assert find_job("given", ALL).job == "given"


def test_default_has_a_note() -> None:
    found = find_job(None, {})
    assert found.job == "default"
    assert "REPLICATOR_JOB" in found.note


def test_random_run_id_has_a_note() -> None:
    """F11: torchrun makes up an id, on a single node whatever it was given, which a new launch would not find again."""
    found = find_job(None, {"TORCHELASTIC_RUN_ID": "d0bd7a3e-6f0c-4d1c-9a0e-0c8f3d6a9f11"})
    assert found.job == "d0bd7a3e-6f0c-4d1c-9a0e-0c8f3d6a9f11"
    assert "Set REPLICATOR_JOB" in found.note
    assert "only together with --rdzv-endpoint" in found.note


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a b", "x" * 129])
def test_bad_names(bad: str) -> None:
    with pytest.raises(InvalidIdError, match="job id"):
        find_job(bad, {})


@pytest.mark.parametrize(
    ("given", "environ", "named"),
    [
        ("a b", {}, "the job argument"),
        (None, {"REPLICATOR_JOB": "a b"}, "REPLICATOR_JOB"),
        (None, {"TORCHELASTIC_RUN_ID": "a b"}, "TORCHELASTIC_RUN_ID (torchrun --rdzv-id)"),
    ],
)
def test_a_bad_name_is_told_with_its_origin_and_what_to_do(
    given: str | None, environ: dict[str, str], named: str
) -> None:
    with pytest.raises(InvalidIdError) as caught:
        find_job(given, environ)
    assert str(caught.value).startswith(f"{named}: job id contains ' '; ")
    assert str(caught.value).endswith("; give the job another name with REPLICATOR_JOB or init(job)")
