"""The small files of a store: manifests, marks of protection, and what is known of each job."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicator.config import split_address
from replicator.errors import CorruptObjectError
from replicator.ids import (
    MAX_ATTEMPT,
    MAX_EPOCH,
    AgreedPlacement,
    CheckpointContainerId,
    ContainerVersion,
    NodeAddress,
    NodeIdentity,
    validate_job,
)
from replicator.native import crc32c
from replicator.small_json import parse_json
from replicator.store.paths import StorePaths, read_small, walk_versions, write_atomic

_MANIFEST_MAGIC = b"RPLMAN\x00\x01"
_HEAD = struct.Struct("<8sI")
_MANIFEST = "manifest"
_PROTECTED = "protected"
_MAX_REPLICAS = 2**32 - 1  # as on the wire


@dataclass(frozen=True, slots=True)
class JobState:
    """What a node remembers of a job over restarts of its agent.

    `members` are those of `members_epoch`, the newest epoch that was joined here, and `placement` is theirs (None in
    records of versions that had none); `remembered` are other nodes, of earlier epochs. Attempts of `epoch` up to
    `attempt` may have been given out. `retrieved` is what trainers loaded here last, in `retrieved_epoch`.
    """

    job: str
    epoch: int
    members: tuple[NodeAddress, ...]
    replicas: int
    members_epoch: int = 0
    remembered: tuple[NodeAddress, ...] = ()
    attempt: int = 0
    placement: AgreedPlacement | None = None
    retrieved: ContainerVersion | None = None
    retrieved_epoch: int = 0


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest as it was put, its checksum verified."""

    version: ContainerVersion
    data: bytes
    is_protected: bool


class Records:
    """Reads and writes the small files; each change is one rename. Not thread-safe."""

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths

    def put_manifest(self, version: ContainerVersion, data: bytes, crc: int) -> None:
        directory = self._paths.manifest_of(version)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(directory / _MANIFEST, _HEAD.pack(_MANIFEST_MAGIC, crc) + data)

    def mark_protected(self, version: ContainerVersion) -> None:
        write_atomic(self._paths.manifest_of(version) / _PROTECTED, b"")

    def drop(self, version: ContainerVersion) -> None:
        """Remove manifest and mark; the manifest first, so that no crash leaves one without its objects."""
        directory = self._paths.manifest_of(version)
        for name in (_MANIFEST, _PROTECTED):
            (directory / name).unlink(missing_ok=True)
        remove_empty(directory, self._paths.manifests)

    def manifests(self) -> Iterator[StoredManifest | Path]:
        """All manifests; the path of what is damaged or does not belong there. A mark that was left over is removed."""
        for version, directory in walk_versions(self._paths.manifests):
            if version is None:
                yield directory
                continue
            yield from (path for path in sorted(directory.iterdir()) if path.name not in (_MANIFEST, _PROTECTED))
            is_protected = (directory / _PROTECTED).exists()
            try:
                yield StoredManifest(version, _read_manifest(directory / _MANIFEST), is_protected)
            except FileNotFoundError:
                (directory / _PROTECTED).unlink(missing_ok=True)
            except (CorruptObjectError, OSError):
                yield directory

    def put_job(self, state: JobState) -> None:
        content: dict[str, object] = {
            "epoch": state.epoch,
            "replicas": state.replicas,
            "members": _nodes_to_json(state.members),
            "members_epoch": state.members_epoch,
            "remembered": _nodes_to_json(state.remembered),
            "attempt": state.attempt,
            "placement": None if state.placement is None else state.placement.to_json(),
        }
        if state.retrieved is not None:
            one = state.retrieved
            content["retrieved"] = [one.container.step, one.generation, state.retrieved_epoch]
        text = json.dumps({"crc32c": _json_crc(content), "state": content})
        write_atomic(self._paths.job(state.job), text.encode())

    def jobs(self) -> Iterator[JobState | Path]:
        """The state of all jobs; the path of what is damaged or does not belong there."""
        for path in sorted(self._paths.jobs.iterdir()):
            try:
                yield _read_job(path)
            except (CorruptObjectError, OSError):
                yield path


def _read_manifest(path: Path) -> bytes:
    data = read_small(path)
    if len(data) < _HEAD.size or data[:8] != _MANIFEST_MAGIC:
        raise CorruptObjectError(f"{path} is not a manifest")
    crc = _HEAD.unpack_from(data)[1]
    if crc32c(data[_HEAD.size :]) != crc:
        raise CorruptObjectError(f"{path} does not match its checksum")
    return data[_HEAD.size :]


def _read_job(path: Path) -> JobState:
    """Raises CorruptObjectError, OSError."""
    try:
        stored = parse_json(read_small(path))
        found = stored["state"]
        if path.suffix != ".json" or _json_crc(found) != stored["crc32c"]:
            raise ValueError("it does not match its checksum")
        job = validate_job(path.stem)
        retrieved, retrieved_epoch = None, 0
        if found.get("retrieved") is not None:
            step, generation, retrieved_epoch = found["retrieved"]
            retrieved = ContainerVersion(CheckpointContainerId(job, step), generation)
        return JobState(
            job=job,
            epoch=_number(found["epoch"], MAX_EPOCH),
            members=_nodes_from_json(found["members"]),
            replicas=_number(found["replicas"], _MAX_REPLICAS),
            members_epoch=_number(found["members_epoch"], MAX_EPOCH),
            remembered=_nodes_from_json(found["remembered"]),
            attempt=_number(found["attempt"], MAX_ATTEMPT),
            placement=None if found.get("placement") is None else AgreedPlacement.from_json(found["placement"]),
            retrieved=retrieved,
            retrieved_epoch=_number(retrieved_epoch, MAX_EPOCH),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptObjectError(f"{path} is damaged: {error}") from None


def _json_crc(content: object) -> int:
    return crc32c(json.dumps(content, sort_keys=True).encode())


def _nodes_to_json(nodes: tuple[NodeAddress, ...]) -> list[list[Any]]:
    return [[node.node_id, f"{node.identity.incarnation:016x}", node.grpc_address, node.labels] for node in nodes]


def _nodes_from_json(found: list[list[Any]]) -> tuple[NodeAddress, ...]:
    """Earlier versions had no labels."""
    nodes = []
    for node_id, incarnation, address, *rest in found:
        split_address(address)
        labels = tuple((level, value) for pairs in rest for level, value in pairs)
        nodes.append(NodeAddress(NodeIdentity(node_id, int(incarnation, 16)), address, labels))
    return tuple(nodes)


def _number(found: object, most: int) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
        raise ValueError(f"expected a number in 0..{most}, found {str(found)[:80]!r}")
    return found


def remove_empty(directory: Path, top: Path) -> None:
    """Remove a directory and its parents below `top`, as far as they are empty."""
    with contextlib.suppress(OSError):
        while directory != top:
            directory.rmdir()
            directory = directory.parent
