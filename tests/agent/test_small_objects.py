"""Thousands of small objects between real agents: replicated in packs, each of them verified, none lost to another."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, Node, cluster

from replicator.client.outstanding import ReplicaInfo
from replicator.client.session import Session, attach
from replicator.client.session_spec import SessionSpec
from replicator.decide.types import Manifest, ManifestEntry
from replicator.errors import (
    CommitError,
    InvalidIdError,
    ObjectExistsError,
    ReplicationError,
    StaleEpochError,
)
from replicator.ids import CheckpointContainerId, ContainerVersion, ObjectVersion
from replicator.native import crc32c
from replicator.store.paths import TEMPORARY
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2, types_pb2
from replicator.wire import info_to_pb

LARGEST = 256 << 10
WAIT_S = 60.0


@contextmanager
def session(made: Cluster, at: int, epoch: int = 1, *, replicas: int = 1) -> Iterator[Session]:
    """A trainer on one node, in a job of all nodes."""
    members = tuple(node.address for node in made.nodes)
    spec = SessionSpec(str(made.nodes[at].root), made.ranks[0].job, epoch, members, replicas, 6.0, False, None)
    opened = attach(spec)
    try:
        yield opened
    finally:
        opened.close()


def mixed(count: int, seed: int = 1) -> list[bytes]:
    """Contents of 0 bytes to 256 KiB, most of them of some KiB."""
    chance = random.Random(seed)
    sizes = [0, 1, 4095, 4096, 4097, LARGEST - 1, LARGEST]
    sizes += [int(chance.random() ** 6 * LARGEST) for _ in range(count - len(sizes))]
    chance.shuffle(sizes)
    return [chance.randbytes(size) for size in sizes]


def write(trainer: Session, version: ContainerVersion, contents: Sequence[bytes]) -> dict[ObjectVersion, ObjectInfo]:
    infos = {}
    for number, content in enumerate(contents):
        one = version.object(f"o{number:05d}")
        with trainer.create(one, len(content)) as sink:
            sink.write(content)
        infos[one] = sink.info
    return infos


def manifest_of(trainer: Session, version: ContainerVersion, infos: Mapping[ObjectVersion, ObjectInfo]) -> Manifest:
    entries = [ManifestEntry(one.name, info.size, info.crc32c, info.owner_node_id) for one, info in infos.items()]
    return Manifest(version, trainer.epoch, trainer.node.node_id, trainer.replicas, 1, 1, tuple(entries))


def outcomes(futures: Mapping[ObjectVersion, list[Future[ReplicaInfo]]]) -> dict[ObjectVersion, BaseException | None]:
    every = [future for found in futures.values() for future in found]
    assert not wait(every, WAIT_S).not_done
    return {one: found[0].exception() for one, found in futures.items()}


def check(node: Node, infos: Mapping[ObjectVersion, ObjectInfo], contents: Sequence[bytes]) -> None:
    """The node holds all of them, byte for byte."""
    for (one, info), content in zip(infos.items(), contents, strict=True):
        held = node.held(one)
        assert held is not None, one
        assert held.same_content(info)
        assert held.owner_node_id == info.owner_node_id
        assert node.bytes_of(one) == content


def test_two_thousand_of_all_small_sizes_are_replicated_byte_for_byte(three: Cluster) -> None:
    """F01; one call for all, and one offer for hundreds."""
    contents = mixed(2000)
    with session(three, 0) as trainer:
        version = trainer.begin(CheckpointContainerId(trainer.job, 1))
        infos = write(trainer, version, contents)
        before = three.nodes[1].status().counters
        futures = trainer.replication.async_replicate_many(list(infos))
        assert set(outcomes(futures).values()) == {None}
        for one, (future,) in futures.items():
            copy = future.result()
            assert (copy.object, copy.size, copy.crc32c) == (one, infos[one].size, infos[one].crc32c)
            assert copy.buddy_node_id == "n1"
            assert copy.lane == ("grpc" if copy.size else "")
        after = three.nodes[1].status().counters
        assert after["objects_pulled"] - before.get("objects_pulled", 0) == 2000
        assert after["offers_received"] - before.get("offers_received", 0) < 20
        check(three.nodes[1], infos, contents)

        again = trainer.replication.async_replicate_many(list(infos))
        assert {future.result(WAIT_S).lane for (future,) in again.values()} == {""}
        assert three.nodes[1].counter("objects_pulled") == after["objects_pulled"]

        committed = trainer.agent.commit(manifest_of(trainer, version, infos))
        assert committed.protected.result(WAIT_S).is_protected


def test_a_bit_flipped_at_the_owner_fails_that_object_alone(three: Cluster) -> None:
    """F01: the copy is not made, the owner sets its own aside, and all others are copied."""
    contents = [os.urandom(5000)] * 500
    with session(three, 0) as trainer:
        infos = write(trainer, trainer.begin(CheckpointContainerId(trainer.job, 1)), contents)
        bad = list(infos)[123]
        path = three.nodes[0].paths.object(bad)
        with path.open("r+b") as file:
            file.seek(3000)
            byte = file.read(1)
            file.seek(3000)
            file.write(bytes([byte[0] ^ 16]))
        found = outcomes(trainer.replication.async_replicate_many(list(infos)))
    assert [one for one, error in found.items() if error is not None] == [bad]
    assert isinstance(found[bad], ReplicationError)
    assert "CorruptObjectError" in str(found[bad])
    assert not path.exists()
    assert three.nodes[1].held(bad) is None
    rest = {one: info for one, info in infos.items() if one != bad}
    check(three.nodes[1], rest, contents[1:])


def test_the_buddy_is_killed_in_the_middle_of_a_batch(shm_root: Path) -> None:
    """F45: the same request goes on with the next agent, and nothing half-made stays."""
    contents = mixed(800, seed=2)
    # The owner serves no more than half of it in a second, so that there is a middle in which to kill the buddy.
    limit = sum(map(len, contents)) // 2
    with cluster(shm_root, 2, "--serve-limit-bytes-per-s", str(limit)) as made:
        made.join()
        buddy = made.nodes[1]
        with session(made, 0) as trainer:
            infos = write(trainer, trainer.begin(CheckpointContainerId(trainer.job, 1)), contents)
            futures = trainer.replication.async_replicate_many(list(infos))
            objects = buddy.paths.objects_of(next(iter(infos)).version)
            wait_until(lambda: objects.exists() and any(objects.iterdir()), "the first copy")
            buddy.kill()
            there = [one for one in infos if buddy.paths.object(one).exists()]
            assert 0 < len(there) < len(infos)
            for one in there:
                assert buddy.held(one) is not None
            buddy.start()
            assert not [path for path in buddy.paths.segments.iterdir() if path.name.startswith(TEMPORARY)]
            assert set(outcomes(futures).values()) == {None}
            assert buddy.counter("objects_pulled") == len(infos) - len(there)
        check(buddy, infos, contents)
        assert not [path for path in buddy.paths.segments.iterdir() if path.name.startswith(TEMPORARY)]


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_the_buddys_file_system_is_full_in_the_middle_of_a_batch(shm_root: Path) -> None:
    """F22: those that fit are copied, the others fail with numbers, and are copied once there is room."""
    mount = shm_root / "n1-1"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", mount], check=True)
    try:
        with cluster(shm_root, 2, "--budget-bytes", "21Mi") as made:
            made.join()
            (mount / "foreign").write_bytes(bytes(20 * MIB))
            contents = [os.urandom(10_000)] * 600
            with session(made, 0) as trainer:
                infos = write(trainer, trainer.begin(CheckpointContainerId(trainer.job, 1)), contents)
                found = outcomes(trainer.agent.replicate(list(infos), 1))
                failed = [one for one, error in found.items() if error is not None]
                assert 100 < len(failed) < 500
                assert all("StoreFullError" in str(found[one]) for one in failed)
                assert "files left" in str(found[failed[0]])
                assert all(made.nodes[1].held(one) is None for one in failed)
                assert not list(made.nodes[1].paths.segments.iterdir())
                rest = [one for one in infos if found[one] is None]
                check(made.nodes[1], {one: infos[one] for one in rest}, contents[: len(rest)])
                (mount / "foreign").unlink()
                assert set(outcomes(trainer.replication.async_replicate_many(failed)).values()) == {None}
            check(made.nodes[1], infos, contents)
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_buddy_that_hangs_is_given_up_after_the_deadline(own_three: Cluster) -> None:
    """F15, F47."""
    buddy = own_three.nodes[1]
    assert buddy.agent is not None
    with session(own_three, 0) as trainer:
        infos = write(trainer, trainer.begin(CheckpointContainerId(trainer.job, 1)), [b"x" * 1000] * 600)
        buddy.agent.signal(signal.SIGSTOP)
        found = outcomes(trainer.replication.async_replicate_many(list(infos)))
        buddy.agent.signal(signal.SIGCONT)
    assert {type(error) for error in found.values()} == {ReplicationError}
    assert "n1" in str(found[next(iter(infos))])


# -- sealed many at a time


def test_many_are_sealed_with_a_few_calls_and_large_ones_among_them(three: Cluster) -> None:
    """F01; what is sealed again with the same bytes is there already."""
    contents = [*mixed(400, seed=6), os.urandom(LARGEST + 1), os.urandom(3 * MIB)]
    node = three.nodes[0]
    with session(three, 0) as trainer:
        version = trainer.begin(CheckpointContainerId(trainer.job, 1))
        objects = [(version.object(f"o{number:05d}"), content) for number, content in enumerate(contents)]
        before = node.status().counters
        infos = dict(zip([one for one, _ in objects], trainer.create_many(objects), strict=True))
        after = node.status().counters
        assert after["objects_sealed"] - before.get("objects_sealed", 0) == len(contents)
        assert after["segments_reserved"] - before.get("segments_reserved", 0) == 2, "the two large ones"
        check(node, infos, contents)
        assert [one.crc32c for one in trainer.create_many(objects)] == [info.crc32c for info in infos.values()]
        assert set(outcomes(trainer.replication.async_replicate_many(list(infos))).values()) == {None}
        check(three.nodes[1], infos, contents)
        committed = trainer.agent.commit(manifest_of(trainer, version, infos))
        assert committed.protected.result(WAIT_S).is_protected


def test_of_many_those_that_cannot_be_sealed_leave_the_others_alone(three: Cluster) -> None:
    """F10, F11."""
    with session(three, 0) as trainer:
        version = trainer.begin(CheckpointContainerId(trainer.job, 1))
        objects = [(version.object(f"o{number}"), b"first %d" % number) for number in range(4)]
        trainer.create_many(objects[:1])
        changed = [(objects[0][0], b"other"), *objects[1:]]
        with pytest.raises(ObjectExistsError, match=r"1 of 4 objects could not be sealed: .*o0"):
            trainer.create_many(changed)
        for one, content in objects:
            assert three.nodes[0].bytes_of(one) == content
        three.ranks[0].join(2, three.nodes)
        with pytest.raises(StaleEpochError):
            trainer.create_many([(version.object("late"), b"late")])
    assert three.nodes[0].held(version.object("late")) is None


def test_many_are_sealed_without_an_agent_and_found_by_the_next(
    own_three: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """F13's kind: one by one then, as all others are; the log has no line for each."""
    node = own_three.nodes[0]
    with session(own_three, 0) as trainer:
        version = trainer.begin(CheckpointContainerId(trainer.job, 1))
        objects = [(version.object(f"o{number}"), b"%d" % number * 100) for number in range(20)]
        node.kill()
        infos = dict(zip([one for one, _ in objects], trainer.create_many(objects), strict=True))
        check(node, infos, [content for _, content in objects])
        assert len([line for line in caplog.messages if "written without the agent" in line]) == 1
        node.start()
        wait_until(lambda: node.status().sealed_objects == len(objects), "the next agent to have them")


def _seal_request(
    three: Cluster, descriptors: Sequence[types_pb2.ObjectDescriptor], payloads: bytes
) -> local_pb2.SealManyReply:
    rank = three.ranks[0]
    request = local_pb2.SealManyRequest(client_id=rank.client_id, descriptors=descriptors, payloads=payloads)
    return rank.call("SealMany", request, local_pb2.SealManyReply)


def test_what_contradicts_itself_is_not_sealed(three: Cluster) -> None:
    """F01, F38: sizes, bytes, owners and numbers that cannot be."""
    rank, version = three.ranks[0], three.ranks[0].begin(1)

    def describe(name: str, content: bytes, owner: str = "n0") -> types_pb2.ObjectDescriptor:
        crc = crc32c(content)
        return info_to_pb(
            ObjectInfo(version.object(name), len(content), crc, 4 * MIB, (crc,) if content else (), owner, "")
        )

    good = describe("good", b"good")
    for descriptors, payloads, found in (
        ([], b"", "found 0 of"),
        ([good] * 257, b"good" * 257, "found 257 of"),
        ([good], b"goo", "expected 4 bytes"),
        ([good], b"good!", "expected 4 bytes"),
        ([describe("large", bytes(LARGEST + 1))], bytes(LARGEST + 1), "too many"),
        ([good], bytes(MIB + 1), "1048577 bytes"),
        ([good, describe("foreign", b"x", "n1")], b"goodx", "owner"),
    ):
        with pytest.raises(InvalidIdError, match=found):
            _seal_request(three, descriptors, payloads)
    assert three.nodes[0].held(version.object("good")) is None
    (failure,) = _seal_request(three, [describe("bad", b"good"), good], b"evilgood").failures
    assert (failure.index, failure.error_kind) == (0, "CorruptObjectError")
    assert three.nodes[0].held(version.object("bad")) is None
    assert three.nodes[0].bytes_of(version.object("good")) == b"good"
    rank.begin(1, abandons=[version])
    with pytest.raises(CommitError, match="abandoned"):
        _seal_request(three, [describe("late", b"late")], b"late")
