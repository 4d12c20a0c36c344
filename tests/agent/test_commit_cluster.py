"""Commit and protection between real agents."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import Cluster, cluster

from replicator.decide.types import HeldObject, Manifest, ManifestEntry
from replicator.errors import (
    CommitError,
    CorruptObjectError,
    InvalidIdError,
    NotFoundError,
    PeerUnavailableError,
    StaleEpochError,
)
from replicator.native import crc32c
from replicator.v1 import peer_pb2, types_pb2
from replicator.wire import (
    Sender,
    held_to_pb,
    manifest_chunks,
    manifest_from_bytes,
    manifest_to_bytes,
    sender_to_pb,
    version_to_pb,
)


def test_a_step_is_committed_then_protected_everywhere(three: Cluster) -> None:
    coordinator = three.ranks[0]
    manifest = three.save(0)
    asked = coordinator.commit(manifest)
    assert sorted(asked) == ["n1", "n2"]
    assert manifest.version in three.nodes[0].committed()
    first = coordinator.committed(manifest.version)
    assert first.ok
    assert not first.is_protected
    assert len(first.stored_on) >= 2
    last = coordinator.protected(manifest.version)
    assert "n0" in last.stored_on
    for node in three.nodes:
        wait_until(lambda node=node: manifest.version in node.protected(), f"{node.node_id} knows that it is protected")


def test_the_order_of_commit_and_copies_does_not_matter(three: Cluster) -> None:
    """The manifest is everywhere before the first object is offered."""
    manifest = three.save(1, replicate=False)
    coordinator = three.ranks[0]
    coordinator.commit(manifest)
    assert coordinator.committed(manifest.version).ok
    # Owners offer by themselves what a commit lists and nobody acknowledged.
    coordinator.protected(manifest.version)
    for index, owner in enumerate(three.nodes):
        buddy = three.nodes[(index + 1) % 3]
        assert buddy.held(manifest.version.object(f"shard-{index}")) is not None, owner.node_id


def test_repeating_a_commit_tells_its_state_again(three: Cluster) -> None:
    manifest = three.save(2)
    coordinator = three.ranks[0]
    coordinator.commit(manifest)
    coordinator.protected(manifest.version)
    coordinator.commit(manifest)
    event = coordinator.committed(manifest.version)
    assert event.ok
    assert event.is_protected


def test_a_commit_is_never_changed(three: Cluster) -> None:
    manifest = three.save(3)
    three.ranks[0].commit(manifest)
    three.ranks[0].protected(manifest.version)
    other = dataclasses.replace(manifest, created_unix_ms=2)
    with pytest.raises(CommitError, match="another manifest"):
        three.ranks[0].commit(other)
    assert manifest_from_bytes(_stored(three, 0, manifest)) == manifest


def _stored(made: Cluster, index: int, manifest: Manifest) -> bytes:
    return (made.nodes[index].paths.manifest_of(manifest.version) / "manifest").read_bytes()[12:]


@pytest.mark.parametrize("trouble", ["missing", "size", "crc", "empty", "coordinator"])
def test_a_manifest_that_cannot_be_right_is_refused(three: Cluster, trouble: str) -> None:
    """F06: a commit needs every object."""
    manifest = three.save(4, replicate=False)
    first, *rest = manifest.entries
    changed = {
        "missing": lambda: dataclasses.replace(
            manifest, entries=(*manifest.entries, ManifestEntry("shard-9", 1, 1, "n0"))
        ),
        "size": lambda: dataclasses.replace(manifest, entries=(dataclasses.replace(first, size=1), *rest)),
        "crc": lambda: dataclasses.replace(manifest, entries=(dataclasses.replace(first, crc32c=1), *rest)),
        "empty": lambda: dataclasses.replace(manifest, entries=()),
        "coordinator": lambda: dataclasses.replace(manifest, coordinator_node_id="n2"),
    }[trouble]()
    with pytest.raises(CommitError):
        three.ranks[0].commit(changed)
    assert all(manifest.version not in node.committed() for node in three.nodes)


def test_it_succeeds_when_r_plus_1_nodes_have_it_and_one_is_silent(own_three: Cluster) -> None:
    """Decision 12, F15: the silent node delays nobody."""
    manifest = own_three.save(1)
    assert own_three.nodes[2].agent is not None
    own_three.nodes[2].agent.signal(signal.SIGSTOP)
    began = time.monotonic()
    own_three.ranks[0].commit(manifest, deadline_s=10)
    event = own_three.ranks[0].committed(manifest.version)
    assert event.ok
    assert sorted(event.stored_on) == ["n0", "n1"]
    assert time.monotonic() - began < 5
    own_three.nodes[2].agent.signal(signal.SIGCONT)
    own_three.ranks[0].protected(manifest.version)
    wait_until(lambda: manifest.version in own_three.nodes[2].committed(), "the third node has it too")


def test_it_fails_with_names_when_too_few_nodes_can_store_it(own_three: Cluster) -> None:
    """F05: what is reported as failed may become visible later; here it is not, on the nodes that did not get it."""
    manifest = own_three.save(1, replicate=False)
    for node in own_three.nodes[1:]:
        node.kill()
    own_three.ranks[0].commit(manifest, deadline_s=1.0)
    event = own_three.ranks[0].committed(manifest.version)
    assert not event.ok
    assert event.error_kind == "CommitError"
    assert all(part in event.error_message for part in ("2 nodes", "on 1", "n1", "n2"))


def test_a_single_node_commits_and_protects_alone(shm_root: Path) -> None:
    with cluster(shm_root, 1) as made:
        made.join()
        manifest = made.save(1)
        made.ranks[0].commit(manifest)
        assert made.ranks[0].protected(manifest.version).stored_on == ["n0"]


def test_a_container_whose_buddy_is_away_is_committed_and_not_protected(own_three: Cluster) -> None:
    """F49: written locally is not protected. The buddy comes back, and then it is."""
    own_three.nodes[1].kill()
    manifest = own_three.save(1, ranks=[own_three.ranks[0], own_three.ranks[2]])
    coordinator = own_three.ranks[0]
    coordinator.commit(manifest, deadline_s=15)
    assert not coordinator.committed(manifest.version).is_protected
    assert manifest.version not in own_three.nodes[0].protected()
    own_three.nodes[1].start()
    coordinator.protected(manifest.version)
    assert own_three.nodes[1].held(manifest.version.object("shard-0")) is not None


def test_what_a_replaced_buddy_acknowledged_counts_for_nothing(own_three: Cluster) -> None:
    """F19, F49: same name and port, empty memory. The container is protected once the copies are there again."""
    manifest = own_three.save(1, ranks=[own_three.ranks[0], own_three.ranks[2]])
    mine = manifest.version.object("shard-0")
    assert own_three.ranks[0].outcome(mine).ok
    buddy = own_three.nodes[1]
    port = buddy.port
    buddy.kill()
    buddy.root = buddy.root.with_name("replacement")
    buddy.start("--port", str(port))
    own_three.ranks[0].commit(manifest)
    own_three.ranks[0].protected(manifest.version)
    assert buddy.held(mine) is not None


def test_what_a_replaced_owner_reported_counts_for_nothing(own_three: Cluster) -> None:
    """F19, F49: an object of n1 is gone with n1's memory, after n1 said that it had all its copies."""
    first, owner, _ = own_three.nodes
    owner.kill()
    survivors = [own_three.ranks[0], own_three.ranks[2]]
    manifest = own_three.save(1, ranks=survivors, replicate=False)
    lost = ManifestEntry("z-lost", 1, 1, "n1")
    manifest = dataclasses.replace(manifest, entries=(*manifest.entries, lost))
    own_three.ranks[0].commit(manifest)
    assert own_three.ranks[0].committed(manifest.version).ok
    report = peer_pb2.ReportReplicatedRequest(
        sender=sender_to_pb(Sender(owner.address.identity, own_three.ranks[0].job, 1)),
        container=version_to_pb(manifest.version),
        objects=[held_to_pb(HeldObject(lost.name, lost.size, lost.crc32c))],
    )
    first.ask("ReportReplicated", report, peer_pb2.ReportReplicatedReply)
    owner.root = owner.root.with_name("replacement")
    owner.start("--port", str(owner.port))
    wait_until(lambda: owner.held(manifest.version.object("shard-0")) is not None, "n0's object is copied")
    # As a message that was on its way when its sender died.
    with pytest.raises(PeerUnavailableError, match="was replaced"):
        first.ask("ReportReplicated", report, peer_pb2.ReportReplicatedReply)
    newer = own_three.save(2, ranks=survivors)
    own_three.ranks[0].commit(newer)
    own_three.ranks[0].protected(newer.version)
    event = own_three.ranks[0].committed(manifest.version)
    assert "never protected" in event.error_message, event


def test_an_owner_killed_before_its_report_makes_it_after_its_restart(own_three: Cluster) -> None:
    """What an owner knew of its copies is rebuilt by asking."""
    manifest = own_three.save(1)
    assert own_three.ranks[1].outcome(manifest.version.object("shard-1")).ok
    own_three.nodes[1].kill()
    coordinator = own_three.ranks[0]
    coordinator.commit(manifest, deadline_s=15)
    assert not coordinator.committed(manifest.version).is_protected
    own_three.nodes[1].start()
    coordinator.protected(manifest.version)


def test_a_coordinator_killed_between_commit_and_protection_takes_it_up_again(own_three: Cluster) -> None:
    """The reports that it had got are gone with it; owners make them again."""
    assert own_three.nodes[1].agent is not None
    manifest = own_three.save(1)
    own_three.ranks[2].outcome(manifest.version.object("shard-2"))
    own_three.nodes[1].agent.signal(signal.SIGSTOP)
    own_three.ranks[0].commit(manifest)
    assert not own_three.ranks[0].committed(manifest.version).is_protected
    own_three.nodes[0].kill()
    own_three.nodes[1].agent.signal(signal.SIGCONT)
    own_three.nodes[0].start()
    for node in own_three.nodes:
        wait_until(lambda node=node: manifest.version in node.protected(), f"it is protected on {node.node_id}")


def test_a_commit_needs_the_members_of_its_epoch(own_three: Cluster) -> None:
    """Decision 12: with unknown members one node would be all there are, or those of the last epoch would count."""
    coordinator = own_three.ranks[0]
    before = own_three.save(1)
    coordinator.epoch = 2  # What it says makes the epoch known; nobody entered it.
    stranger = own_three.save(2, replicate=False)
    with pytest.raises(CommitError, match="joined epoch 2"):
        coordinator.commit(stranger)
    with pytest.raises(StaleEpochError):
        coordinator.commit(before)
    coordinator.job = "another"
    unknown = own_three.save(1, ranks=[coordinator], replicate=False)
    with pytest.raises(CommitError, match="joined epoch 2"):
        coordinator.commit(unknown)
    assert not own_three.nodes[0].committed()


def test_who_forgot_the_members_takes_its_containers_up_again_when_it_joins(own_three: Cluster) -> None:
    """Alone it would call them committed on one node."""
    first, *others = own_three.nodes
    manifest = own_three.save(1, replicate=False)
    for node in others:
        assert node.agent is not None
        node.agent.signal(signal.SIGSTOP)
    own_three.ranks[0].commit(manifest, deadline_s=0.5)
    assert not own_three.ranks[0].committed(manifest.version).ok
    first.kill()
    first.paths.job(own_three.ranks[0].job).unlink()
    first.start("--port", str(first.port))
    for node in others:
        assert node.agent is not None
        node.agent.signal(signal.SIGCONT)
    time.sleep(1)
    assert first.counter("containers_committed") == 0
    assert not first.protected()
    own_three.ranks[0].attach()
    own_three.join()
    for node in own_three.nodes:
        wait_until(lambda node=node: manifest.version in node.protected(), f"it is protected on {node.node_id}")
    assert others[0].held(manifest.version.object("shard-0")) is not None


@pytest.fixture
def impatient(shm_root: Path) -> Iterator[Cluster]:
    """Three nodes with a deadline of 0.3 seconds, so that 20 of them are over in a test.

    With two replicas there is nobody who could take a dead buddy's place.
    """
    with cluster(shm_root, 3, "--deadline-s", "0.3") as made:
        made.join(replicas=2)
        yield made


def test_who_waits_for_protection_hears_of_a_buddy_that_stays_away(impatient: Cluster) -> None:
    """By its name, and whenever it asks. The buddy comes back after all, and gets its copies by itself."""
    first, buddy, third = impatient.nodes
    manifest = impatient.save(1, replicate=False, ranks=impatient.ranks[:1])
    buddy.kill()
    began = time.monotonic()
    impatient.ranks[0].commit(manifest)
    assert impatient.ranks[0].committed(manifest.version).ok
    event = impatient.ranks[0].committed(manifest.version)
    assert not event.ok
    assert event.error_kind == "ReplicationError"
    assert "objects of n0 by n1" in event.error_message
    assert "n2" not in event.error_message
    assert 5.5 < time.monotonic() - began < 12
    assert not first.protected()
    impatient.ranks[0].commit(manifest)
    assert impatient.ranks[0].committed(manifest.version).ok
    assert impatient.ranks[0].committed(manifest.version).error_kind == "ReplicationError"
    buddy.start("--port", str(buddy.port))
    for node in (first, buddy, third):
        wait_until(lambda node=node: manifest.version in node.protected(), f"it is protected on {node.node_id}")
    one = manifest.version.object("shard-0")
    assert buddy.bytes_of(one) == first.bytes_of(one)


# -- the receiver, spoken to directly


def _put(made: Cluster, index: int, data: bytes, crc: int, epoch: int = 1, sender: int = 0) -> None:
    import grpc

    from replicator.errors import ReplicatorError
    from replicator.rpc_errors import error_from_rpc

    chunks = list(manifest_chunks(data, crc, Sender(made.nodes[sender].address.identity, made.ranks[0].job, epoch)))
    with grpc.insecure_channel(made.nodes[index].address.grpc_address) as channel:
        function = channel.stream_unary(
            "/replicator.v1.PeerService/PutManifest",
            request_serializer=types_pb2.ManifestChunk.SerializeToString,
            response_deserializer=peer_pb2.PutManifestReply.FromString,
        )
        try:
            function(iter(chunks), timeout=10)
        except grpc.RpcError as error:
            meaning: ReplicatorError = error_from_rpc(error, "an answer", "the agent", 10)
            raise meaning from None


def test_a_damaged_manifest_is_not_stored(three: Cluster) -> None:
    manifest = three.save(1, replicate=False)
    data = manifest_to_bytes(manifest)
    with pytest.raises(CorruptObjectError):
        _put(three, 1, data, crc32c(data) ^ 1)
    with pytest.raises((CorruptObjectError, InvalidIdError)):
        _put(three, 1, b"\xff" * 50, crc32c(b"\xff" * 50))
    assert manifest.version not in three.nodes[1].committed()


def test_a_superseded_incarnation_cannot_commit(three: Cluster) -> None:
    """F11: neither through its own agent nor from node to node."""
    manifest = three.save(1, replicate=False)
    three.nodes[1].ask(
        "Hello",
        peer_pb2.HelloRequest(sender=sender_to_pb(Sender(three.nodes[0].address.identity, three.ranks[0].job, 1))),
        peer_pb2.HelloReply,
    )
    for rank in three.ranks[1:]:
        rank.join(2, three.nodes)
    data = manifest_to_bytes(manifest)
    with pytest.raises(StaleEpochError):
        _put(three, 1, data, crc32c(data), epoch=1)
    three.ranks[0].commit(manifest, deadline_s=2)
    event = three.ranks[0].committed(manifest.version)
    assert event.error_kind == "StaleEpochError"
    three.ranks[0].join(2, three.nodes)
    with pytest.raises(StaleEpochError):
        three.ranks[0].commit(manifest)


def test_another_manifest_for_a_committed_version_is_refused_by_everybody(three: Cluster) -> None:
    manifest = three.save(1)
    three.ranks[0].commit(manifest)
    three.ranks[0].protected(manifest.version)
    wait_until(lambda: manifest.version in three.nodes[2].committed(), "all have it")
    data = manifest_to_bytes(dataclasses.replace(manifest, world_size=99))
    with pytest.raises(CommitError):
        _put(three, 2, data, crc32c(data))
    assert manifest_from_bytes(_stored(three, 2, manifest)) == manifest


def test_only_the_coordinator_can_call_a_container_protected(three: Cluster) -> None:
    """F49."""
    manifest = three.save(1, replicate=False)
    data = manifest_to_bytes(manifest)
    _put(three, 2, data, crc32c(data))
    request = peer_pb2.MarkProtectedRequest(
        sender=sender_to_pb(Sender(three.nodes[1].address.identity, three.ranks[0].job, 1)),
        container=version_to_pb(manifest.version),
    )
    with pytest.raises(CommitError, match="coordinated by n0"):
        three.nodes[2].ask("MarkProtected", request, peer_pb2.MarkProtectedReply)
    assert manifest.version not in three.nodes[2].protected()


def test_a_report_that_does_not_fit_the_manifest_is_refused(three: Cluster) -> None:
    """F49: of an object that the reporting node does not own, of other content, or of an unknown container."""
    manifest = three.save(1, replicate=False)
    # One that nobody has, so that the container is not protected meanwhile: then every report is only thanked for.
    manifest = dataclasses.replace(manifest, entries=(*manifest.entries, ManifestEntry("z-lost", 1, 1, "n2")))
    entry = manifest.entries[1]

    def report(node: int, held: HeldObject) -> None:
        request = peer_pb2.ReportReplicatedRequest(
            sender=sender_to_pb(Sender(three.nodes[node].address.identity, three.ranks[0].job, 1)),
            container=version_to_pb(manifest.version),
            objects=[held_to_pb(held)],
        )
        three.nodes[0].ask("ReportReplicated", request, peer_pb2.ReportReplicatedReply)

    right = HeldObject(entry.name, entry.size, entry.crc32c)
    with pytest.raises(NotFoundError):
        report(1, right)
    three.ranks[0].commit(manifest)
    with pytest.raises(CommitError):
        report(2, right)
    with pytest.raises(CommitError):
        report(1, dataclasses.replace(right, crc32c=right.crc32c ^ 1))
    report(1, right)


def test_a_large_manifest_travels(three: Cluster) -> None:
    """F28: more than one message of it."""
    version = three.ranks[0].begin(1)
    one = version.object("a" * 100)
    info = three.ranks[0].write(one, os.urandom(100))
    entries = [ManifestEntry(one.name, info.size, info.crc32c, "n0")]
    entries += [ManifestEntry("b" * 190 + f"{i:06}", i, i, "somewhere-else") for i in range(12_000)]
    manifest = Manifest(version, 1, "n0", 1, 3, 1, tuple(entries))
    assert len(manifest_to_bytes(manifest)) > 2 << 20
    # It is more than one message of a trainer's call may have: the agent is asked as another agent asks it.
    data = manifest_to_bytes(manifest)
    _put(three, 1, data, crc32c(data))
    assert manifest.version in three.nodes[1].committed()


def test_a_manifest_that_is_larger_than_a_message_reaches_every_node(three: Cluster) -> None:
    """F28. Its objects are another node's, and need not be there for it."""
    manifest = three.save(1)
    many = (ManifestEntry(f"z/{'long' * 47}/{number:06}", 1, number, "n2") for number in range(22_000))
    manifest = dataclasses.replace(manifest, entries=(*manifest.entries, *many))
    assert len(manifest_to_bytes(manifest)) > 4 << 20
    three.ranks[0].commit(manifest, deadline_s=20.0)
    assert three.ranks[0].committed(manifest.version).ok
    for node in three.nodes:
        wait_until(lambda node=node: manifest.version in node.committed(), "it has the manifest")
        assert (node.paths.manifest_of(manifest.version) / "manifest").stat().st_size > 4 << 20
    plan = three.ranks[1].lookup(deadline_s=20.0)
    assert "22000 of its 22003 objects" in plan.rejected[0].reason
