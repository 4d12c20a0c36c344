"""What a checkpoint id means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter
from replicator.checkpoint.names import container_of, folder_of, is_container
from replicator.errors import ConfigError, InvalidIdError
from replicator.ids import CheckpointContainerId


@pytest.mark.parametrize(
    "given",
    [
        "step-5",
        "step-5_ckpt",
        "5",
        "0005",
        5,
        "job/step-5",
        "job/step-5_ckpt",
        "/ckpts/run 1/step-5",
        "/ckpts/run/5/",
        "ckpts/5",
        Path("/ckpts/step-5_ckpt"),
        CheckpointContainerId("job", 5),
    ],
    ids=str,
)
def test_accepted(given: Any) -> None:
    assert container_of(given, "job") == CheckpointContainerId("job", 5)
    assert is_container(given)


@pytest.mark.parametrize("given", ["step-0", 0, "0"])
def test_step_0_is_a_step(given: Any) -> None:
    """F14"""
    assert container_of(given, "job").step == 0


@pytest.mark.parametrize("given", ["", "latest", "step-", "step-05", "step--1", "5x", "/", "a/..", -1, True, None, 1.5])
def test_refused(given: Any) -> None:
    with pytest.raises(InvalidIdError):
        container_of(given, "job")
    assert not is_container(given)


@pytest.mark.parametrize("given", ["other/step-5", CheckpointContainerId("other", 5)], ids=str)
def test_another_job(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"other.*job 'job'"):
        container_of(given, "job")


def test_prefixes_are_folders() -> None:
    for prefix in ("", "model/", "a/b/"):
        assert folder_of(prefix) == prefix
        assert ReplicatedStorageReader(prefix=prefix).prefix == ReplicatedStorageWriter(prefix=prefix).prefix == prefix
    for kind in (ReplicatedStorageReader, ReplicatedStorageWriter):
        with pytest.raises(ConfigError, match="expected a folder, like 'model/'"):
            kind(prefix="model")
        for wrong in ("/", "/model/", "../", "a b/"):
            with pytest.raises(InvalidIdError):
                kind(prefix=wrong)
