"""What the decisions look at and what they return: inventories, manifests, plans. Plain values, no I/O.

Sizes are bytes; checksums are CRC32C of all bytes of an object. Objects are told apart by their logical
name only, never by the node or rank that happened to write them (F10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from replicator.errors import InvalidIdError
from replicator.ids import ContainerVersion, NodeAddress, split_generation

Tier = Literal["memory", "durable"]


@dataclass(frozen=True, slots=True)
class HeldObject:
    """A sealed, verified object on some node."""

    name: str
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One object that belongs to a committed container, and the node whose rank wrote it."""

    name: str
    size: int
    crc32c: int
    owner_node_id: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All objects of one container, written once by the coordinator after every rank sealed.

    `resumable`: a job can go on from it; not so, for instance, from the model alone.

    Raises:
        InvalidIdError: entries that are not sorted by name, or a name that occurs twice.
    """

    version: ContainerVersion
    epoch: int
    coordinator_node_id: str
    replicas: int
    world_size: int
    created_unix_ms: int
    entries: tuple[ManifestEntry, ...]
    resumable: bool = True

    def __post_init__(self) -> None:
        previous = ""
        for entry in self.entries:
            if entry.name <= previous:
                what = "twice" if entry.name == previous else "out of order"
                raise InvalidIdError(
                    f"the manifest of {self.version} lists {entry.name!r} {what}; expected unique names in order"
                )
            previous = entry.name

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects together."""
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True, slots=True)
class ContainerInventory:
    """What one node holds of one container. `manifest_crc32c` is None where the manifest is not stored."""

    version: ContainerVersion
    manifest_crc32c: int | None = None
    is_protected: bool = False
    objects: Mapping[str, HeldObject] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """The answer of one node. `tier` is "durable" for a flushed copy that is listed like a node (F12)."""

    node: NodeAddress
    containers: tuple[ContainerInventory, ...] = ()
    tier: Tier = "memory"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A node that was asked and gave no usable answer. `node_id` is empty where only the address is known."""

    node_id: str
    grpc_address: str
    reason: str

    @property
    def name(self) -> str:
        return self.node_id or self.grpc_address or "an unnamed node"

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


@dataclass(frozen=True, slots=True)
class ObjectSource:
    """Where to get one object: `node_ids`, best source first."""

    name: str
    size: int
    crc32c: int
    owner_node_id: str
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A container that was considered and passed over, and why, in words."""

    version: ContainerVersion
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of choose_step. `version` is None when nothing is recoverable; then `sources` is empty.

    `sources` has one item per manifest entry, sorted by name; `rejected` lists what is newer than the
    chosen version (everything, when nothing was chosen), newest first.
    """

    version: ContainerVersion | None
    sources: tuple[ObjectSource, ...]
    reason: str
    rejected: tuple[Rejected, ...]


def recency(version: ContainerVersion) -> tuple[int, int]:
    """Sort key of the versions of one job: when the save was begun; the greater the newer.

    A job that went back to an older step and continued, in a new epoch or within one, is newer than the
    steps which it had reached before and then abandoned.
    """
    return version.generation, version.container.step


def describe(version: ContainerVersion) -> str:
    """The version as an operator reads it: "step 40 (epoch 2, attempt 1)"."""
    epoch, attempt = split_generation(version.generation)
    return f"step {version.container.step} (epoch {epoch}, attempt {attempt})"


def listed(items: list[str], limit: int = 4) -> str:
    """ "a, b, c, d and 5 more": names for a sentence, never more than `limit` of them."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")


def counted(number: int, noun: str) -> str:
    """ "1 node", "3 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sentence(text: str) -> str:
    """The text with its first letter in upper case, the rest (names among it) as it is."""
    return text[:1].upper() + text[1:]
