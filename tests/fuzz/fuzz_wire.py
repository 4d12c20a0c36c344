"""Messages between agents, the ids and addresses in them, and the errors of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import PurePosixPath
from typing import Any

import grpc
from fuzz_engine import Target
from google.protobuf.message import DecodeError, Message

from replicator import errors, rpc_errors, wire
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
from replicator.errors import ConfigError, CorruptObjectError, InvalidIdError, ReplicatorError, StoreRootError
from replicator.ids import (
    CheckpointContainerId,
    CheckpointObjectId,
    ContainerVersion,
    NodeAddress,
    NodeIdentity,
    make_generation,
)
from replicator.native import block_crcs, crc32c
from replicator.store.paths import SegmentName, StorePaths, object_of_file
from replicator.store.trailer import ObjectInfo
from replicator.v1 import types_pb2

_VERSION = ContainerVersion(CheckpointContainerId("job", 2**63 - 1), make_generation(2**44 - 1, 3))
_FIRST = ContainerVersion(CheckpointContainerId("job", 0), make_generation(1, 0))
_NODE = NodeAddress(NodeIdentity("node-1", 2**64 - 1), "[::1]:7070")
_HELD = HeldObject("a", 10, 0xFFFFFFFF)
_ENTRIES = (ManifestEntry("a", 10, 1, "node-1"), ManifestEntry("b/c", 2**63 - 1, 2**32 - 1, "node-2"))
_MANIFEST = Manifest(_VERSION, 2**44 - 1, "node-1", 1, 8, 1_700_000_000_000, _ENTRIES)
_DATA = bytes(10_000)
_INFO = ObjectInfo(
    _VERSION.object("dir/a"), len(_DATA), crc32c(_DATA), 4096, tuple(block_crcs(_DATA, 4096)), "node-1", ""
)
_EMPTY = ObjectInfo(_FIRST.object("empty"), 0, 0, 1 << 20, (), "node-1", "")
_TOKENS = (
    b"..",
    b"/",
    b"\0",
    b"\xed\xa0\x80",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x7f",
    b"%2F",
    b"a" * 300,
)

_PAIRS: tuple[tuple[str, type[Message], Callable[[Any], Any], Callable[[Any], Any], tuple[Any, ...]], ...] = (
    ("container", types_pb2.ContainerRef, wire.version_to_pb, wire.version_from_pb, (_VERSION, _FIRST)),
    ("object", types_pb2.ObjectRef, wire.object_to_pb, wire.object_from_pb, (_VERSION.object("a/b"),)),
    ("identity", types_pb2.NodeIdentity, wire.identity_to_pb, wire.identity_from_pb, (_NODE.identity,)),
    ("address", types_pb2.NodeAddress, wire.node_address_to_pb, wire.node_address_from_pb, (_NODE,)),
    (
        "sender",
        types_pb2.Sender,
        wire.sender_to_pb,
        wire.sender_from_pb,
        (wire.Sender(_NODE.identity, "job", 3), wire.Sender(_NODE.identity)),
    ),
    ("held", types_pb2.HeldObject, wire.held_to_pb, wire.held_from_pb, (_HELD,)),
    ("descriptor", types_pb2.ObjectDescriptor, wire.info_to_pb, wire.info_from_pb, (_INFO, _EMPTY)),
    ("manifest", types_pb2.Manifest, wire.manifest_to_pb, wire.manifest_from_pb, (_MANIFEST,)),
    (
        "inventory",
        types_pb2.ContainerInventory,
        lambda inventory: next(iter(wire.inventory_to_pb(inventory))),
        wire.inventory_from_pb,
        (ContainerInventory(_VERSION, 7, True, {"a": _HELD}), ContainerInventory(_FIRST)),
    ),
    (
        "source",
        types_pb2.ObjectSource,
        wire.source_to_pb,
        wire.source_from_pb,
        (ObjectSource("a", 1, 2, "node-1", ("node-1", "node-2")),),
    ),
    ("rejected", types_pb2.RejectedContainer, wire.rejected_to_pb, wire.rejected_from_pb, (Rejected(_VERSION, "why"),)),
    (
        "unanswered",
        types_pb2.UnansweredNode,
        wire.unanswered_to_pb,
        wire.unanswered_from_pb,
        (Unanswered("node-1", "10.0.0.1:1", "mute"), Unanswered("", "host:1", "")),
    ),
)


def _messages() -> Target:
    """Each kind of message that has a type of its own here; the first byte of an input says which."""

    def read(data: bytes) -> None:
        if not data:
            return
        _, kind, to_pb, from_pb, _ = _PAIRS[data[0] % len(_PAIRS)]
        value = from_pb(kind.FromString(data[1:]))
        assert from_pb(to_pb(value)) == value

    corpus = [
        bytes([number]) + to_pb(value).SerializeToString()
        for number, (_, _, to_pb, _, values) in enumerate(_PAIRS)
        for value in values
    ]
    # What is no message at all gRPC itself refuses, before any code of this project sees it.
    return Target("wire-messages", corpus, read, (InvalidIdError, CorruptObjectError, DecodeError), _TOKENS)


def _manifest_bytes() -> Target:
    def read(data: bytes) -> None:
        manifest = wire.manifest_from_bytes(data)
        assert wire.manifest_from_bytes(wire.manifest_to_bytes(manifest)) == manifest

    many = Manifest(_FIRST, 1, "n", 2, 1, 0, tuple(ManifestEntry(f"{i:04}", i, i, "n") for i in range(200)))
    corpus = [wire.manifest_to_bytes(one) for one in (_MANIFEST, many)]
    return Target("manifest-bytes", corpus, read, (InvalidIdError, CorruptObjectError), _TOKENS)


def _manifest_chunks() -> Target:
    """A manifest in the pieces of one call: each piece is a message, with its length in two bytes before it."""

    def read(data: bytes) -> None:
        async def chunks() -> AsyncIterator[types_pb2.ManifestChunk]:
            rest = data
            while rest:
                size = int.from_bytes(rest[:2], "little")
                yield types_pb2.ManifestChunk.FromString(rest[2 : 2 + size])
                rest = rest[2 + size :]

        coroutine = wire.join_manifest(chunks())
        try:
            coroutine.send(None)
        except StopIteration as stop:
            _, crc, joined = stop.value
            assert 0 <= crc < 2**32
            assert len(joined) <= len(data)
        else:
            raise AssertionError("it waits, though there is nothing to wait for")

    pieces = [
        chunk.SerializeToString()
        for chunk in wire.manifest_chunks(bytes(100), 5, wire.Sender(_NODE.identity, "job", 1))
    ]
    pieces.append(types_pb2.ManifestChunk(data=b"more").SerializeToString())
    corpus = [b"".join(len(piece).to_bytes(2, "little") + piece for piece in pieces)]
    return Target("manifest-chunks", corpus, read, (InvalidIdError, DecodeError), _TOKENS)


def _ids() -> Target:
    """Ids as text. Whatever is accepted is written as it was read, and stays below the store's root (F38)."""
    paths = StorePaths(PurePosixPath("/root"), "", "", "", "")  # type: ignore[arg-type]

    def read(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        refusals = []
        for parse in (_container, _object, _segment, _file_name, _address):
            try:
                parse(text)
            except (InvalidIdError, StoreRootError, ConfigError) as refusal:
                refusals.append(refusal)
        if len(refusals) == 5:
            raise refusals[len(text) % 5]

    def _container(text: str) -> None:
        assert str(CheckpointContainerId.parse(text)) in (text, f"{text}_ckpt")

    def _object(text: str) -> None:
        found = CheckpointObjectId.parse(text)
        assert CheckpointObjectId.parse(str(found)) == found

    def _segment(text: str) -> None:
        assert SegmentName.parse(text).text == text

    def _file_name(text: str) -> None:
        found = object_of_file(_VERSION, text)
        if found is None:
            raise InvalidIdError("no file name")
        assert paths.object(found).name == text
        assert paths.object(found).parent == paths.objects_of(_VERSION)
        assert ".." not in paths.object(found).parts

    def _address(text: str) -> None:
        host, port = split_address(text)
        assert host.isascii()
        assert 0 < port < 65536

    corpus = [
        b"job/step-100_ckpt",
        b"job/step-0_ckpt/__0_0.distcp",
        b"job/step-9223372036854775807/a/b/c",
        b"w.0a1b.0123456789abcdef",
        b"f.agent-0a.0123456789abcdef",
        b"dir%2Fa%2525",
        b"10.0.0.1:7070",
        b"[fe80::1%eth0]:7070",
        b"[::1]:7070",
    ]
    return Target("ids", corpus, read, (InvalidIdError, StoreRootError, ConfigError), _TOKENS)


class _CallError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str | None, metadata: list[tuple[str, str | bytes]]) -> None:
        self._parts = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str | None:
        return self._parts[1]

    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        return self._parts[2]


def _call_errors() -> Target:
    """How a call ended, as a peer may have written it: `<status>:<kind>:<details>`."""
    codes = list(grpc.StatusCode)

    def read(data: bytes) -> None:
        code, _, rest = data.partition(b":")
        kind, _, details = rest.partition(b":")
        words = details.decode("utf-8", "replace")
        for value in (kind, kind.decode("utf-8", "replace")):
            failure = _CallError(
                codes[sum(code) % len(codes)], words or None, [("x", b"\xff"), (rpc_errors.KIND_KEY, value)]
            )
            meaning = rpc_errors.error_from_rpc(failure, "an answer", "node n", 1.0)
            assert isinstance(meaning, ReplicatorError)
            sent = rpc_errors.offer_failure(meaning)
            assert isinstance(errors.from_wire(sent.error_kind, sent.error_message), type(meaning))
            assert len(sent.error_message.encode()) <= rpc_errors.MAX_DETAIL_BYTES
            assert rpc_errors.status_code(meaning) is not grpc.StatusCode.INTERNAL

    corpus = [f"{number}:{kind}:what was wrong".encode() for number, kind in enumerate(["", "Nobody", *errors.KINDS])]
    return Target("call-errors", corpus, read, (), (b":", b"\xff", b"ReplicatorError", "\U0001f600".encode() * 900))


def targets() -> list[Callable[[], Target]]:
    return [_messages, _manifest_bytes, _manifest_chunks, _ids, _call_errors]
