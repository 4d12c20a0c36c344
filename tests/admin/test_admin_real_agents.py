"""replicator-admin against real agents: three nodes, objects of a real DCP checkpoint, loss and corruption."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from admin_cli import admin, admin_json, environment, one_error_line
from forked import AGENT, Forked

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
    """A node with its agent; `ready` before anything is asked of it."""

    name: str
    root: Path
    process: Forked

    def ready(self) -> Node:
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if "agent ready" in line:
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return self
        raise AssertionError("".join(lines))

    @property
    def grpc_address(self) -> str:
        return str(json.loads((self.root / "agent.json").read_text())["grpc_address"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


def start(name: str, root: Path, peers: list[str], stack: ExitStack, *flags: str) -> Node:
    arguments = ["--root", str(root), "--node-id", name, "--deadline-s", "5"]
    if peers:
        arguments += ["--peers", ",".join(peers)]
    process = Forked(AGENT, [*arguments, *flags], environment())

    def end() -> None:
        if process.poll() is None:
            process.kill()
        process.wait(20)

    stack.callback(end)
    return Node(name, root, process)


def cluster(root: Path, stack: ExitStack) -> dict[str, Node]:
    """Three nodes, of which n3 knows all. Step 0 is protected, step 10 committed, step 20 lacks an object, step 30
    has no manifest."""
    held = {
        "n1": (".metadata", "__0_0.distcp", "__2_0.distcp"),
        "n2": ("__1_0.distcp", ".metadata", "__0_0.distcp"),
        "n3": ("__2_0.distcp", "__1_0.distcp"),
    }
    started: dict[str, Node] = {}
    for name, names in held.items():
        mine = {item: OBJECTS[item] for item in names}
        with Seed(root / name) as seed:
            for step in (0, 10, 20):
                lost = {"__1_0.distcp"} if step == 20 else set()
                seed.hold(version(step), {item: data for item, data in mine.items() if item not in lost})
                seed.commit(version(step), OBJECTS, protected=step == 0)
            seed.hold(version(30), mine)
    for name in ("n1", "n2"):
        started[name] = start(name, root / name, [], stack)
    peers = [started[name].ready().grpc_address for name in ("n1", "n2")]
    peers.append(peers[1].replace("127.0.0.1", "localhost"))
    started["n3"] = start("n3", root / "n3", peers, stack).ready()
    return started


@pytest.fixture
def nodes(shm_root: Path) -> Iterator[dict[str, Node]]:
    """A cluster to be damaged."""
    with ExitStack() as stack:
        yield cluster(shm_root, stack)


@pytest.fixture(scope="module")
def healthy() -> Iterator[dict[str, Node]]:
    """A cluster to be looked at, the same for all tests."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replicator-test-", dir="/dev/shm")))
        yield cluster(root, stack)


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_status(healthy: dict[str, Node]) -> None:
    status, found = admin_json("status", "--root", healthy["n3"].root)
    assert status == 0
    assert found["node"]["node_id"] == "n3"
    assert found["filesystem"] == "tmpfs"
    assert found["huge_pages"] in (None, "always", "within_size")
    assert found["sealed_objects"] == 7
    assert found["sealed_bytes"] <= found["budget_bytes"]
    shown = admin("status", "--agent", healthy["n3"].grpc_address).stdout
    assert "n3 (incarnation" in shown
    assert "7 objects in" in shown


def test_nodes_with_one_that_is_gone(nodes: dict[str, Node]) -> None:
    """F15, F19."""
    status, found = admin_json("nodes", "--root", nodes["n3"].root)
    assert status == 0
    # n2 is among the peers under two addresses.
    assert [report["node"]["node_id"] for report in found["nodes"]] == ["n1", "n2", "n3"]

    def believed() -> dict[str, Any]:
        peers = admin_json("status", "--root", nodes["n3"].root)[1]["peers"]
        return {peer["node"]["node_id"]: peer for peer in peers}

    began = time.time()
    while {name: peer["state"] for name, peer in believed().items()} != {"n1": "alive", "n2": "alive"}:
        assert time.time() - began < 30
    nodes["n1"].kill()
    status, found = admin_json("nodes", "--root", nodes["n3"].root)
    assert status == 0
    reachable = {report["node"]["grpc_address"]: report["reachable"] for report in found["nodes"]}
    assert reachable == {node.grpc_address: node.name != "n1" for node in nodes.values()}
    (gone,) = (report for report in found["nodes"] if not report["reachable"])
    assert gone["reason"]
    assert gone["status"] is None
    assert "No answer from n1: " in admin("nodes", "--root", nodes["n3"].root).stdout
    began = time.time()
    while (peers := believed())["n1"]["state"] != "dead":
        assert time.time() - began < 30
    assert set(peers) == {"n1", "n2"}
    assert peers["n2"]["state"] == "alive"
    assert peers["n1"]["reason"]
    assert began - 1 < peers["n1"]["since_unix_seconds"] < time.time() + 1
    found = admin_json("nodes", "--root", nodes["n3"].root)[1]
    health = {report["node"]["node_id"]: report["health"] and report["health"]["state"] for report in found["nodes"]}
    assert health == {"n1": "dead", "n2": "alive", "n3": None}
    shown = admin("nodes", "--root", nodes["n3"].root).stdout
    assert "n1 is dead for " in shown
    status, found = admin_json("ls", JOB, "--root", nodes["n3"].root)
    assert [who["grpc_address"] for who in found["unanswered"]] == [nodes["n1"].grpc_address]
    assert "no answer came from" in found["containers"][0]["reason"]


def test_ls_tells_what_is_recoverable_and_why_not(healthy: dict[str, Node]) -> None:
    """F06, F14."""
    status, found = admin_json("ls", "--root", healthy["n3"].root)
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
    shown = admin("ls", JOB, "--root", healthy["n3"].root).stdout
    assert f"{JOB}/step-20_ckpt@1.1: 1 of its 4 objects has no matching copy on any node" in shown
    done = admin("ls", "other-job", "--root", healthy["n3"].root)
    assert done.returncode == 3
    assert "no node holds anything of job other-job" in one_error_line(done)


def test_ls_of_one_checkpoint(healthy: dict[str, Node]) -> None:
    status, found = admin_json("ls", f"{JOB}/step-10", "--root", healthy["n3"].root)
    assert status == 0
    assert {item["name"]: set(item["node_ids"]) for item in found["objects"]} == {
        ".metadata": {"n1", "n2"},
        "__0_0.distcp": {"n1", "n2"},
        "__1_0.distcp": {"n2", "n3"},
        "__2_0.distcp": {"n1", "n3"},
    }
    done = admin("ls", f"{JOB}/step-20", "--root", healthy["n3"].root)
    assert done.returncode == 3
    assert "__1_0.distcp" in one_error_line(done)


def test_inspect(healthy: dict[str, Node]) -> None:
    status, found = admin_json("inspect", f"{JOB}/step-0_ckpt/__0_0.distcp", "--root", healthy["n3"].root)
    assert status == 0
    assert found["manifest_entry"]["crc32c"] == f"{crc32c(BIG):08x}"
    assert [(c["node_id"], c["matches_manifest"], c["blocks"]) for c in found["copies"]] == [
        ("n1", True, 2),
        ("n2", True, 2),
    ]
    done = admin("inspect", f"{JOB}/step-10/nothing", "--root", healthy["n3"].root)
    assert done.returncode == 3
    assert "no manifest lists it" in one_error_line(done)


def test_recover_dry_run(healthy: dict[str, Node]) -> None:
    """F12, F13: the newest recoverable step, every newer one with its reason."""
    status, found = admin_json("recover", JOB, "--dry-run", "--root", healthy["n3"].root)
    assert status == 0
    assert found["chosen"]["step"] == 10
    assert [item["step"] for item in found["rejected"]] == [30, 20]
    assert [(item["name"], item["node_ids"][0]) for item in found["sources"]] == sorted(OWNERS.items())
    assert sorted(node["node_id"] for node in found["nodes"]) == ["n1", "n2", "n3"]
    shown = admin("recover", JOB, "--dry-run", "--step", "0", "--root", healthy["n3"].root)
    assert shown.returncode == 0
    assert "Step 0 (epoch 1, attempt 1) is recoverable, as was asked for." in shown.stdout
    assert admin("recover", "other", "--dry-run", "--root", healthy["n3"].root).returncode == 3


def test_pull_from_all_nodes(healthy: dict[str, Node], tmp_path: Path) -> None:
    status, found = admin_json("pull", f"{JOB}/step-10", tmp_path / "out", "--agent", healthy["n3"].grpc_address)
    assert status == 0, found
    assert tree(tmp_path / "out") == OBJECTS


@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_pull_whatever_node_is_lost(nodes: dict[str, Node], tmp_path: Path, lost: str) -> None:
    """F10, F13: n3 holds two of the four objects; the rest comes from whoever is left, whoever wrote it."""
    nodes[lost].kill()
    status, found = admin_json("pull", f"{JOB}/step-10", tmp_path / "out", "--root", nodes["n3"].root)
    assert status == 0, found
    assert tree(tmp_path / "out") == OBJECTS
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert lost not in found["read_from"]


def test_pull_of_a_step_that_is_not_whole_leaves_nothing(healthy: dict[str, Node], tmp_path: Path) -> None:
    """F05, F06."""
    for step in (20, 30, 40):
        done = admin("pull", f"{JOB}/step-{step}", tmp_path / "out", "--root", healthy["n3"].root)
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
    """F01: both copies are bad; nobody gets their bytes, now or at the next try."""
    for name in ("n2", "n3"):
        flip_a_bit(nodes[name], 10, "__1_0.distcp")
    for _ in range(2):
        done = admin("pull", f"{JOB}/step-10", tmp_path / "out", "--root", nodes["n3"].root)
        assert done.returncode in (3, 6), done
        assert "__1_0.distcp" in one_error_line(done)
        assert list(tmp_path.iterdir()) == []


def test_verify_reads_every_copy_of_every_node(healthy: dict[str, Node]) -> None:
    status, found = admin_json("verify", "--root", healthy["n3"].root)
    assert status == 0, found
    assert found["sound"]
    held = {report["node"]["node_id"]: (report["objects"], report["size_bytes"]) for report in found["nodes"]}
    # Step 20 lacks the one object everywhere.
    assert {name: objects for name, (objects, _) in held.items()} == {"n1": 12, "n2": 11, "n3": 7}
    assert held["n1"][1] == 4 * (len(BIG) + len(OBJECTS[".metadata"]))
    status, found = admin_json("verify", f"{JOB}/step-0", "--here", "--root", healthy["n1"].root)
    assert status == 0
    assert [(report["node"]["node_id"], report["objects"]) for report in found["nodes"]] == [("n1", 3)]
    for what in ("other-job", f"{JOB}/step-9"):
        assert admin("verify", what, "--root", healthy["n3"].root).returncode == 3
    assert "n2" in admin("verify", "--root", healthy["n3"].root).stdout


def test_verify_names_what_is_bad_and_has_it_replaced(nodes: dict[str, Node]) -> None:
    """F01: the bad copy of n3 is set aside, and comes again from n2."""
    flip_a_bit(nodes["n3"], 0, "__1_0.distcp")
    done = admin("verify", JOB, "--root", nodes["n3"].root)
    assert done.returncode == 6, done
    assert "Bad on n3: train-1/step-0_ckpt@1.1/__1_0.distcp: blocks [1] of 2" in done.stdout

    def is_replaced() -> bool:
        return bool(admin_json("status", "--root", nodes["n3"].root)[1]["counters"].get("objects_repaired"))

    end = time.monotonic() + 20
    while not is_replaced():
        assert time.monotonic() < end
    status, found = admin_json("verify", "--root", nodes["n3"].root)
    assert (status, found["sound"]) == (0, True)


def test_mute_node_costs_its_deadline_and_is_named(nodes: dict[str, Node], tmp_path: Path) -> None:
    """F15: n1 is stopped, so that it accepts and never answers."""
    nodes["n1"].process.send_signal(signal.SIGSTOP)
    try:
        status, found = admin_json("ls", "--deadline", "4", "--root", nodes["n3"].root)
        assert status == 0, found
        assert [who["grpc_address"] for who in found["unanswered"]] == [nodes["n1"].grpc_address]
        status, found = admin_json("verify", "--deadline", "4", "--root", nodes["n3"].root)
        assert status == 4, found
        (silent,) = [report for report in found["nodes"] if report["reason"]]
        assert silent["node"]["grpc_address"] == nodes["n1"].grpc_address
        status, found = admin_json("pull", f"{JOB}/step-10", tmp_path / "out", "--root", nodes["n3"].root)
        assert status == 0, found
        assert tree(tmp_path / "out") == OBJECTS
    finally:
        nodes["n1"].process.send_signal(signal.SIGCONT)


def test_agent_with_tls(shm_root: Path, tmp_path: Path) -> None:
    """F39: over TCP both sides show a certificate; over the unix socket of the node nobody needs one."""
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=own"
    for name in ("own", "other"):
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(["openssl", *request.split(), *names], cwd=tmp_path, check=True, capture_output=True)

    def files(name: str) -> dict[str, str]:
        return {"ca": str(tmp_path / "own.pem"), "cert": f"{tmp_path / name}.pem", "key": f"{tmp_path / name}.key"}

    def flags(name: str) -> list[str]:
        return [word for kind, file in files(name).items() for word in (f"--tls-{kind}", file)]

    with ExitStack() as stack:
        node = start("n1", shm_root / "n1", [], stack, *flags("own")).ready()
        at = ["--agent", node.grpc_address, "--deadline", "5"]
        assert admin("status", "--root", node.root).returncode == 0
        assert admin("status", *at, *flags("own")).returncode == 0
        environ = {f"REPLICATOR_TLS_{kind.upper()}": file for kind, file in files("own").items()}
        assert admin("status", *at, **environ).returncode == 0
        for wrong in ([], flags("other")):
            done = admin("status", *at, *wrong)
            assert done.returncode == 4
            assert "if it serves TLS, give --tls-ca" in one_error_line(done)
        done = admin("status", *at, *flags("missing"))
        assert done.returncode == 2
        assert "missing.pem" in one_error_line(done)


def test_stock_reader_loads_what_was_pulled(shm_root: Path, tmp_path: Path) -> None:
    """F14, F42: saved through ReplicatedStorageWriter, pulled, loaded with PyTorch's own FileSystemReader."""
    import torch
    import torch.distributed.checkpoint as dcp

    import replicator
    from replicator.checkpoint import ReplicatedStorageWriter

    with ExitStack() as stack:
        node = start("n1", shm_root / "n1", [], stack).ready()
        with replicator.init(job="real", root=node.root, auto_start=False) as session:
            for step in (0, 1):
                state = {"weight": torch.arange(3000.0).reshape(30, 100) + step, "step": step}
                writer = ReplicatedStorageWriter(session, wait_for="commit")
                dcp.save(state, storage_writer=writer, checkpoint_id=step, no_dist=True)
        for step in (0, 1):
            done = admin(
                "pull", f"real/step-{step}", tmp_path / str(step), REPLICATOR_SOCKET=str(node.root / "agent.sock")
            )
            assert done.returncode == 0, done
            state = {"weight": torch.zeros(30, 100), "step": -1}
            dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / str(step)), no_dist=True)
            assert torch.equal(state["weight"], torch.arange(3000.0).reshape(30, 100) + step)
            assert state["step"] == step
