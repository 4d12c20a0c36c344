"""A real agent in a real memory cgroup, and on a small tmpfs of its own: it says so, and nothing is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess
from cluster import MIB, Node, Rank

from replicator.errors import StoreFullError
from replicator.store.mounts import OWN_BYTES

TOP = Path("/sys/fs/cgroup/memory")
LIMIT = 256 * MIB


def _own_group() -> Path:
    """This process's memory cgroup (v1)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return TOP / path.lstrip("/")
    pytest.skip("no memory cgroup of version 1 here")


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of 256 MiB inside this process's own."""
    path = _own_group() / f"replicator-test-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.rmdir()
        pytest.skip(f"a memory cgroup cannot be made here: {error}")
    try:
        yield path
    finally:
        path.rmdir()


def _enter(group: Path) -> list[str]:
    return ["sh", "-c", 'echo $$ >"$0"/cgroup.procs && exec "$@"', str(group)]


@contextlib.contextmanager
def _limited(group: Path, root: Path, *flags: str) -> Iterator[Node]:
    """An agent that is in the cgroup before its first instruction."""
    node = Node("n0", root)
    node.agent = AgentProcess(root, "--node-id", "n0", *flags, prefix=_enter(group))
    try:
        yield node
    finally:
        node.kill()


def test_an_agent_stays_below_the_limit_of_its_cgroup(group: Path, shm_root: Path) -> None:
    """F23: what is stored is charged to the agent; beyond the limit it would be killed, so it refuses before."""
    with _limited(group, shm_root / "n0", "--budget-bytes", "1Gi") as node:
        assert node.agent is not None
        told = node.agent.wait_log("budget")
        assert f"the budget is {LIMIT - OWN_BYTES} bytes instead" in told["message"]
        node.ready()
        assert node.status().budget_bytes == LIMIT - OWN_BYTES
        rank = Rank(node)
        rank.join(1, [node])
        for step in range((LIMIT - OWN_BYTES) // (16 * MIB)):
            rank.write(rank.begin(step).object("a"), bytes(15 * MIB))
        with pytest.raises(StoreFullError, match=f"budget of {LIMIT - OWN_BYTES} bytes"):
            rank.write(rank.begin(99).object("a"), bytes(15 * MIB))
        assert node.agent.process.poll() is None
        assert int((group / "memory.usage_in_bytes").read_text()) <= LIMIT
        rank.close()


def test_a_cgroup_that_leaves_nothing_is_an_error_at_the_start(group: Path, shm_root: Path) -> None:
    (group / "memory.limit_in_bytes").write_text(str(OWN_BYTES))
    with _limited(group, shm_root / "n0") as node:
        assert node.agent is not None
        assert node.agent.wait() == 2
        assert "nothing is left for checkpoints" in "".join(node.agent.output)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_an_agent_on_a_mount_of_64_mb_says_how_to_get_more(shm_root: Path) -> None:
    """F22: as in a container; a save that does not fit is an error with numbers, and the next one works."""
    mount = shm_root / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0777", "tmpfs", mount], check=True)
    try:
        node = Node("n0", mount).launch()
        assert node.agent is not None
        assert "other users may remove" in node.agent.wait_log("has the mode 0777")["message"]
        assert "docker run --shm-size" in node.agent.wait_log("the store has room for")["message"]
        node.ready()
        rank = Rank(node)
        rank.join(1, [node])
        # Others fill it after the budget was settled.
        (mount / "foreign").write_bytes(bytes(50 * MIB))
        with pytest.raises(StoreFullError, match=r"no room for a segment of \d+ bytes.*has \d+ bytes and"):
            rank.write(rank.begin(1).object("a"), bytes(20 * MIB))
        rank.write(rank.begin(1).object("a"), bytes(8 * MIB))
        rank.close()
        node.kill()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
