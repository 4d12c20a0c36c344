"""replicator-admin against real agents: three nodes, objects of a real DCP checkpoint, loss and corruption."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from admin_cli import admin, admin_json, environment, one_error_line

from replicator.decide.types import Manifest, ManifestEntry
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation
from replicator.native import crc32c
from replicator.store import Store
from replicator.store.paths import open_root
from replicator.store.segment import MappedSegment, MappingCache
from replicator.store.trailer import capacity_for
from replicator.store.writer import ObjectWriter
from replicator.wire import manifest_to_bytes

JOB = "train-1"
CLIENT = "agent-5eed"
BIG = bytes(range(256)) * 20_000
OBJECTS = {".metadata": b"about it all", "__0_0.distcp": BIG, "__1_0.distcp": BIG[::-1], "__2_0.distcp": b""}
OWNERS = {".metadata": "n1", "__0_0.distcp": "n1", "__1_0.distcp": "n2", "__2_0.distcp": "n3"}


def version(step: int, epoch: int = 1) -> ContainerVersion:
    return ContainerVersion(CheckpointContainerId(JOB, step), make_generation(epoch, 1))


def _never_grow(size: int) -> MappedSegment:
    raise AssertionError(f"{size} bytes: the capacity was known from the start")


class Seed:
    """What a node's store has before its agent starts."""

    def __init__(self, root: Path) -> None:
        self._paths = open_root(root, create=True)
        self._store = Store(self._paths)
        self._store.rebuild()
        self._cache = MappingCache(self._paths)

    def hold(self, of: ContainerVersion, objects: dict[str, bytes], owners: dict[str, str] = OWNERS) -> None:
        for name, data in objects.items():
            wanted = capacity_for(len(data), 4 << 20)
            segment = self._store.reserve(CLIENT, wanted)
            mapped = self._cache.get(segment.segment, segment.inode, segment.capacity)
            writer = ObjectWriter(mapped, of.object(name), owners[name], CLIENT, _never_grow)
            writer.write(data)
            self._store.seal(CLIENT, segment.segment, writer.close())

    def commit(self, of: ContainerVersion, objects: dict[str, bytes], *, protected: bool = False) -> None:
        entries = tuple(ManifestEntry(n, len(d), crc32c(d), OWNERS[n]) for n, d in sorted(objects.items()))
        data = manifest_to_bytes(Manifest(of, of.epoch, "n1", 1, 3, 0, entries))
        self._store.put_manifest(of, data, crc32c(data))
        if protected:
            self._store.mark_protected(of)

    def __enter__(self) -> Seed:
        return self

    def __exit__(self, *exc: object) -> None:
        self._cache.close()
        self._store.close()


@dataclass
class Node:
    name: str
    root: Path
    process: subprocess.Popen[str]
    grpc_address: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


def start(name: str, root: Path, peers: list[str], stack: ExitStack, *flags: str) -> Node:
    """Start an agent and wait until it says that it is ready."""
    command = [sys.executable, "-m", "replicator.agent", "--root", str(root), "--node-id", name, "--deadline-s", "5"]
    if peers:
        command += ["--peers", ",".join(peers)]
    process = subprocess.Popen([*command, *flags], env=environment(), stderr=subprocess.PIPE, text=True)

    def end() -> None:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        assert process.stderr is not None
        process.stderr.close()

    stack.callback(end)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "agent ready" in line:
            break
    else:
        raise AssertionError("".join(lines))
    threading.Thread(target=process.stderr.read, daemon=True).start()
    status, found = admin_json("status", "--root", root)
    assert status == 0, found
    return Node(name, root, process, found["node"]["grpc_address"])


@pytest.fixture
def nodes(shm_root: Path) -> Iterator[dict[str, Node]]:
    """Three nodes. Step 0 is protected; step 10 committed; step 20 lacks an object; step 30 has no manifest."""
    held = {
        "n1": (".metadata", "__0_0.distcp", "__2_0.distcp"),
        "n2": ("__1_0.distcp", ".metadata", "__0_0.distcp"),
        "n3": ("__2_0.distcp", "__1_0.distcp"),
    }
    with ExitStack() as stack:
        started: dict[str, Node] = {}
        for name, names in held.items():
            mine = {item: OBJECTS[item] for item in names}
            with Seed(shm_root / name) as seed:
                for step in (0, 10, 20):
                    lost = {"__1_0.distcp"} if step == 20 else set()
                    seed.hold(version(step), {item: data for item, data in mine.items() if item not in lost})
                    seed.commit(version(step), OBJECTS, protected=step == 0)
                seed.hold(version(30), mine)
            peers = [node.grpc_address for node in started.values()]
            started[name] = start(name, shm_root / name, peers, stack)
        yield started


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_status(nodes: dict[str, Node]) -> None:
    status, found = admin_json("status", "--root", nodes["n3"].root)
    assert status == 0
    assert found["node"]["node_id"] == "n3"
    assert found["filesystem"] == "tmpfs"
    assert found["sealed_objects"] == 7
    assert found["sealed_bytes"] <= found["budget_bytes"]
    shown = admin("status", "--agent", nodes["n3"].grpc_address).stdout
    assert "n3 (incarnation" in shown
    assert "7 objects in" in shown


def test_nodes_with_one_that_is_gone(nodes: dict[str, Node]) -> None:
    """F15, F19."""
    nodes["n1"].kill()
    status, found = admin_json("nodes", "--root", nodes["n3"].root)
    assert status == 0
    reachable = {report["node"]["grpc_address"]: report["reachable"] for report in found["nodes"]}
    assert reachable == {node.grpc_address: node.name != "n1" for node in nodes.values()}
    (gone,) = (report for report in found["nodes"] if not report["reachable"])
    assert gone["reason"]
    assert gone["status"] is None
    assert "No answer from" in admin("nodes", "--root", nodes["n3"].root).stdout


def test_ls_tells_what_is_recoverable_and_why_not(nodes: dict[str, Node]) -> None:
    """F06, F14."""
    status, found = admin_json("ls", "--root", nodes["n3"].root)
    assert (status, found["unanswered"]) == (0, [])
    facts = {
        item["step"]: (item["protected"], item["committed"], item["recoverable"], item["min_copies"])
        for item in found["containers"]
    }
    assert facts == {
        0: (True, True, True, 2),
        10: (False, True, True, 2),
        20: (False, True, False, 0),
        30: (False, False, False, 0),
    }
    assert [item["step"] for item in found["containers"]] == [30, 20, 10, 0]
    assert found["containers"][0]["size_bytes"] == sum(map(len, OBJECTS.values()))
    shown = admin("ls", JOB, "--root", nodes["n3"].root).stdout
    assert f"{JOB}/step-20_ckpt@1.1: 1 of its 4 objects has no matching copy on any node" in shown
    done = admin("ls", "other-job", "--root", nodes["n3"].root)
    assert done.returncode == 3
    assert "no node holds anything of job other-job" in one_error_line(done)


def test_ls_of_one_checkpoint(nodes: dict[str, Node]) -> None:
    status, found = admin_json("ls", f"{JOB}/step-10", "--root", nodes["n3"].root)
    assert status == 0
    assert {item["name"]: set(item["node_ids"]) for item in found["objects"]} == {
        ".metadata": {"n1", "n2"},
        "__0_0.distcp": {"n1", "n2"},
        "__1_0.distcp": {"n2", "n3"},
        "__2_0.distcp": {"n1", "n3"},
    }
    done = admin("ls", f"{JOB}/step-20", "--root", nodes["n3"].root)
    assert done.returncode == 3
    assert "__1_0.distcp" in one_error_line(done)


def test_inspect(nodes: dict[str, Node]) -> None:
    status, found = admin_json("inspect", f"{JOB}/step-0_ckpt/__0_0.distcp", "--root", nodes["n3"].root)
    assert status == 0
    assert found["manifest_entry"]["crc32c"] == f"{crc32c(BIG):08x}"
    assert [(c["node_id"], c["matches_manifest"], c["blocks"]) for c in found["copies"]] == [
        ("n1", True, 2),
        ("n2", True, 2),
    ]
    done = admin("inspect", f"{JOB}/step-10/nothing", "--root", nodes["n3"].root)
    assert done.returncode == 3
    assert "no manifest lists it" in one_error_line(done)


def test_recover_dry_run(nodes: dict[str, Node]) -> None:
    """F12, F13: the newest recoverable step, every newer one with its reason."""
    status, found = admin_json("recover", JOB, "--dry-run", "--root", nodes["n3"].root)
    assert status == 0
    assert found["chosen"]["step"] == 10
    assert [item["step"] for item in found["rejected"]] == [30, 20]
    assert [(item["name"], item["node_ids"][0]) for item in found["sources"]] == sorted(OWNERS.items())
    assert sorted(node["node_id"] for node in found["nodes"]) == ["n1", "n2", "n3"]
    shown = admin("recover", JOB, "--dry-run", "--step", "0", "--root", nodes["n3"].root)
    assert shown.returncode == 0
    assert "Step 0 (epoch 1, attempt 1) is recoverable, as was asked for." in shown.stdout
    assert admin("recover", "other", "--dry-run", "--root", nodes["n3"].root).returncode == 3


@pytest.mark.parametrize("lost", [None, "n1", "n2"])
def test_pull_through_any_agent_whatever_node_is_lost(nodes: dict[str, Node], tmp_path: Path, lost: str | None) -> None:
    """F10, F13: n3 holds two of the four objects; the rest comes from whoever is left."""
    if lost is not None:
        nodes[lost].kill()
    status, found = admin_json("pull", f"{JOB}/step-10", tmp_path / "out", "--root", nodes["n3"].root)
    assert status == 0, found
    assert tree(tmp_path / "out") == OBJECTS
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert lost not in found["read_from"]


def test_pull_of_a_step_that_is_not_whole_leaves_nothing(nodes: dict[str, Node], tmp_path: Path) -> None:
    """F05, F06."""
    for step in (20, 30, 40):
        done = admin("pull", f"{JOB}/step-{step}", tmp_path / "out", "--root", nodes["n3"].root)
        assert done.returncode == 3
        one_error_line(done)
    assert list(tmp_path.iterdir()) == []


def flip_a_bit(node: Node, step: int, name: str) -> None:
    (file,) = (node.root / "objects" / JOB / f"step-{step}_ckpt").rglob(name)
    with file.open("r+b") as stream:
        stream.seek(4_200_000)
        byte = stream.read(1)
        stream.seek(4_200_000)
        stream.write(bytes([byte[0] ^ 1]))


def test_pull_passes_over_a_copy_that_went_bad(nodes: dict[str, Node], tmp_path: Path) -> None:
    """F01: a bit flipped in the memory of an owner and of a buddy; the good copies are taken."""
    flip_a_bit(nodes["n2"], 10, "__1_0.distcp")
    flip_a_bit(nodes["n2"], 10, "__0_0.distcp")
    flip_a_bit(nodes["n3"], 0, "__1_0.distcp")
    for step in (10, 0):
        status, found = admin_json("pull", f"{JOB}/step-{step}", tmp_path / str(step), "--root", nodes["n3"].root)
        assert status == 0, found
        assert tree(tmp_path / str(step)) == OBJECTS


def test_pull_without_any_good_copy_leaves_nothing(nodes: dict[str, Node], tmp_path: Path) -> None:
    """F01: the only copy that is left is bad; nobody gets its bytes."""
    nodes["n3"].kill()
    flip_a_bit(nodes["n2"], 10, "__1_0.distcp")
    for agent in (nodes["n2"], nodes["n2"]):
        done = admin("pull", f"{JOB}/step-10", tmp_path / "out", "--root", agent.root)
        assert done.returncode in (3, 6), done
        one_error_line(done)
        assert list(tmp_path.iterdir()) == []


def test_mute_node_costs_its_deadline_and_is_named(nodes: dict[str, Node], tmp_path: Path) -> None:
    """F15: n1 is stopped, so that it accepts and never answers."""
    nodes["n1"].process.send_signal(signal.SIGSTOP)
    try:
        status, found = admin_json("ls", "--deadline", "4", "--root", nodes["n3"].root)
        assert status == 0, found
        assert [who["grpc_address"] for who in found["unanswered"]] == [nodes["n1"].grpc_address]
        status, found = admin_json("pull", f"{JOB}/step-10", tmp_path / "out", "--root", nodes["n3"].root)
        assert status == 0, found
        assert tree(tmp_path / "out") == OBJECTS
    finally:
        nodes["n1"].process.send_signal(signal.SIGCONT)
