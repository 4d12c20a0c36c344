"""Fixtures shared by all tests."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from job_support import Node

    from replicator import Session

TESTS = Path(__file__).parent
# Files of which each takes long, or which the longest test is in. They begin first, so that none is left for the end.
LONG = (
    *("demo/test_demo.py", "integrations/test_cosmos_background.py", "checkpoint/test_dcp.py"),
    *("simulator/test_simulator.py", "integrations/test_torchtitan.py", "integrations/test_examples.py"),
    *("deploy/test_deploy_files.py", "integrations/test_torch_checkpointing.py", "agent/test_small_objects.py"),
    *("benchmarks/test_command.py", "packaging/test_protobuf_runtimes.py", "packaging/test_no_compiler.py"),
    *("agent/test_small_objects_retrieve.py", "agent/test_commit_cluster.py", "checkpoint/test_failed_saves.py"),
    *("agent/test_heal_cluster.py", "client/test_session.py", "checkpoint/test_saver_job.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {TESTS / name: place for place, name in enumerate(LONG)}
    for path in rank:
        if not path.exists():
            warnings.warn(f"{path} is not there: LONG in {__file__} names it", stacklevel=1)
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


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
