"""Knows everything: what was saved, what every store really has, and what must hold at each moment.

Every method that checks counts, and tells the world what is broken instead of raising: it is called from inside of the
agents, who would take it for an error of theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replicator.decide.types import Manifest, recency
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.store import Store
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2, types_pb2
from replicator.wire import version_from_pb

from .history import CommitAsked, Committed, Damaged, History, Protected

if TYPE_CHECKING:
    from .node import SimNode
    from .world import World


@dataclass
class Container:
    """One attempt at saving a step, as it really is.

    Attributes:
        later: members of the job's epochs since.
    """

    version: ContainerVersion
    members: tuple[str, ...]
    replicas: int
    later: list[frozenset[str]] = field(default_factory=list)
    manifest: Manifest | None = None
    damaged: set[str] = field(default_factory=set)
    committed: bool = False
    protected: bool = False

    @property
    def resumable(self) -> bool:
        """Whether a job can go on from it: as long as nothing else was said, it can."""
        return self.manifest is None or self.manifest.resumable


class Oracle:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.checked: Counter[str] = Counter()
        self.histories: dict[str, History] = {}
        self.saved: dict[ObjectVersion, tuple[ObjectInfo, bytes]] = {}
        self.containers: dict[ContainerVersion, Container] = {}
        self.restores = 0
        self.is_over = False

    def history(self, job: str) -> History:
        return self.histories.setdefault(job, History())

    def forget(self, job: str) -> None:
        """No store that exists knows the job any more: what comes now has nothing to do with what was."""
        self.history(job).events.clear()
        self.containers = {version: one for version, one in self.containers.items() if version.container.job != job}

    # -- what happens

    def opened(self, job: str, members: Iterable[str]) -> None:
        """A job has a new epoch."""
        names = frozenset(members)
        for version, container in self.containers.items():
            if version.container.job == job:
                container.later.append(names)

    def begun(self, version: ContainerVersion, members: Iterable[str], replicas: int) -> None:
        """A coordinator was given a new attempt."""
        self.checked["a generation is given once"] += 1
        # Of one that was lost with all that knew its epoch nobody can tell.
        if version in self.containers and any(
            node.store is not None and version in node.store.versions() for node in self.world.nodes
        ):
            self.world.broken(f"{version} was begun twice")
        events = self.history(version.container.job).events
        events[:] = [event for event in events if getattr(event, "version", None) != version]
        names = tuple(members)
        self.containers[version] = Container(version, names, min(replicas, len(names) - 1))

    def written(self, info: ObjectInfo, data: bytes) -> None:
        """A rank is about to seal an object."""
        self.saved[info.object] = (info, data)

    def commit_asked(self, manifest: Manifest) -> None:
        container = self.containers[manifest.version]
        container.manifest = manifest
        asked = CommitAsked(self._now, manifest.version, container.replicas, manifest.resumable)
        self.history(manifest.version.container.job).add(asked)
        if not manifest.resumable:
            self.world.faults["save of the model alone"] += 1

    def damaged(self, node: str, version: ContainerVersion) -> None:
        """A node lost something of a container, or has it with other bits."""
        container = self.containers.get(version)
        if container is not None and node not in container.damaged:
            container.damaged.add(node)
            self.history(version.container.job).add(Damaged(self._now, version, node))

    def node_lost(self, node: SimNode) -> None:
        """All that a node had is gone."""
        for version in self.containers:
            self.damaged(node.name, version)

    def commit_told(self, version: ContainerVersion, event: local_pb2.CommitEvent) -> None:
        """A coordinator was told how its commit goes."""
        container = self.containers[version]
        if event.ok and not container.committed:
            container.committed = True
            self.history(version.container.job).add(Committed(self._now, version))
            self._check_commit(container)
        if event.ok and event.is_protected:
            self.protected(version)

    def protected(self, version: ContainerVersion) -> None:
        """An agent takes it for protected, also when the rank that asked for it is no more."""
        container = self.containers.get(version)
        if container is not None and not container.protected:
            container.protected = True
            self.history(version.container.job).add(Protected(self._now, version))
            self._check_protection(container)
            self._check_spread(container)

    # -- what must hold

    def _check_commit(self, container: Container) -> None:
        self.checked["a commit is on R+1 nodes when it succeeds"] += 1
        having = {node.name for node in self.world.nodes if _manifest(node.store, container.version) is not None}
        if len(having | container.damaged) < container.replicas + 1:
            self.world.broken(
                f"{container.version} is committed, its manifest should be on {container.replicas + 1} nodes, and is "
                f"on {sorted(having)} (lost since it was begun: {sorted(container.damaged)})"
            )

    def _check_protection(self, container: Container) -> None:
        self.checked["every object of a protected container has R+1 copies"] += 1
        assert container.manifest is not None
        for entry in container.manifest.entries:
            one = container.version.object(entry.name)
            for node in self.world.nodes:
                self._check_file(node, one)
            having = {node.name for node in self.world.nodes if self._is_sound_in_index(node.store, one)}
            # A job that went on with fewer nodes cannot have more copies than nodes.
            others = [len(members - {entry.owner_node_id}) for members in container.later]
            container.replicas = min([container.replicas, *others])
            if len(having | container.damaged) < container.replicas + 1:
                self.world.broken(
                    f"{container.version} is protected, and {entry.name} is on {sorted(having)} only "
                    f"(lost since it was begun: {sorted(container.damaged)})"
                )

    def _is_sound_in_index(self, store: Store | None, one: ObjectVersion) -> bool:
        if store is None:
            return False
        found = store.get(one)
        saved = self.saved.get(one)
        return found is not None and saved is not None and (found.size, found.crc32c) == _content(saved[0])

    def is_recoverable(self, version: ContainerVersion) -> bool:
        """Whether the stores that exist have a manifest of it and a copy of every object, as their indexes say."""
        container = self.containers.get(version)
        if container is None or container.manifest is None:
            return False
        stores = [node.store for node in self.world.nodes if node.store is not None]
        if not any(_manifest(store, version) is not None for store in stores):
            return False
        by_name = {node.name: node.store for node in self.world.nodes}
        for entry in container.manifest.entries:
            one = version.object(entry.name)
            if not self._is_sound_in_index(by_name.get(entry.owner_node_id), one) and not any(
                self._is_sound_in_index(store, one) for store in stores
            ):
                return False
        return True

    def newest_recoverable(self, job: str) -> ContainerVersion | None:
        """Of all that exists and that a job can go on from, whoever can reach it."""
        of_job = (one for one, known in self.containers.items() if one.container.job == job and known.resumable)
        ordered = sorted(of_job, key=recency, reverse=True)
        return next((version for version in ordered if self.is_recoverable(version)), None)

    def dropping(self, node: SimNode, version: ContainerVersion) -> Callable[[], None]:
        """An agent is about to drop a container; call the result when it has."""
        self.world.trace("drops", node=node.name, version=version)
        self.checked["the newest recoverable is never dropped"] += 1
        job = version.container.job
        container = self.containers.get(version)
        newer = [one for one in self.containers.values() if recency(one.version) > recency(version)]
        newer = [one for one in newer if one.version.container.job == job]
        what = "newest"
        if container is not None and container.resumable and any(not one.resumable for one in newer):
            # None of them takes its place, however safe they are.
            self.checked["the model alone never supersedes what a job can go on from"] += 1
            newer = [one for one in newer if one.resumable]
            what = "newest that a job can go on from, of those"
        was_recoverable = self.is_recoverable(version)
        # More was lost than any of the newer ones was to survive: what a node does not know it cannot act on.
        beyond = any(one.protected and len(one.damaged) > one.replicas for one in newer)

        def dropped() -> None:
            if not was_recoverable or self.is_recoverable(version) or beyond:
                return
            if not any(self.is_recoverable(one.version) for one in newer):
                self.world.broken(f"node {node.name} dropped {version}, the {what} that could be restored")

        self.checked["the newest committed and protected are never dropped"] += 1
        if container is not None and len(container.damaged) <= container.replicas:
            if container.protected and not any(map(self._is_protected, newer)):
                self.world.broken(f"node {node.name} drops {version}, the {what} protected")
            elif container.committed and not any(map(self._is_committed, newer)):
                self.world.broken(f"node {node.name} drops {version}, the {what} committed")
        return dropped

    def _is_protected(self, one: Container) -> bool:
        """Whether any node ever said so."""
        return one.protected

    def _is_committed(self, one: Container) -> bool:
        """Whether it was, or may be without the coordinator's having been told."""
        return one.committed or any(_manifest(node.store, one.version) is not None for node in self.world.nodes)

    def check_moment(self, nodes: Iterable[SimNode]) -> None:
        """What must hold always, of the nodes where something happened."""
        looked_at = epochs = 0
        for node in nodes:
            store, agent = node.store, node.agent
            if store is None or agent is None or not agent.is_ready or not agent.process.alive:
                continue
            looked_at += 1
            used = store._used()
            if used > store._budget:
                self.world.broken(f"node {node.name} uses {used} of {store._budget} bytes")
            for job, state in agent.core.jobs._states.items():
                epochs += 1
                before = node.epochs.get(job, 0)
                if state.epoch < before:
                    self.world.broken(f"node {node.name} went from epoch {before} of {job} back to {state.epoch}")
                node.epochs[job] = state.epoch
        self.checked["the budget is never exceeded"] += looked_at
        self.checked["an epoch only grows"] += epochs

    def check_plan(
        self, node: SimNode, job: str, plan: types_pb2.Plan, calm: bool, newest: ContainerVersion | None
    ) -> None:
        """A lookup answered. `newest`: what was the newest recoverable when it was asked."""
        self.checked["a plan is the newest recoverable"] += 1
        found = version_from_pb(plan.container) if plan.found else None
        if found is not None:
            container = self.containers.get(found)
            if container is None or container.manifest is None:
                self.world.broken(f"node {node.name} plans {found}, of which no commit was ever asked for")
                return
            if not container.resumable:
                self.world.broken(f"node {node.name} plans {found}, which is the model alone")
            listed = {source.name for source in plan.sources}
            if listed != {entry.name for entry in container.manifest.entries}:
                self.world.broken(f"node {node.name} plans {found} with other objects than its manifest lists")
        if calm and newest == self.newest_recoverable(job) and found != newest:
            self.world.broken(f"node {node.name} plans {found}, the newest recoverable is {newest}: {plan.reason}")

    def check_bytes(self, version: ContainerVersion, loaded: dict[str, bytes]) -> tuple[str, ...]:
        """Names of loaded objects that are not what was saved in this very generation."""
        self.checked["restored bytes are the saved ones"] += len(loaded)
        return tuple(
            name for name, data in loaded.items() if self.saved.get(version.object(name), (None, None))[1] != data
        )

    def audit(self) -> None:
        """Every object in every store is what was saved under that name and generation."""
        self.is_over = self.world.shape.scrubs
        for node in self.world.nodes:
            if node.store is None:
                continue
            for version in node.store.versions():
                for name in node.store.objects(version):
                    self._check_file(node, version.object(name))

    def is_sound(self, node: SimNode, one: ObjectVersion) -> bool:
        """Whether a node's copy is in its index, and its file has the bytes that were saved."""
        if node.store is None or not self._is_sound_in_index(node.store, one):
            return False
        info, path = node.store.get(one), node.store.paths.object(one)
        return info is not None and path.exists() and path.read_bytes()[: info.size] == self.saved[one][1]

    def spare_copies(self) -> list[tuple[SimNode, ObjectInfo]]:
        """Of each job, a copy in its newest protected container of an object that another node has too, if there is."""
        found = []
        for job in self.histories:
            ordered = sorted((one for one in self.containers if one.container.job == job), key=recency, reverse=True)
            newest = next((one for one in ordered if self.containers[one].protected), None)
            if newest is None:
                continue
            copies = [
                (node, info)
                for node in self.world.nodes
                if node.store is not None
                for info in node.store.objects(newest).values()
                if info.size
                and sum(self.is_sound(other, info.object) for other in self.world.nodes) > 1
                and self.is_sound(node, info.object)
            ]
            if copies:
                found.append(self.world.rng.choice(copies))
        return found

    def _check_spread(self, container: Container) -> None:
        """With one replica and racks of which none has more than half of the members, no object is in one rack only."""
        racks = {node.name: node.config.labels for node in self.world.nodes}
        here = [racks[name] for name in container.members]
        if container.replicas != 1 or not all(here) or 2 * max(map(here.count, here)) > len(here) or container.damaged:
            return
        agent = next((node.agent for node in self.world.nodes if node.is_up), None)
        if agent is None or any(node.agent is not None and node.agent.core.jobs.dead for node in self.world.nodes):
            return
        self.checked["copies are spread over racks"] += 1
        agreed = agent.core.jobs.placement(container.version.container.job).buddies
        if agent.core.jobs.epoch(container.version.container.job) != container.version.epoch:
            return
        for owner, buddies in agreed.items():
            if {racks[owner]} >= {racks[buddy] for buddy in buddies}:
                self.world.broken(
                    f"objects of {owner} have their copies on {buddies}, all in its own rack {racks[owner]}"
                )

    def _check_file(self, node: SimNode, one: ObjectVersion) -> None:
        """A node's copy of an object, if it has one."""
        info = node.store.get(one) if node.store is not None else None
        if info is None or node.store is None:
            return
        self.checked["a sealed object is what was saved"] += 1
        saved = self.saved.get(one)
        if saved is None or _content(saved[0]) != _content(info):
            self.world.broken(f"node {node.name} has {one} with content that nobody saved")
            return
        path = node.store.paths.object(one)
        # Where all is verified again and again, nothing that turned is left at the end.
        may_be_bad = (node.name, one) in self.world.flipped and not self.is_over
        if not may_be_bad and path.exists() and path.read_bytes()[: info.size] != saved[1]:
            self.world.broken(f"node {node.name} has sealed {one} with other bytes than were saved")

    @property
    def _now(self) -> float:
        return self.world.loop.time()


def _manifest(store: Store | None, version: ContainerVersion) -> bytes | None:
    return None if store is None else store.manifest(version)


def _content(info: ObjectInfo) -> tuple[int, int]:
    return info.size, info.crc32c
