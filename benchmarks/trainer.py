"""A real training process with one rank: what `benchmarks.worker` runs for everything that is the product's.

Only the library's public interface is used. Each method prepares or times one thing; times are in seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from benchmarks.worker import Role
from replicator.client.local_agent import LocalAgent
from replicator.client.session import Session, attach
from replicator.client.session_spec import SessionSpec
from replicator.decide.types import Manifest, ManifestEntry
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity, ObjectVersion

DEADLINE_S = 60.0
JOB = "benchmark"
PIECE_BYTES = 64 << 20
"""Larger objects are written from one piece, again and again."""


def members_of(records: Sequence[Mapping[str, Any]]) -> tuple[NodeAddress, ...]:
    """The agents that published these records."""
    return tuple(
        NodeAddress(NodeIdentity(record["node_id"], int(record["incarnation"])), record["grpc_address"])
        for record in records
    )


class TrainerRole(Role):
    """One rank on the node whose store is `root`.

    Args:
        members: records of all agents of the job, this node's included.
        replicas: copies wanted beside this node's.
        epoch: 0: open a new one; else enter this one.
    """

    def __init__(self, root: str, members: Sequence[Mapping[str, Any]], replicas: int, epoch: int = 0) -> None:
        nodes = members_of(members)
        if not epoch:
            agent = LocalAgent(root, deadline_s=DEADLINE_S, auto_start=False)
            epoch, _ = agent.open_job(JOB, nodes, DEADLINE_S)
            agent.close()
        self.session: Session = attach(SessionSpec(root, JOB, epoch, nodes, replicas, DEADLINE_S, False, None))
        self.step = 0
        self.protected: Future[Any] | None = None

    def epoch(self) -> int:
        return self.session.epoch

    def lookup(self) -> float:
        """Seconds of a recovery lookup."""
        start = time.perf_counter()
        plan = self.session.lookup()
        elapsed = time.perf_counter() - start
        plan.require()
        return elapsed

    def begin(self) -> ContainerVersion:
        """A new generation of the next step."""
        self.step += 1
        return self.session.begin(CheckpointContainerId(JOB, self.step))

    def commit(self, version: ContainerVersion, entries: Sequence[ManifestEntry]) -> float:
        """Commit and wait until it is protected; seconds until committed."""
        manifest = Manifest(
            version=version,
            epoch=self.session.epoch,
            coordinator_node_id=self.session.node.node_id,
            replicas=self.session.replicas,
            world_size=1,
            created_unix_ms=time.time_ns() // 1_000_000,
            entries=tuple(sorted(entries, key=lambda entry: entry.name)),
        )
        start = time.perf_counter()
        futures = self.session.agent.commit(manifest)
        futures.committed.result(DEADLINE_S)
        elapsed = time.perf_counter() - start
        futures.protected.result(DEADLINE_S)
        return elapsed

    def replicate(self, objects: Sequence[ObjectVersion]) -> float:
        """Seconds until every buddy verified and sealed all of these objects."""
        start = time.perf_counter()
        outcomes = self.session.agent.replicate(objects, self.session.epoch)
        futures = [future for one in objects for future in outcomes[one]]
        _done, late = wait(futures, timeout=DEADLINE_S)
        elapsed = time.perf_counter() - start
        if late:
            raise TimeoutError(f"{len(late)} of {len(futures)} copies were not made within {DEADLINE_S:.0f} s")
        for future in futures:
            future.result()
        if not futures:
            raise RuntimeError("this node has no buddy, so nothing was copied")
        return elapsed

    def close(self) -> None:
        self.session.close()


class ObjectsRole(TrainerRole):
    """Writes, replicates and commits plain objects: `count` of `size` bytes each per step."""

    def __init__(self, size: int, count: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._size, self._count = size, count
        self._piece = memoryview(os.urandom(min(size, PIECE_BYTES)))
        self._version: ContainerVersion | None = None
        self._entries: list[ManifestEntry] = []
        self._written_s = 0.0

    def prepare(self) -> None:
        """Commit the step before, and write and seal the next one."""
        self.finish()
        self._version = self.begin()
        objects = [self._version.object(f"object-{number:05d}") for number in range(self._count)]
        start = time.perf_counter()
        self._entries = self._write_many(objects) if self._size == len(self._piece) else [*map(self.write, objects)]
        self._written_s = time.perf_counter() - start

    def _write_many(self, objects: Sequence[ObjectVersion]) -> list[ManifestEntry]:
        """Write and seal objects that are one piece each."""
        infos = self.session.create_many([(one, self._piece) for one in objects])
        node_id = self.session.node.node_id
        return [ManifestEntry(info.object.name, info.size, info.crc32c, node_id) for info in infos]

    def write(self, one: ObjectVersion) -> ManifestEntry:
        """Write and seal one object."""
        with self.session.create(one, self._size) as sink:
            for offset in range(0, self._size, len(self._piece)):
                sink.write(self._piece[: self._size - offset])
        info = sink.seal()
        return ManifestEntry(one.name, info.size, info.crc32c, self.session.node.node_id)

    def finish(self) -> float:
        """Commit the step at hand, and so let older ones go; seconds until committed (0: there was none)."""
        if self._version is None:
            return 0.0
        version, self._version = self._version, None
        return self.commit(version, self._entries)

    def run(self) -> dict[str, float]:
        """Seconds from asking for the copies to the last verified one; and of writing them before."""
        assert self._version is not None
        copied = self.replicate([self._version.object(entry.name) for entry in self._entries])
        return {"total": copied, "written": self._written_s}

    def run_commit(self) -> float:
        """Seconds until the step at hand, copied now, is committed."""
        self.run()
        return self.finish()


class PullRole(TrainerRole):
    """Retrieves whole checkpoints that other nodes hold."""

    def plan(self) -> float:
        """Look up the newest recoverable checkpoint; seconds."""
        start = time.perf_counter()
        self._plan = self.session.lookup()
        elapsed = time.perf_counter() - start
        self._plan.require()
        return elapsed

    def run(self) -> float:
        """Seconds of bringing all of its objects into this node's store."""
        start = time.perf_counter()
        retrieved = self.session.replication.sync_bulk_retrieve(self._plan)
        elapsed = time.perf_counter() - start
        if all(one.was_local for one in retrieved):
            raise RuntimeError("everything was on this node already, so nothing was pulled")
        return elapsed
