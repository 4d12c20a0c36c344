"""What crosses a process boundary: protobuf messages to and from the project's own types.

Every `*_from_pb` validates by constructing the id types, so what arrives from a peer is refused here, with
InvalidIdError and the reason, before anything acts on it (F38). Sizes are bytes.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from replicator.config import split_address
from replicator.decide.types import (
    ContainerInventory,
    HeldObject,
    Manifest,
    ManifestEntry,
    ObjectSource,
    Rejected,
    Unanswered,
)
from replicator.errors import ConfigError, CorruptObjectError, InvalidIdError
from replicator.ids import (
    MAX_EPOCH,
    AgreedPlacement,
    CheckpointContainerId,
    ContainerVersion,
    Labels,
    NodeAddress,
    NodeIdentity,
    ObjectVersion,
    validate_job,
    validate_labels,
    validate_node_id,
    validate_object_name,
)
from replicator.v1 import types_pb2

if TYPE_CHECKING:
    from replicator.store.trailer import ObjectInfo

MANIFEST_CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 256 << 20
MAX_SIZE = 2**63 - 1
MIN_BLOCK_SIZE = 4096
OBJECTS_PER_INVENTORY_MESSAGE = 8192


# -- ids


def version_to_pb(version: ContainerVersion) -> types_pb2.ContainerRef:
    return types_pb2.ContainerRef(job=version.container.job, step=version.container.step, generation=version.generation)


def version_from_pb(ref: types_pb2.ContainerRef) -> ContainerVersion:
    """Raises InvalidIdError."""
    return _version(ref.job, ref.step, ref.generation)


@functools.lru_cache(maxsize=256)
def _version(job: str, step: int, generation: int) -> ContainerVersion:
    """Thousands of objects have the same one."""
    return ContainerVersion(CheckpointContainerId(job, step), generation)


def object_to_pb(one: ObjectVersion) -> types_pb2.ObjectRef:
    return types_pb2.ObjectRef(container=version_to_pb(one.version), name=one.name)


def object_from_pb(ref: types_pb2.ObjectRef) -> ObjectVersion:
    """Raises InvalidIdError."""
    return version_from_pb(ref.container).object(ref.name)


def identity_to_pb(identity: NodeIdentity) -> types_pb2.NodeIdentity:
    return types_pb2.NodeIdentity(node_id=identity.node_id, incarnation=identity.incarnation)


def identity_from_pb(message: types_pb2.NodeIdentity) -> NodeIdentity:
    """Raises InvalidIdError."""
    return NodeIdentity(message.node_id, message.incarnation)


def labels_to_pb(labels: Labels) -> list[types_pb2.DomainLabel]:
    return [types_pb2.DomainLabel(level=level, value=value) for level, value in labels]


def labels_from_pb(messages: Iterable[types_pb2.DomainLabel]) -> Labels:
    """Raises InvalidIdError."""
    return validate_labels(tuple((label.level, label.value) for label in messages))


def placement_to_pb(placement: AgreedPlacement) -> types_pb2.Placement:
    return types_pb2.Placement(
        strategy=placement.strategy,
        groups=[types_pb2.NodeList(node_ids=group) for group in placement.groups],
        buddies=[types_pb2.NodeBuddies(node_id=node, buddy_node_ids=chosen) for node, chosen in placement.buddies],
    )


def placement_from_pb(message: types_pb2.Placement) -> AgreedPlacement | None:
    """None when no strategy is named. Raises InvalidIdError."""
    if not message.strategy:
        return None
    return AgreedPlacement.checked(
        message.strategy,
        (group.node_ids for group in message.groups),
        ((one.node_id, one.buddy_node_ids) for one in message.buddies),
    )


def node_address_to_pb(node: NodeAddress) -> types_pb2.NodeAddress:
    return types_pb2.NodeAddress(
        identity=identity_to_pb(node.identity), grpc_address=node.grpc_address, labels=labels_to_pb(node.labels)
    )


def node_address_from_pb(message: types_pb2.NodeAddress) -> NodeAddress:
    """Raises InvalidIdError, also for an address that is not `host:port`."""
    return NodeAddress(
        identity_from_pb(message.identity), validate_address(message.grpc_address), labels_from_pb(message.labels)
    )


def validate_address(address: str) -> str:
    """Return `host:port` as given, or raise InvalidIdError."""
    try:
        split_address(address)
    except ConfigError as error:
        raise InvalidIdError(f"address of a node: {error}") from None
    return address


@dataclass(frozen=True, slots=True)
class Sender:
    """Who speaks to a peer. `job` is empty and `epoch` 0 where no running job is behind it."""

    node: NodeIdentity
    job: str = ""
    epoch: int = 0


def sender_to_pb(sender: Sender) -> types_pb2.Sender:
    return types_pb2.Sender(node=identity_to_pb(sender.node), job=sender.job, epoch=sender.epoch)


def sender_from_pb(message: types_pb2.Sender) -> Sender:
    """Raises InvalidIdError."""
    if message.job:
        validate_job(message.job)
    if message.epoch > MAX_EPOCH:
        raise InvalidIdError(f"epoch must lie in 0..{MAX_EPOCH}, found {message.epoch}")
    return Sender(identity_from_pb(message.node), message.job, message.epoch)


# -- objects and manifests


def _size(value: int, what: str) -> int:
    if value > MAX_SIZE:
        raise InvalidIdError(f"size of {what} must be at most {MAX_SIZE} bytes, found {value}")
    return value


def held_to_pb(held: HeldObject) -> types_pb2.HeldObject:
    return types_pb2.HeldObject(name=held.name, size_bytes=held.size, crc32c=held.crc32c)


def held_from_pb(message: types_pb2.HeldObject) -> HeldObject:
    """Raises InvalidIdError."""
    name = validate_object_name(message.name)
    return HeldObject(name, _size(message.size_bytes, name), message.crc32c)


def info_to_pb(info: ObjectInfo) -> types_pb2.ObjectDescriptor:
    """The descriptor of a sealed object."""
    return types_pb2.ObjectDescriptor(
        object=object_to_pb(info.object),
        size_bytes=info.size,
        crc32c=info.crc32c,
        block_size_bytes=info.block_size,
        block_crc32c=info.block_crcs,
        owner_node_id=info.owner_node_id,
    )


def info_from_pb(message: types_pb2.ObjectDescriptor, client_id: str = "") -> ObjectInfo:
    """The object that a descriptor tells of, to be written by `client_id`.

    Raises:
        InvalidIdError: an id, a size or the number of block checksums is impossible.
        CorruptObjectError: the block checksums do not combine to the object's.
    """
    from replicator.native import combine_blocks
    from replicator.store.trailer import ObjectInfo

    one = object_from_pb(message.object)
    size = _size(message.size_bytes, str(one))
    block_size = message.block_size_bytes
    if not MIN_BLOCK_SIZE <= block_size <= 1 << 30:
        raise InvalidIdError(f"{one}: expected blocks of {MIN_BLOCK_SIZE} bytes to 1 GiB, found {block_size}")
    crcs = tuple(message.block_crc32c)
    if len(crcs) != -(-size // block_size):
        raise InvalidIdError(
            f"{one}: expected {-(-size // block_size)} block checksums for {size} bytes in blocks of {block_size}, "
            f"found {len(crcs)}"
        )
    combined = combine_blocks(crcs, size, block_size)
    if combined != message.crc32c:
        raise CorruptObjectError(
            f"{one}: its {len(crcs)} block checksums combine to {combined:08x}, but its descriptor "
            f"says {message.crc32c:08x}; nothing of it can be trusted, take another source"
        )
    return ObjectInfo(
        object=one,
        size=size,
        crc32c=message.crc32c,
        block_size=block_size,
        block_crcs=crcs,
        owner_node_id=validate_node_id(message.owner_node_id),
        client_id=client_id,
    )


def manifest_to_pb(manifest: Manifest) -> types_pb2.Manifest:
    return types_pb2.Manifest(
        container=version_to_pb(manifest.version),
        epoch=manifest.epoch,
        coordinator_node_id=manifest.coordinator_node_id,
        replicas=manifest.replicas,
        world_size=manifest.world_size,
        created_unix_ms=manifest.created_unix_ms,
        entries=[
            types_pb2.ManifestEntry(
                name=entry.name, size_bytes=entry.size, crc32c=entry.crc32c, owner_node_id=entry.owner_node_id
            )
            for entry in manifest.entries
        ],
        not_resumable=not manifest.resumable,
    )


def manifest_from_pb(message: types_pb2.Manifest) -> Manifest:
    """Raises InvalidIdError, also for entries that are not sorted by name, or a name that occurs twice."""
    owners = {entry.owner_node_id for entry in message.entries}
    for owner in owners:
        validate_node_id(owner)
    if not 1 <= message.epoch <= MAX_EPOCH:
        raise InvalidIdError(f"epoch of a manifest must lie in 1..{MAX_EPOCH}, found {message.epoch}")
    return Manifest(
        version=version_from_pb(message.container),
        epoch=message.epoch,
        coordinator_node_id=validate_node_id(message.coordinator_node_id),
        replicas=message.replicas,
        world_size=message.world_size,
        created_unix_ms=message.created_unix_ms,
        entries=tuple(
            ManifestEntry(
                validate_object_name(entry.name),
                _size(entry.size_bytes, entry.name),
                entry.crc32c,
                entry.owner_node_id,
            )
            for entry in message.entries
        ),
        resumable=not message.not_resumable,
    )


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """The bytes that are stored and sent; the same for equal manifests."""
    data: bytes = manifest_to_pb(manifest).SerializeToString(deterministic=True)
    return data


def manifest_from_bytes(data: bytes) -> Manifest:
    """Raises CorruptObjectError when `data` is no manifest, InvalidIdError when an id in it cannot be one."""
    try:
        message = types_pb2.Manifest.FromString(data)
    except DecodeError as error:
        raise CorruptObjectError(f"{len(data)} bytes that should be a manifest are not one: {error}") from None
    return manifest_from_pb(message)


def manifest_chunks(data: bytes, crc32c: int, sender: Sender) -> Iterator[types_pb2.ManifestChunk]:
    """A stored manifest as the pieces of one call (F28)."""
    for start in range(0, max(len(data), 1), MANIFEST_CHUNK_BYTES):
        chunk = types_pb2.ManifestChunk(data=data[start : start + MANIFEST_CHUNK_BYTES])
        if start == 0:
            chunk.sender.CopyFrom(sender_to_pb(sender))
            chunk.crc32c = crc32c
        yield chunk


async def join_manifest(chunks: AsyncIterable[types_pb2.ManifestChunk]) -> tuple[Sender, int, bytes]:
    """(sender, stated crc32c, data) of the pieces of one call. The checksum is not yet compared.

    Raises:
        InvalidIdError: no piece came, or they are longer than MAX_MANIFEST_BYTES.
    """
    sender: Sender | None = None
    crc32c = 0
    data = bytearray()
    async for chunk in chunks:
        if sender is None:
            sender, crc32c = sender_from_pb(chunk.sender), chunk.crc32c
        data += chunk.data
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidIdError(f"a manifest may have at most {MAX_MANIFEST_BYTES} bytes, found more")
    if sender is None:
        raise InvalidIdError("expected the pieces of a manifest, found none")
    return sender, crc32c, bytes(data)


# -- inventories and plans


def inventory_to_pb(container: ContainerInventory) -> Iterator[types_pb2.ContainerInventory]:
    """One container as messages of bounded size: same ref and marks, more objects."""
    held = sorted(container.objects.values(), key=lambda one: one.name)
    for start in range(0, max(len(held), 1), OBJECTS_PER_INVENTORY_MESSAGE):
        yield types_pb2.ContainerInventory(
            container=version_to_pb(container.version),
            has_manifest=container.manifest_crc32c is not None,
            manifest_crc32c=container.manifest_crc32c or 0,
            is_protected=container.is_protected,
            objects=[held_to_pb(one) for one in held[start : start + OBJECTS_PER_INVENTORY_MESSAGE]],
        )


def inventory_from_pb(
    message: types_pb2.ContainerInventory, more: Mapping[str, HeldObject] | None = None
) -> ContainerInventory:
    """One container, with the objects `more` that came in earlier messages. Raises InvalidIdError."""
    objects = dict(more or {})
    for one in message.objects:
        objects[one.name] = held_from_pb(one)
    return ContainerInventory(
        version=version_from_pb(message.container),
        manifest_crc32c=message.manifest_crc32c if message.has_manifest else None,
        is_protected=message.is_protected,
        objects=objects,
    )


def source_to_pb(source: ObjectSource) -> types_pb2.ObjectSource:
    return types_pb2.ObjectSource(
        name=source.name,
        size_bytes=source.size,
        crc32c=source.crc32c,
        owner_node_id=source.owner_node_id,
        node_ids=source.node_ids,
    )


def source_from_pb(message: types_pb2.ObjectSource) -> ObjectSource:
    """Raises InvalidIdError."""
    name = validate_object_name(message.name)
    return ObjectSource(
        name,
        _size(message.size_bytes, name),
        message.crc32c,
        validate_node_id(message.owner_node_id),
        tuple(validate_node_id(node_id) for node_id in message.node_ids),
    )


def rejected_to_pb(rejected: Rejected) -> types_pb2.RejectedContainer:
    return types_pb2.RejectedContainer(container=version_to_pb(rejected.version), reason=rejected.reason)


def rejected_from_pb(message: types_pb2.RejectedContainer) -> Rejected:
    """Raises InvalidIdError."""
    return Rejected(version_from_pb(message.container), message.reason)


def unanswered_to_pb(who: Unanswered) -> types_pb2.UnansweredNode:
    return types_pb2.UnansweredNode(node_id=who.node_id, grpc_address=who.grpc_address, reason=who.reason)


def unanswered_from_pb(message: types_pb2.UnansweredNode) -> Unanswered:
    """Raises InvalidIdError."""
    return Unanswered(
        validate_node_id(message.node_id) if message.node_id else "", message.grpc_address, message.reason
    )
