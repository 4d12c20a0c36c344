"""Saves that failed take no room for long, in real agents; what has a manifest is never abandoned."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, cluster

from replicator.errors import CommitError, InvalidIdError, StaleEpochError
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation
from replicator.native import crc32c
from replicator.rpc_errors import error_from_rpc
from replicator.v1 import local_pb2, peer_pb2, types_pb2
from replicator.wire import (
    Sender,
    info_to_pb,
    manifest_chunks,
    manifest_to_bytes,
    node_address_to_pb,
    sender_to_pb,
    version_from_pb,
    version_to_pb,
)

DATA = b"x" * (4 * MIB)


@pytest.fixture
def tight(shm_root: Path) -> Iterator[Cluster]:
    """Two nodes with room for four or five saves."""
    with cluster(shm_root, 2, "--budget-bytes", "40Mi") as made:
        made.join()
        yield made


def _protect(made: Cluster, step: int, data: bytes = b"shard") -> ContainerVersion:
    manifest = made.save(step, data)
    made.ranks[0].commit(manifest)
    made.ranks[0].protected(manifest.version)
    return manifest.version


def _abandon(made: Cluster, *versions: ContainerVersion, rank: int = 0) -> list[ContainerVersion]:
    chosen = made.ranks[rank]
    request = local_pb2.AbandonAttemptsRequest(
        job=chosen.job, epoch=chosen.epoch, containers=[version_to_pb(version) for version in versions]
    )
    reply = chosen.call("Abandon", request, local_pb2.AbandonAttemptsReply)
    return [version_from_pb(container) for container in reply.abandoned]


def _of_job(made: Cluster, index: int) -> set[ContainerVersion]:
    return {version for version in made.nodes[index].versions() if version.container.job == made.ranks[0].job}


def _copied(made: Cluster, version: ContainerVersion) -> None:
    """Wait until every rank's object is with its buddy."""
    for rank, index in zip(made.ranks, range(len(made.ranks)), strict=True):
        one = version.object(f"shard-{index}")
        (buddy,) = rank.replicate([one])
        holder = next(node for node in made.nodes if node.node_id == buddy)
        wait_until(lambda one=one, holder=holder: holder.held(one) is not None, f"{buddy} has {one}")


def _gone(made: Cluster, version: ContainerVersion) -> None:
    for index in range(len(made.nodes)):
        wait_until(lambda index=index: version not in _of_job(made, index), f"{version} is gone from n{index}")


def _sender(made: Cluster, index: int) -> Sender:
    rank = made.ranks[index]
    return Sender(made.nodes[index].address.identity, rank.job, rank.epoch)


def test_any_number_of_failed_saves_leaves_room_for_the_next(tight: Cluster) -> None:
    kept = _protect(tight, 1, DATA)
    failed: list[ContainerVersion] = []
    for step in range(2, 12):
        failed.append(tight.save(step, DATA, abandons=failed[-1:]).version)
        for index in range(2):
            wait_until(lambda index=index: _of_job(tight, index) == {kept, failed[-1]}, f"the others go from n{index}")
    assert tight.nodes[0].counter("containers_abandoned") == len(failed) - 1
    saved = tight.save(20, DATA, abandons=failed[-1:]).version
    _copied(tight, saved)
    for node in tight.nodes:
        assert node.bytes_of(saved.object("shard-0")).startswith(DATA)
        assert node.bytes_of(kept.object("shard-1")).startswith(DATA)


def test_a_save_that_is_known_to_have_failed_goes_at_once(three: Cluster) -> None:
    kept = _protect(three, 1)
    failed = three.save(2).version
    _copied(three, failed)
    assert _abandon(three, failed) == [failed]
    assert failed not in _of_job(three, 0)
    _gone(three, failed)
    assert all(kept in _of_job(three, index) for index in range(3))
    # Again, it changes nothing.
    assert _abandon(three, failed) == [failed]


def test_what_was_abandoned_cannot_be_committed(three: Cluster) -> None:
    """On the coordinator, and on a node that is sent the manifest all the same."""
    failed = three.save(1)
    _copied(three, failed.version)
    _abandon(three, failed.version)
    _gone(three, failed.version)
    with pytest.raises(CommitError):
        three.ranks[0].commit(failed)
    # Also one that lists nothing of the coordinator's node, of which nothing is missing there.
    others = dataclasses.replace(failed, entries=failed.entries[1:])
    with pytest.raises(CommitError, match="abandoned"):
        three.ranks[0].commit(others)
    data = manifest_to_bytes(failed)
    with grpc.insecure_channel(three.nodes[1].address.grpc_address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.stream_unary(
            "/replicator.v1.PeerService/PutManifest",
            request_serializer=types_pb2.ManifestChunk.SerializeToString,
            response_deserializer=peer_pb2.PutManifestReply.FromString,
        )(manifest_chunks(data, crc32c(data), _sender(three, 0)), timeout=10)
    error = error_from_rpc(refused.value, "PutManifest", "n1", 10)
    assert isinstance(error, CommitError)
    assert "abandoned" in str(error)
    assert all(failed.version not in _of_job(three, index) for index in range(3))


def test_what_comes_of_it_later_is_refused(own_three: Cluster) -> None:
    """A copy (F48), and what a rank of another node is still writing."""
    failed = own_three.save(1, ranks=own_three.ranks[:2]).version
    info = own_three.nodes[0].held(failed.object("shard-0"))
    assert info is not None
    wait_until(lambda: own_three.nodes[1].held(info.object) is not None, "n1 has a copy")
    _abandon(own_three, failed)
    _gone(own_three, failed)
    request = peer_pb2.OfferRequest(
        sender=sender_to_pb(_sender(own_three, 0)),
        objects=[info_to_pb(info)],
        source=node_address_to_pb(own_three.nodes[0].address),
        deadline_ms=1000,
    )
    (event,) = own_three.nodes[1].offer(request)
    assert event.failed.error_kind == "ReplicationError"
    assert "failed" in event.failed.error_message
    for rank in own_three.ranks:
        with pytest.raises(CommitError, match="abandoned"):
            rank.write(failed.object("late"), b"late")
    assert all(failed not in _of_job(own_three, index) for index in range(3))


def test_nothing_with_a_manifest_is_abandoned(three: Cluster) -> None:
    """Neither by the coordinator's word, nor on a node where only the manifest of another node says so."""
    committed = three.save(1)
    three.ranks[0].commit(committed)
    three.ranks[0].protected(committed.version)
    assert _abandon(three, committed.version) == []
    request = peer_pb2.AbandonRequest(
        sender=sender_to_pb(_sender(three, 1)), containers=[version_to_pb(committed.version)]
    )
    three.nodes[2].ask("Abandon", request, peer_pb2.AbandonReply)
    plan = three.ranks[0].lookup()
    assert plan.found
    assert version_from_pb(plan.container) == committed.version
    for index, node in enumerate(three.nodes):
        assert node.held(committed.version.object(f"shard-{index}")) is not None


def test_only_attempts_of_the_own_job_and_epoch_can_be_abandoned(three: Cluster) -> None:
    """A rank speaks for its epoch, an agent also for earlier ones, nobody for later ones or other jobs."""
    saved = three.save(1).version
    later = ContainerVersion(saved.container, make_generation(2, 1))
    foreign = ContainerVersion(CheckpointContainerId("other", 1), saved.generation)
    for version in (later, foreign):
        with pytest.raises(InvalidIdError):
            _abandon(three, version)
        request = peer_pb2.AbandonRequest(sender=sender_to_pb(_sender(three, 0)), containers=[version_to_pb(version)])
        with pytest.raises(InvalidIdError):
            three.nodes[1].ask("Abandon", request, peer_pb2.AbandonReply)
    stale = peer_pb2.AbandonRequest(sender=sender_to_pb(_sender(three, 0)), containers=[version_to_pb(saved)])
    three.join(2)
    with pytest.raises(InvalidIdError):
        _abandon(three, saved)
    with pytest.raises(StaleEpochError):
        three.nodes[1].ask("Abandon", stale, peer_pb2.AbandonReply)
    assert saved in _of_job(three, 0)


def test_begin_does_not_wait_for_a_node_that_is_dead_and_that_one_hears_of_it_with_the_next(own_three: Cluster) -> None:
    first = own_three.save(1).version
    _copied(own_three, first)
    own_three.nodes[1].kill()
    started = time.monotonic()
    own_three.ranks[0].begin(2, [first])
    assert time.monotonic() - started < 2
    wait_until(lambda: first not in _of_job(own_three, 2), "n2 dropped it")
    assert first in _of_job(own_three, 1)
    # Longer than the first word of it is repeated.
    wait_until(lambda: time.monotonic() - started > 8, "nobody is told of it any more")
    own_three.nodes[1].start()
    second = own_three.ranks[0].begin(3)
    own_three.ranks[0].begin(4, [second])
    wait_until(lambda: first not in _of_job(own_three, 1), "n1 dropped it")


# -- after a restart of the job


def test_what_an_earlier_incarnation_left_goes_when_everybody_answers(three: Cluster) -> None:
    """Not what is committed, even on one node only, and nothing of the incarnation that looks."""
    kept = _protect(three, 1)
    committed = three.save(2, replicate=False)
    three.ranks[0].commit(committed)
    three.ranks[0].committed(committed.version)
    left = three.save(3).version
    _copied(three, left)
    assert not three.ranks[0].lookup().unanswered
    assert left in _of_job(three, 2), "it may still be committed"
    three.join(2)
    own = three.save(4).version
    plan = three.ranks[1].lookup()
    assert version_from_pb(plan.container) in (kept, committed.version)
    _gone(three, left)
    for index, node in enumerate(three.nodes):
        for version in (kept, committed.version, own):
            assert node.held(version.object(f"shard-{index}")) is not None, (index, version)


def test_an_observer_and_a_lookup_of_one_step_change_nothing(three: Cluster) -> None:
    left = three.save(1).version
    three.join(2)
    three.ranks[0].lookup(step=1)
    three.ranks[0].epoch = 0
    three.ranks[0].lookup()
    time.sleep(0.5)
    assert all(left in _of_job(three, index) for index in range(3))


def test_nothing_goes_while_somebody_is_silent(own_three: Cluster) -> None:
    """The only manifest may be there."""
    kept = _protect(own_three, 1)
    left = own_three.save(2).version
    own_three.nodes[2].kill()
    own_three.join(2, ranks=own_three.ranks[:2])
    plan = own_three.ranks[0].lookup(deadline_s=1)
    assert [one.node_id for one in plan.unanswered] == ["n2"]
    time.sleep(0.5)
    assert all(left in _of_job(own_three, index) for index in range(3))
    own_three.nodes[2].start()

    def everybody_answers() -> bool:
        return not own_three.ranks[0].lookup().unanswered

    wait_until(everybody_answers, "n2 is back")
    _gone(own_three, left)
    assert all(kept in _of_job(own_three, index) for index in range(3))
