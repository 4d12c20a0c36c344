"""A trainer process for the fault tests, driven by JSON lines: one command on stdin, one answer on stdout.

It is the library as a training loop uses it, only without torch: sessions, objects, replication, commit, lookup, load.
Usage: fault_trainer.py ROOT DEADLINE_S.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from replicator.client.local_agent import LocalAgent
from replicator.client.outstanding import CommitFutures
from replicator.client.plan import Plan
from replicator.client.session import Session
from replicator.client.session_spec import SessionSpec
from replicator.decide.types import Manifest, ManifestEntry
from replicator.errors import ReplicatorError
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity
from replicator.store.reader import open_object

LARGE = 5 << 20  # more than one block
SMALL = 3000
SMALLS = 3


def content(version: ContainerVersion, name: str, size: int) -> bytes:
    """What an object must hold: nobody else could have written the same."""
    return random.Random(f"{version} {name}").randbytes(size)


def sizes(node_id: str, large: int) -> Iterator[tuple[str, int]]:
    """The objects of one rank, with their sizes in bytes."""
    yield f"{node_id}-large", large
    for index in range(SMALLS):
        yield f"{node_id}-small-{index}", SMALL + index


class Trainer:
    """The commands. What one raises is its answer."""

    def __init__(self, root: str, deadline_s: float) -> None:
        self._agent = LocalAgent(root, deadline_s=deadline_s, auto_start=False)
        self._deadline_s = deadline_s
        self._session: Session
        self._futures: list[Any] = []
        self._commits: dict[ContainerVersion, CommitFutures] = {}
        self._plan: Plan

    def node(self) -> list[str]:
        """[node id, incarnation, gRPC address] of the agent."""
        node = self._agent.node
        return [node.node_id, f"{node.identity.incarnation:x}", node.grpc_address]

    def open_job(self, job: str, members: list[list[str]]) -> int:
        return self._agent.open_job(job, _addresses(members), self._deadline_s)[0]

    def join(self, job: str, epoch: int, members: list[list[str]], replicas: int) -> list[str]:
        """The buddies of this node."""
        spec = SessionSpec(
            root=str(self._agent.root),
            job=job,
            epoch=epoch,
            members=_addresses(members),
            replicas=replicas,
            deadline_s=self._deadline_s,
            auto_start=False,
            idle_exit_s=None,
        )
        self._agent.join_job(job, epoch, spec.members, replicas)
        self._session = Session(self._agent, spec)
        return list(self._agent.buddies(job))

    def begin(self, step: int) -> int:
        """The generation."""
        return self._session.begin(CheckpointContainerId(self._session.job, step), self).generation

    def write(self, step: int, generation: int, large: int = LARGE) -> dict[str, Any]:
        """Write, seal and replicate this rank's objects; entries of the manifest, and how long it took."""
        version = self._version(step, generation)
        started = time.monotonic()
        entries, sealed = [], []
        for name, size in sizes(self._agent.node.node_id, large):
            with self._session.create(version.object(name), size) as sink:
                sink.write(content(version, name, size))
            sealed.append(sink.info.object)
            entries.append([name, sink.info.size, sink.info.crc32c, sink.info.owner_node_id])
        copies = self._session.replication.async_replicate_many(sealed)
        self._futures = [future for futures in copies.values() for future in futures]
        return {"entries": entries, "seconds": time.monotonic() - started}

    def copies(self, deadline_s: float) -> dict[str, Any]:
        """How many copies of the last `write` were made, and why others were not."""
        end = time.monotonic() + deadline_s
        made, errors = 0, []
        for future in self._futures:
            error = future.exception(max(end - time.monotonic(), 0))
            made += error is None
            if error is not None:
                errors.append(f"{type(error).__name__}: {error}")
        return {"made": made, "errors": errors}

    def commit(self, step: int, generation: int, entries: list[list[Any]], replicas: int) -> float:
        """Hand the manifest to the agent; the seconds that took."""
        version = self._version(step, generation)
        manifest = Manifest(
            version=version,
            epoch=self._session.epoch,
            coordinator_node_id=self._agent.node.node_id,
            replicas=replicas,
            world_size=len(self._session.members),
            created_unix_ms=1,
            entries=tuple(sorted((ManifestEntry(*entry) for entry in entries), key=lambda entry: entry.name)),
        )
        started = time.monotonic()
        self._commits[version] = self._session.commit(manifest)
        return time.monotonic() - started

    def outcome(self, step: int, generation: int, what: str, deadline_s: float) -> str:
        """`yes`, or why the container is not `committed` or `protected`."""
        future = getattr(self._commits[self._version(step, generation)], what)
        try:
            error = future.exception(deadline_s)
        except TimeoutError:
            return "no outcome in time"
        return "yes" if error is None else f"{type(error).__name__}: {error}"

    def lookup(self) -> dict[str, Any]:
        """The plan, as far as the driver looks at it."""
        started = time.monotonic()
        self._plan = plan = self._session.lookup()
        return {
            "step": plan.step,
            "generation": plan.version.generation if plan.version is not None else None,
            "sources": [[source.name, *source.node_ids] for source in plan.sources],
            "reason": plan.reason,
            "unanswered": [who.name for who in plan.unanswered],
            "seconds": time.monotonic() - started,
        }

    def load(self, all_objects: bool = False) -> dict[str, Any]:
        """Bring this rank's objects (or all) of the last plan here, and compare every byte with what was saved."""
        version = self._plan.require()
        me = self._agent.node.node_id
        wanted = [one for one in self._plan.sources if all_objects or one.owner_node_id == me]
        started = time.monotonic()
        found = self._session.replication.sync_bulk_retrieve([version.object(one.name) for one in wanted])
        seconds = time.monotonic() - started
        for one in wanted:
            with open_object(self._agent.paths, version.object(one.name)) as reader:
                reader.verify()
                if bytes(reader.view) != content(version, one.name, one.size):
                    raise AssertionError(f"{one.name} of {version} is not what was saved")
        return {
            "loaded": len(wanted),
            "pulled_from": sorted({one.source_node_id for one in found} - {""}),
            "s": seconds,
        }

    def wait_lost(self, deadline_s: float) -> float:
        """Wait until the agent is known to be gone; the monotonic clock then."""
        end = time.monotonic() + deadline_s
        while self._agent.connected:
            if time.monotonic() > end:
                raise TimeoutError("the agent still counts as connected")
            time.sleep(0.002)
        return time.monotonic()

    def wait_connected(self, deadline_s: float) -> bool:
        self._agent.wait_connected(deadline_s)
        return True

    def threads(self) -> int:
        return threading.active_count()

    def _version(self, step: int, generation: int) -> ContainerVersion:
        return ContainerVersion(CheckpointContainerId(self._session.job, step), generation)


def _addresses(members: list[list[str]]) -> tuple[NodeAddress, ...]:
    return tuple(NodeAddress(NodeIdentity(node_id, int(text, 16)), address) for node_id, text, address in members)


def main() -> None:
    trainer: Trainer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            if name == "attach":
                trainer = Trainer(sys.argv[1], float(sys.argv[2]))
                answer: Any = {"ok": trainer.node()}
            else:
                answer = {"ok": getattr(trainer, name)(**command)}
        except (ReplicatorError, AssertionError, TimeoutError, OSError, KeyError, AttributeError) as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
