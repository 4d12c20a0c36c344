"""What a store's agent reads back from its files: it may have been written by another version, or have decayed."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from fuzz_engine import Target

from replicator.agent.published import Published, publish
from replicator.client.launch import read_record
from replicator.errors import AgentUnavailableError, CorruptObjectError, StoreRootError
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity, make_generation
from replicator.native import block_crcs, crc32c
from replicator.store.paths import StorePaths, open_root
from replicator.store.records import JobState, Records
from replicator.store.trailer import PAGE, ObjectInfo, capacity_for, encode_trailer, read_trailer

_CONTAINER = CheckpointContainerId("job", 7)
_VERSION = ContainerVersion(_CONTAINER, make_generation(2, 1))
_JSON_TOKENS = (b"Infinity", b"NaN", b"1e999", b"null", b'"\\ud800"', b"[", b"[" * 5000, b"{", b'"', b"-1", b"9" * 5000)


def _object_file(size: int, block_size: int) -> bytes:
    payload = bytes(index % 251 for index in range(size))
    info = ObjectInfo(
        _VERSION.object("dir/a.distcp"),
        size,
        crc32c(payload),
        block_size,
        tuple(block_crcs(payload, block_size)),
        "node-1",
        "0a1b",
    )
    file = bytearray(capacity_for(size, block_size))
    file[:size] = payload
    for offset, piece in encode_trailer(info, len(file)):
        file[offset : offset + len(piece)] = piece
    return bytes(file)


def _read_object(data: bytes) -> None:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        info = read_trailer(fd)
        # What was believed can be written again, and says the same.
        os.truncate(fd, len(data))
        for offset, piece in encode_trailer(info, len(data)):
            os.pwrite(fd, piece, offset)
        assert read_trailer(fd) == info
    finally:
        os.close(fd)


def _seal_trailer(data: bytes) -> bytes:
    """With the checksums of the table and of the page made right."""
    file = bytearray(data)
    if len(file) < PAGE:
        return data
    page = memoryview(file)[-PAGE:]
    page[:8] = b"RPLOBJ\x00\x01"
    (offset, blocks) = struct.unpack_from("<QQ", page, 8 + 12 + 16)
    if offset + 4 * blocks <= len(file):
        table = memoryview(file)[offset : offset + 4 * blocks]
        struct.pack_into("<I", page, 12, crc32c(table))
    page[8:12] = bytes(4)
    struct.pack_into("<I", page, 8, crc32c(page))
    return bytes(file)


class _StoreOf:
    """A store on disk of which only the records are used."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="replicator-fuzz-", dir="/dev/shm")
        self.paths = StorePaths(Path(self._directory.name), "", "tmpfs", "", "")
        for directory in (self.paths.jobs, self.paths.manifests, self.paths.manifest_of(_VERSION)):
            directory.mkdir(parents=True)
        self.records = Records(self.paths)
        self.manifest = self.paths.manifest_of(_VERSION) / "manifest"


def _job_target() -> Target:
    store = _StoreOf()
    node = NodeAddress(NodeIdentity("node-1", 2**64 - 1), "10.0.0.1:7070")
    states = [
        JobState("job", 3, (node,), 1),
        JobState("job", 2**44 - 1, (node, node), 2, members_epoch=3, remembered=(node,), attempt=2**20 - 1),
        JobState("job", 3, (node,), 1, retrieved=_VERSION, retrieved_epoch=3),
    ]
    corpus = []
    for state in states:
        store.records.put_job(state)
        corpus.append(store.paths.job("job").read_bytes())

    def read(data: bytes) -> None:
        store.paths.job("job").write_bytes(data)
        [found] = store.records.jobs()
        if isinstance(found, Path):
            raise CorruptObjectError("set aside")
        store.records.put_job(found)
        assert list(store.records.jobs()) == [found]

    return Target("job-state", corpus, read, (CorruptObjectError,), _JSON_TOKENS, _seal_job, cost=3)


def _seal_job(data: bytes) -> bytes:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict) and "state" in found:
            found["crc32c"] = crc32c(json.dumps(found["state"], sort_keys=True).encode())
            return json.dumps(found).encode()
    return data


def _manifest_target() -> Target:
    store = _StoreOf()
    corpus = []
    for content in (b"", b"manifest", bytes(3000)):
        store.records.put_manifest(_VERSION, content, crc32c(content))
        corpus.append(store.manifest.read_bytes())

    def read(data: bytes) -> None:
        store.manifest.write_bytes(data)
        [found] = store.records.manifests()
        if isinstance(found, Path):
            raise CorruptObjectError("set aside")
        assert found.data == data[12:]

    return Target("manifest-record", corpus, read, (CorruptObjectError,), cost=3)


def _agent_record() -> Target:
    store = _StoreOf()
    record = Published(1234, "node-1", 2**64 - 1, "agent.sock", "10.0.0.1:7070", "10.0.0.1:7071", "0.1.0", 5)
    publish(store.paths.root, record)
    file = store.paths.root / "agent.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        assert read_record(store.paths.root) is not None

    return Target("agent-record", [file.read_bytes()], read, (AgentUnavailableError,), _JSON_TOKENS)


def _store_marker() -> Target:
    store = _StoreOf()
    open_root(store.paths.root, create=True)
    file = store.paths.root / "store.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        assert isinstance(open_root(store.paths.root, create=False).store_id, str)

    return Target("store-marker", [file.read_bytes()], read, (StoreRootError,), _JSON_TOKENS, cost=3)


def targets() -> list[Callable[[], Target]]:
    objects = [_object_file(size, 4096) for size in (0, 1, 4096, 9000)] + [_object_file(4000, 4)]

    def trailer() -> Target:
        return Target("object-trailer", objects, _read_object, (CorruptObjectError,), seal=_seal_trailer)

    return [trailer, _job_target, _manifest_target, _agent_record, _store_marker]
