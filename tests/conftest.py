"""Fixtures shared by all tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from job_support import Node

    from replicator import Session


@pytest.fixture
def shm_root() -> Iterator[Path]:
    """A new directory on the machine's shared-memory tmpfs, gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One node with an agent, for all tests of a module."""
    from job_support import nodes

    with tempfile.TemporaryDirectory(prefix="replicator-test-", dir="/dev/shm") as root, nodes(Path(root), 1) as (one,):
        yield one


@pytest.fixture
def session(node: Node, request: pytest.FixtureRequest) -> Iterator[Session]:
    """Each test has a job of its own on the node."""
    import replicator

    with replicator.init(request.node.name, root=node.root, deadline_s=node.deadline_s) as made:
        yield made
