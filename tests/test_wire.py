"""What crosses a process boundary arrives as it was sent, or is refused with the reason."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Iterable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator import rpc_errors, wire
from replicator.decide.types import (
    ContainerInventory,
    HeldObject,
    Manifest,
    ManifestEntry,
    ObjectSource,
    Rejected,
    Unanswered,
)
from replicator.errors import (
    KINDS,
    CorruptObjectError,
    DeadlineExceededError,
    InvalidIdError,
    PeerUnavailableError,
    ReplicatorError,
    StaleEpochError,
    UnsupportedError,
)
from replicator.ids import (
    AgreedPlacement,
    CheckpointContainerId,
    ContainerVersion,
    NodeAddress,
    NodeIdentity,
    make_generation,
)
from replicator.native import block_crcs, combine_blocks, crc32c
from replicator.store.trailer import ObjectInfo
from replicator.v1 import types_pb2

VERSION = ContainerVersion(CheckpointContainerId("job-1", 0), make_generation(3, 2))
NODE = NodeIdentity("node-a", 2**64 - 1)
PAYLOAD = bytes(range(256)) * 80
INFO = ObjectInfo(
    object=VERSION.object("rank_0/model.distcp"),
    size=len(PAYLOAD),
    crc32c=crc32c(PAYLOAD),
    block_size=4096,
    block_crcs=tuple(block_crcs(PAYLOAD, 4096)),
    owner_node_id="node-a",
    client_id="ab",
)
MANIFEST = Manifest(
    VERSION,
    epoch=3,
    coordinator_node_id="node-a",
    replicas=1,
    world_size=2,
    created_unix_ms=1_700_000_000_000,
    entries=(ManifestEntry("a", 0, 0, "node-a"), ManifestEntry("b", 2**40, 2**32 - 1, "node-b")),
)


def test_ids_and_addresses_come_back_as_they_were() -> None:
    """F14: step 0 is a step."""
    address = NodeAddress(NODE, "[::1]:7070", (("zone", "eu-1a"), ("topology.kubernetes.io/rack", "r:7")))
    assert wire.version_from_pb(wire.version_to_pb(VERSION)) == VERSION
    assert wire.object_from_pb(wire.object_to_pb(INFO.object)) == INFO.object
    back = wire.node_address_from_pb(wire.node_address_to_pb(address))
    assert (back, back.labels) == (address, address.labels)
    sender = wire.Sender(NODE, "job-1", 3)
    assert wire.sender_from_pb(wire.sender_to_pb(sender)) == sender


def test_a_placement_comes_back_and_is_checked() -> None:
    """F37, F38: names of nodes are validated before anything is done with them."""
    for placement in (
        AgreedPlacement("group", (("a", "b"), ("c", "d"))),
        AgreedPlacement("explicit", (), (("a", ("b",)), ("b", ("a",)))),
    ):
        assert wire.placement_from_pb(wire.placement_to_pb(placement)) == placement
        assert AgreedPlacement.from_json(json.loads(json.dumps(placement.to_json()))) == placement
    assert wire.placement_from_pb(types_pb2.Placement()) is None
    for message in (
        types_pb2.Placement(strategy="group", groups=[types_pb2.NodeList(node_ids=["../x"])]),
        types_pb2.Placement(strategy="explicit", buddies=[types_pb2.NodeBuddies(node_id="a", buddy_node_ids=[""])]),
        types_pb2.Placement(strategy="a/b"),
    ):
        with pytest.raises(InvalidIdError):
            wire.placement_from_pb(message)
    with pytest.raises(InvalidIdError):
        wire.labels_from_pb([types_pb2.DomainLabel(level="zone", value="a b")])


@pytest.mark.parametrize("name", ["../etc/passwd", "/abs", "a//b", "a/../b", "", "a\0b", "x" * 201, "a b", "ü"])
def test_a_name_that_would_be_a_path_is_refused(name: str) -> None:
    """F38."""
    ref = wire.object_to_pb(INFO.object)
    ref.name = name
    with pytest.raises(InvalidIdError):
        wire.object_from_pb(ref)
    with pytest.raises(InvalidIdError):
        wire.held_from_pb(types_pb2.HeldObject(name=name))
    with pytest.raises(InvalidIdError):
        wire.source_from_pb(types_pb2.ObjectSource(name=name, owner_node_id="node-a"))


@pytest.mark.parametrize(
    "ref",
    [
        types_pb2.ContainerRef(job="", step=1, generation=1),
        types_pb2.ContainerRef(job="..", step=1, generation=1),
        types_pb2.ContainerRef(job="a/b", step=1, generation=1),
        types_pb2.ContainerRef(job="a", step=2**63, generation=1),
    ],
)
def test_a_container_that_cannot_be_one_is_refused(ref: types_pb2.ContainerRef) -> None:
    """F38."""
    with pytest.raises(InvalidIdError):
        wire.version_from_pb(ref)


@pytest.mark.parametrize("address", ["", "host", "host:0", "host:99999", "host:1/x", "::1:80", "host:1\n"])
def test_an_address_that_cannot_be_one_is_refused(address: str) -> None:
    """F38."""
    message = types_pb2.NodeAddress(identity=wire.identity_to_pb(NODE), grpc_address=address)
    with pytest.raises(InvalidIdError, match="address"):
        wire.node_address_from_pb(message)


def test_an_epoch_out_of_range_is_refused() -> None:
    message = types_pb2.Sender(node=wire.identity_to_pb(NODE), job="j", epoch=2**44)
    with pytest.raises(InvalidIdError, match="epoch"):
        wire.sender_from_pb(message)


def test_a_descriptor_comes_back_with_its_block_table() -> None:
    again = wire.info_from_pb(wire.info_to_pb(INFO), "cd")
    assert again == dataclasses.replace(INFO, client_id="cd")
    empty = dataclasses.replace(INFO, size=0, crc32c=0, block_crcs=())
    assert wire.info_from_pb(wire.info_to_pb(empty), "ab") == empty


def test_a_block_table_that_does_not_combine_to_the_checksum_is_not_trusted() -> None:
    """F01: also one whose blocks were swapped."""
    message = wire.info_to_pb(INFO)
    message.block_crc32c[0], message.block_crc32c[1] = message.block_crc32c[1], message.block_crc32c[0]
    message.block_crc32c[1] ^= 1
    with pytest.raises(CorruptObjectError, match="combine"):
        wire.info_from_pb(message)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("block_size_bytes", 0, "blocks"),
        ("block_size_bytes", 2**40, "blocks"),
        ("size_bytes", 2**63, "size"),
        ("size_bytes", 4096, "block checksums"),
        ("owner_node_id", "../x", "node id"),
    ],
)
def test_an_impossible_descriptor_is_refused(field: str, value: Any, reason: str) -> None:
    """A size of eight exabytes must not become an allocation."""
    message = wire.info_to_pb(INFO)
    setattr(message, field, value)
    with pytest.raises(InvalidIdError, match=reason):
        wire.info_from_pb(message)


def test_equal_manifests_have_equal_bytes() -> None:
    data = wire.manifest_to_bytes(MANIFEST)
    assert wire.manifest_from_bytes(data) == MANIFEST
    assert wire.manifest_to_bytes(wire.manifest_from_bytes(data)) == data


names = st.text(alphabet="abcXYZ019_.-", min_size=1, max_size=12).filter(lambda text: text not in (".", ".."))


@given(
    st.dictionaries(names, st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1), names), max_size=20),
    st.integers(1, 2**44 - 1),
    st.integers(0, 2**63 - 1),
)
def test_any_manifest_comes_back(entries: dict[str, tuple[int, int, str]], epoch: int, step: int) -> None:
    """F29: sizes over 4 GiB."""
    manifest = Manifest(
        ContainerVersion(CheckpointContainerId("j", step), make_generation(epoch, 1)),
        epoch,
        "n",
        2,
        len(entries),
        1,
        tuple(ManifestEntry(name, *entries[name]) for name in sorted(entries)),
    )
    assert wire.manifest_from_bytes(wire.manifest_to_bytes(manifest)) == manifest


@pytest.mark.parametrize("cut", [1, 7, 20, 40])
def test_a_manifest_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(ReplicatorError):
        wire.manifest_from_bytes(wire.manifest_to_bytes(MANIFEST)[:-cut])


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"", b"\x08"])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ReplicatorError):
        wire.manifest_from_bytes(data)


def test_a_manifest_with_entries_out_of_order_or_twice_is_refused() -> None:
    for order in ((1, 0), (0, 0)):
        message = wire.manifest_to_pb(MANIFEST)
        entries = [types_pb2.ManifestEntry.FromString(message.entries[i].SerializeToString()) for i in order]
        del message.entries[:]
        message.entries.extend(entries)
        with pytest.raises(InvalidIdError, match="in order"):
            wire.manifest_from_pb(message)


async def _as_stream(items: Iterable[types_pb2.ManifestChunk]) -> AsyncIterator[types_pb2.ManifestChunk]:
    for item in items:
        yield item


@pytest.mark.parametrize("size", [0, 1, wire.MANIFEST_CHUNK_BYTES, 3 * wire.MANIFEST_CHUNK_BYTES + 5])
async def test_a_manifest_of_any_size_travels_in_small_pieces(size: int) -> None:
    """F28: no message comes near gRPC's limit of 4 MiB."""
    data = b"x" * size
    sender = wire.Sender(NODE, "job-1", 3)
    chunks = list(wire.manifest_chunks(data, 77, sender))
    assert all(chunk.ByteSize() < 2 << 20 for chunk in chunks)
    assert await wire.join_manifest(_as_stream(chunks)) == (sender, 77, data)


async def test_an_endless_manifest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer has a bound."""
    monkeypatch.setattr(wire, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(InvalidIdError, match="at most 10"):
        await wire.join_manifest(_as_stream(wire.manifest_chunks(b"x" * 11, 0, wire.Sender(NODE))))
    with pytest.raises(InvalidIdError, match="none"):
        await wire.join_manifest(_as_stream([]))


def test_a_large_inventory_travels_in_several_messages() -> None:
    """F28."""
    count = 2 * wire.OBJECTS_PER_INVENTORY_MESSAGE + 1
    held = {f"o{i:06}": HeldObject(f"o{i:06}", i, i) for i in range(count)}
    sent = ContainerInventory(VERSION, 5, True, held)
    messages = list(wire.inventory_to_pb(sent))
    assert len(messages) == 3
    got = wire.inventory_from_pb(messages[0])
    for message in messages[1:]:
        got = wire.inventory_from_pb(message, got.objects)
    assert got == sent


def test_what_has_no_manifest_or_no_objects_is_told_all_the_same() -> None:
    for sent in (ContainerInventory(VERSION), ContainerInventory(VERSION, 0, False, {})):
        (message,) = wire.inventory_to_pb(sent)
        assert wire.inventory_from_pb(message) == sent


def test_parts_of_a_plan_come_back() -> None:
    source = ObjectSource("a", 5, 6, "node-a", ("node-b", "node-a"))
    assert wire.source_from_pb(wire.source_to_pb(source)) == source
    rejected = Rejected(VERSION, "why")
    assert wire.rejected_from_pb(wire.rejected_to_pb(rejected)) == rejected
    for who in (Unanswered("", "h:1", "mute"), Unanswered("node-a", "h:1", "dead")):
        assert wire.unanswered_from_pb(wire.unanswered_to_pb(who)) == who


# -- errors, through real calls


@pytest.fixture
def socket_path(shm_root: Path) -> str:
    return f"unix:{shm_root}/s"


class _Fails(grpc.GenericRpcHandler):
    """Answers every call with the error whose index the request names."""

    def __init__(self, raised: list[BaseException]) -> None:
        self._raised = raised

    def service(self, details: Any) -> Any:
        async def handle(request: bytes, context: Any) -> bytes:
            await rpc_errors.abort(context, self._raised[int(request)])

        return grpc.unary_unary_rpc_method_handler(handle)


def _call_sync(address: str, request: bytes) -> ReplicatorError:
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/s/m")(request, timeout=5)
        except grpc.RpcError as error:
            return rpc_errors.error_from_rpc(error, "a thing", "node-x", 5.0)
    raise AssertionError("the call succeeded")


async def _call_async(address: str, request: bytes) -> ReplicatorError:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await channel.unary_unary("/s/m")(request, timeout=5)
        except grpc.RpcError as error:
            return rpc_errors.error_from_rpc(error, "a thing", "node-x", 5.0)
    raise AssertionError("the call succeeded")


async def test_every_error_keeps_its_kind_and_message_over_a_real_call(socket_path: str) -> None:
    """Also a long message and one that is not ASCII: what comes is what can be shown, never a protocol error."""
    raised: list[BaseException] = [kind(f"expected ä, found {kind.__name__}\n; try again") for kind in KINDS.values()]
    raised += [StaleEpochError("ü" * 50_000), ValueError("a bug")]
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Fails(raised),))
    server.add_insecure_port(socket_path)
    await server.start()
    loop = asyncio.get_running_loop()
    try:
        with futures.ThreadPoolExecutor(1) as pool:
            for i, error in enumerate(raised):
                request = str(i).encode()
                for got in (
                    await _call_async(socket_path, request),
                    await loop.run_in_executor(pool, _call_sync, socket_path, request),
                ):
                    if not isinstance(error, ReplicatorError):
                        assert type(got) is ReplicatorError
                        assert "ValueError: a bug" in str(got)
                    elif len(str(error)) > 10_000:
                        assert type(got) is StaleEpochError
                        assert str(got).startswith("üüü")
                        assert "cut" in str(got)
                    else:
                        assert type(got) is type(error)
                        assert str(got) == str(error)
    finally:
        await server.stop(None)


async def test_a_call_that_nobody_answers_says_what_whom_and_how_long(socket_path: str) -> None:
    """F15."""
    never = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        await never.wait()
        return b""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    server.add_insecure_port(socket_path)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(socket_path) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as silent:
                await channel.unary_unary("/s/m")(b"", timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await channel.unary_unary("/s/other")(b"", timeout=5)
    finally:
        never.set()
        await server.stop(None)
    error = rpc_errors.error_from_rpc(silent.value, "its inventory", "node-x", 0.2)
    assert type(error) is DeadlineExceededError
    assert all(part in str(error) for part in ("0.2 s", "its inventory", "node-x"))
    assert type(rpc_errors.error_from_rpc(unknown.value, "a thing", "node-x", 5)) is UnsupportedError


async def test_a_call_to_nobody_names_who_is_missing(shm_root: Path) -> None:
    error = await _call_async(f"unix:{shm_root}/nobody", b"0")
    assert type(error) is PeerUnavailableError
    assert "node-x" in str(error)


def test_checksums_of_blocks_combine() -> None:
    assert combine_blocks(INFO.block_crcs, INFO.size, INFO.block_size) == INFO.crc32c
