"""What a recovery must find: the history of saves as the driver saw it, and what lies in the stores of living nodes.

Neither asks an agent: the stores are read as files, every block verified.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from fault_nodes import CaseFailedError, Node

from replicator.decide.types import Manifest, recency
from replicator.errors import ReplicatorError
from replicator.ids import CheckpointContainerId, ContainerVersion
from replicator.store.paths import StorePaths, walk_versions
from replicator.store.reader import open_object
from replicator.store.records import Records, StoredManifest
from replicator.wire import manifest_from_bytes


@dataclass
class Save:
    """One save, and what its trainers heard of it."""

    version: ContainerVersion
    commit_asked: bool = False
    committed: bool = False
    protected: bool = False


@dataclass
class History:
    """Of one job."""

    job: str
    saves: list[Save] = field(default_factory=list)

    def begin(self, step: int, generation: int) -> Save:
        version = ContainerVersion(CheckpointContainerId(self.job, step), generation)
        if any(recency(version) <= recency(save.version) for save in self.saves):
            raise CaseFailedError(f"{version} is not newer than what was begun before")
        self.saves.append(Save(version))
        return self.saves[-1]

    def check(
        self, found: ContainerVersion | None, before: ContainerVersion | None, lost_memory: bool, beyond: bool = False
    ) -> None:
        """The step that was found is one that was to be committed, and as new as the promises say.

        Args:
            before: the newest that was recoverable, by the files, before it was looked for.
            lost_memory: a node died with its memory.
            beyond: more nodes died than there are copies.

        Raises:
            CaseFailedError: it is not so.
        """
        asked = {save.version for save in self.saves if save.commit_asked}
        if found is not None and found not in asked:
            raise CaseFailedError(f"{found} was found, of which no commit was asked")
        promised = [save.version for save in self.saves if save.protected or (save.committed and not lost_memory)]
        if beyond:
            promised = []
        for version in [*promised, *([before] if before else [])]:
            if found is None or recency(found) < recency(version):
                raise CaseFailedError(f"{version} had to be found, and {found or 'nothing'} was")

    def lost(self, found: ContainerVersion | None) -> int:
        """Saves that were committed, as a trainer was told, and are newer than what was found."""
        return sum(save.committed and (found is None or recency(save.version) > recency(found)) for save in self.saves)


def newest_recoverable(nodes: Iterable[Node]) -> ContainerVersion | None:
    """By the files of these nodes: the newest with a manifest of which every object is held whole by one of them."""
    stores = [node.paths for node in nodes if node.root.exists()]
    manifests: dict[ContainerVersion, Manifest] = {}
    for paths in stores:
        for stored in _manifests(paths):
            manifests[stored.version] = manifest_from_bytes(stored.data)
    for version in sorted(manifests, key=recency, reverse=True):
        if all(
            any(_holds(paths, version, entry.name, entry.size, entry.crc32c) for paths in stores)
            for entry in manifests[version].entries
        ):
            return version
    return None


def is_healed(nodes: Iterable[Node], version: ContainerVersion, copies: int) -> bool:
    """By the files of these nodes: each object of the container is held whole by so many of them."""
    stores = [node.paths for node in nodes if node.root.exists()]
    found = [stored for paths in stores for stored in _manifests(paths) if stored.version == version]
    return bool(found) and all(
        sum(_holds(paths, version, entry.name, entry.size, entry.crc32c) for paths in stores) >= copies
        for entry in manifest_from_bytes(found[0].data).entries
    )


def _manifests(paths: StorePaths) -> list[StoredManifest]:
    while paths.manifests.is_dir():
        # Its agent may be dropping some of them.
        with contextlib.suppress(FileNotFoundError):
            return [stored for stored in Records(paths).manifests() if isinstance(stored, StoredManifest)]
    return []


def _holds(paths: StorePaths, version: ContainerVersion, name: str, size: int, crc: int) -> bool:
    with contextlib.suppress(ReplicatorError), open_object(paths, version.object(name)) as reader:
        reader.verify()
        return (reader.info.size, reader.info.crc32c) == (size, crc)
    return False


def check_index(node: Node) -> None:
    """The agent's index is what the files are, and nothing is reserved. Raises CaseFailedError."""
    status = node.status()
    files = 0
    for version, directory in walk_versions(node.paths.objects):
        if version is None:
            raise CaseFailedError(f"{directory} does not belong there")
        files += len(list(directory.iterdir()))
    if status.sealed_objects != files:
        raise CaseFailedError(f"{node.node_id} has {files} objects, its index {status.sealed_objects}")
    if status.reserved_bytes:
        raise CaseFailedError(f"{node.node_id} still has {status.reserved_bytes} bytes reserved")
    if status.quarantined_objects:
        raise CaseFailedError(f"{node.node_id} has {status.quarantined_objects} objects in quarantine")
    written = [path.name for path in node.paths.segments.iterdir() if path.name.startswith(("w.", ".tmp"))]
    if written:
        raise CaseFailedError(f"{node.node_id} has segments that nobody writes: {written}")
