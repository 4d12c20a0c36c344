"""Fixtures shared by all tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm_root() -> Iterator[Path]:
    """A new directory on the machine's shared-memory tmpfs, gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
