"""Manifests: those stored here, decoded once because they never change, and those that another node has."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from replicator.agent.counters import Counters
from replicator.agent.peers import PeerDirectory
from replicator.decide.types import Manifest
from replicator.errors import CommitError, CorruptObjectError, InvalidIdError, ReplicatorError, StoreFullError
from replicator.ids import ContainerVersion, NodeAddress
from replicator.native import crc32c
from replicator.store import Store
from replicator.v1 import peer_pb2, types_pb2
from replicator.wire import Sender, join_manifest, manifest_from_bytes, sender_to_pb, version_to_pb

MAX_DECODED = 32


class Manifests:
    """The manifests of one store. Thread-safe."""

    def __init__(self, store: Store, counters: Counters) -> None:
        self._store = store
        self._counters = counters
        self._lock = threading.Lock()
        self._decoded: OrderedDict[ContainerVersion, tuple[bytes, int, Manifest | None]] = OrderedDict()

    def get(self, version: ContainerVersion) -> Manifest | None:
        """The manifest of `version`, None when it is not stored here or cannot be read."""
        found = self._find(version)
        return None if found is None else found[2]

    def crc(self, version: ContainerVersion) -> int | None:
        """CRC32C of the stored bytes; None when there is no manifest that can be read."""
        found = self._find(version)
        return None if found is None or found[2] is None else found[1]

    def data(self, version: ContainerVersion) -> tuple[bytes, int] | None:
        """The stored bytes and their CRC32C; None when there is no manifest that can be read."""
        found = self._find(version)
        return None if found is None or found[2] is None else (found[0], found[1])

    def is_resumable(self, version: ContainerVersion) -> bool:
        """Whether a job can go on from it; what is not known to be otherwise is."""
        manifest = self.get(version)
        return manifest is None or manifest.resumable

    def committed(self, job: str) -> dict[ContainerVersion, bool]:
        """The containers of a job whose manifest is stored here, and whether each is resumable."""
        found = ((version, self.get(version)) for version in self._store.versions(job))
        return {version: manifest.resumable for version, manifest in found if manifest is not None}

    def protected(self, job: str) -> dict[ContainerVersion, bool]:
        """Those of `committed` that are protected."""
        return {
            version: manifest.resumable
            for version in self._store.versions(job)
            if self._store.is_protected(version) and (manifest := self.get(version)) is not None
        }

    def put(
        self,
        data: bytes,
        stated_crc: int,
        job: str = "",
        check: Callable[[ContainerVersion], None] = lambda version: None,
    ) -> Manifest:
        """Check a serialized manifest and store it. Idempotent for the same bytes.

        Args:
            job: when given, the manifest must be of this job.
            check: called before it is stored, in the caller's thread; what it raises keeps it out.

        Raises:
            CorruptObjectError: the bytes do not have the stated checksum, or are no manifest.
            InvalidIdError: an id in it cannot be one, or it is of another job.
            CommitError: another manifest of that version is stored here; a commit is never changed.
            StoreFullError: no room.
        """
        actual = crc32c(data)
        if actual != stated_crc:
            raise CorruptObjectError(
                f"a manifest of {len(data)} bytes has checksum {actual:08x}, expected {stated_crc:08x}; send it again"
            )
        manifest = manifest_from_bytes(data)
        version = manifest.version
        if job and version.container.job != job:
            raise InvalidIdError(f"expected a manifest of job {job}, found one of {version}")
        check(version)
        stored = self._store.manifest(version)
        if stored is not None and stored != data:
            raise CommitError(
                f"{version} is committed here with another manifest (checksum {crc32c(stored):08x}, found "
                f"{actual:08x}); a commit is never changed, save the step again to get a new attempt"
            )
        if stored is None:
            try:
                self._store.put_manifest(version, data, actual)
            except OSError as error:
                raise StoreFullError(f"the manifest of {version} cannot be stored: {error.strerror}") from None
            self._counters.add("manifests_stored")
        with self._lock:
            self._remember(version, (data, actual, manifest))
        return manifest

    def _find(self, version: ContainerVersion) -> tuple[bytes, int, Manifest | None] | None:
        data = self._store.manifest(version)
        with self._lock:
            if data is None:
                self._decoded.pop(version, None)
                return None
            known = self._decoded.get(version)
            if known is not None and known[0] == data:
                self._decoded.move_to_end(version)
                return known
        try:
            manifest: Manifest | None = manifest_from_bytes(data)
            if manifest is not None and manifest.version != version:
                manifest = None
        except ReplicatorError:
            self._counters.add("manifests_unreadable")
            manifest = None
        found = (data, crc32c(data), manifest)
        with self._lock:
            self._remember(version, found)
        return found

    def _remember(self, version: ContainerVersion, found: tuple[bytes, int, Manifest | None]) -> None:
        self._decoded[version] = found
        self._decoded.move_to_end(version)
        while len(self._decoded) > MAX_DECODED:
            self._decoded.popitem(last=False)


def check_own(manifest: Manifest, me: str, store: Store) -> None:
    """Whether the coordinator `me` may commit it: all objects of its own are here, as they are listed.

    Raises:
        CommitError: they are not, another node is its coordinator, or nothing is listed.
    """
    version = manifest.version
    if manifest.coordinator_node_id != me:
        raise CommitError(
            f"{version}: the manifest names {manifest.coordinator_node_id} as its coordinator, this is {me}; "
            "commit it with the agent of the coordinator's own node"
        )
    if not manifest.entries:
        raise CommitError(f"{version}: the manifest lists no objects, so there would be nothing to load")
    held = store.objects(version)
    for entry in manifest.entries:
        if entry.owner_node_id != me:
            continue
        info = held.get(entry.name)
        if info is None or (info.size, info.crc32c) != (entry.size, entry.crc32c):
            found = "it is not here" if info is None else f"found {info.size} bytes, checksum {info.crc32c:08x}"
            raise CommitError(
                f"{version}: expected {entry.name} on this node with {entry.size} bytes and checksum "
                f"{entry.crc32c:08x}, {found}; seal every object before the commit"
            )


async def fetch_manifest(
    peers: PeerDirectory, sender: Sender, version: ContainerVersion, node: NodeAddress, idle_s: float
) -> tuple[bytes, int]:
    """(data, crc32c) of the manifest as `node` has it, checked.

    Args:
        idle_s: without a piece of it for this long, it is given up.

    Raises:
        CorruptObjectError: the bytes do not have the stated checksum, are no manifest, or one of another container.
        ReplicatorError: the node does not give it.
    """
    request = peer_pb2.GetManifestRequest(sender=sender_to_pb(sender), container=version_to_pb(version))
    awaited = f"the manifest of {version}"
    chunks = peers.stream(
        node, "PeerService/GetManifest", request, types_pb2.ManifestChunk, awaited=awaited, idle_s=idle_s
    )
    _, stated, data = await join_manifest(chunks)
    actual = crc32c(data)
    if actual != stated:
        raise CorruptObjectError(f"{awaited} from node {node.node_id} has checksum {actual:08x}, expected {stated:08x}")
    found = manifest_from_bytes(data).version
    if found != version:
        raise CorruptObjectError(f"node {node.node_id} gave a manifest of {found}, expected {awaited}")
    return data, stated
