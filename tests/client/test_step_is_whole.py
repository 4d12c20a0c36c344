"""A step is what its manifest lists, whatever wrote it, and its objects are plain files that nobody else cleans up."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from job_support import nodes, run_alone

import replicator
from replicator.decide.types import Manifest, ManifestEntry
from replicator.errors import CommitError
from replicator.ids import CheckpointContainerId, ContainerVersion
from replicator.store.paths import open_root
from replicator.store.reader import open_object

MIB = 1 << 20


def save_parts(step: int, written: tuple[str, ...], listed: tuple[str, ...]) -> None:
    """Model and data loader, each written by itself, and one manifest."""
    with replicator.init() as session:
        version = session.begin(CheckpointContainerId("job", step))
        entries = {name: ManifestEntry(name, 5, 0x12345678, session.node.node_id) for name in listed}
        for name in written:
            with session.create(version.object(name), 5) as sink:
                sink.write(f"{step:05}".encode())
            entries[name] = ManifestEntry(name, sink.info.size, sink.info.crc32c, sink.info.owner_node_id)
        manifest = Manifest(
            version, session.epoch, session.node.node_id, 1, 1, 1, tuple(entries[name] for name in sorted(entries))
        )
        session.commit(manifest).committed.result(20)


def load_parts() -> list[str]:
    with replicator.init() as session:
        plan = session.lookup()
        found = []
        for source in plan.sources:
            with open_object(session.agent.paths, plan.require().object(source.name)) as reader:
                reader.verify()
                found.append(f"{source.name}@{bytes(reader.view).decode()}")
        return found


def test_model_and_data_loader_are_of_one_step(shm_root: Path) -> None:
    """F07: one manifest lists both. A step of which the loader's state is missing is refused, and not half there."""
    parts = ("loader", "model")
    with nodes(shm_root, 1) as (node,):
        run_alone(node, save_parts, 500, parts, parts)
        with pytest.raises(Exception, match="expected loader on this node") as caught:
            run_alone(node, save_parts, 501, ("model",), parts)
        assert getattr(caught.value, "kind", "") == CommitError.__name__
        assert run_alone(node, load_parts) == ["loader@00500", "model@00500"]


WRITE_AND_END = """
import sys
from multiprocessing import resource_tracker, shared_memory
resource_tracker.ensure_running()
mine = shared_memory.SharedMemory(create=True, size=64)
import replicator
with replicator.init(job="job") as session:
    version = session.begin(replicator.CheckpointContainerId("job", 1))
    with session.create(version.object("one"), 3) as sink:
        sink.write(b"abc")
print(mine.name, version.generation, flush=True)
"""


def test_the_resource_tracker_of_multiprocessing_takes_nothing_away(shm_root: Path) -> None:
    """F25: it unlinks what a process made through `shared_memory` when that process ends. Objects are plain files."""
    with nodes(shm_root, 1) as (node,):
        done = subprocess.run(
            [sys.executable, "-c", WRITE_AND_END],
            env={"PATH": "/usr/bin:/bin", **node.environment()},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        segment, generation = done.stdout.split()
        assert not (Path("/dev/shm") / segment).exists(), "the tracker did its work"
        version = ContainerVersion(CheckpointContainerId("job", 1), int(generation))
        with open_object(open_root(node.root, create=False), version.object("one")) as reader:
            reader.verify()
            assert bytes(reader.view) == b"abc"


def private_bytes() -> int:
    """Memory of this process that is not shared: not the store's segments."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def most_private_bytes_of_a_save(size: int) -> int:
    """How much this process's own memory grows while it saves a tensor of `size` bytes."""
    import torch
    import torch.distributed.checkpoint as dcp

    from replicator.checkpoint import ReplicatedStorageWriter

    with replicator.init() as session:
        writer = ReplicatedStorageWriter(session)
        dcp.save({"w": torch.ones(1000)}, checkpoint_id="step-1", storage_writer=writer)
        state = {"w": torch.ones(size // 4)}
        before, most, stop = private_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not stop.wait(0.001):
                most = max(most, private_bytes() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        dcp.save(state, checkpoint_id="step-2", storage_writer=writer)
        stop.set()
        thread.join()
        return most


def test_a_save_has_no_copy_of_the_shard_in_private_memory(shm_root: Path) -> None:
    """F26: bytes go straight into the store's memory."""
    with nodes(shm_root, 1) as (node,):
        assert run_alone(node, most_private_bytes_of_a_save, 128 * MIB) < 32 * MIB
