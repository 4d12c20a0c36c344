"""What a node drops and what it never drops, in real agents."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, Rank, call, cluster, sources_of

from replicator.decide.types import Manifest, ObjectSource
from replicator.errors import StoreFullError
from replicator.ids import ContainerVersion
from replicator.v1 import admin_pb2, peer_pb2, types_pb2
from replicator.wire import Sender, info_to_pb, node_address_to_pb, sender_to_pb


def _protect(made: Cluster, step: int, data: bytes = b"shard") -> ContainerVersion:
    manifest = made.save(step, data)
    made.ranks[0].commit(manifest)
    made.ranks[0].protected(manifest.version)
    return manifest.version


def _of_job(made: Cluster, index: int) -> set[ContainerVersion]:
    return {version for version in made.nodes[index].versions() if version.container.job == made.ranks[0].job}


def test_after_a_newer_one_is_protected_only_keep_last_stay(three: Cluster) -> None:
    """F04: on every node, objects and manifests."""
    versions = [_protect(three, step) for step in (1, 2, 3, 4)]
    for index in range(3):
        wait_until(lambda index=index: _of_job(three, index) == set(versions[-2:]), f"n{index} keeps two")


def test_nothing_is_dropped_while_the_newer_one_lacks_a_copy(shm_root: Path) -> None:
    """F49: committed is not enough, for the last recoverable ones may be the older ones."""
    with cluster(shm_root, 3, "--budget-bytes", "20Mi") as made:
        made.join()
        old = [_protect(made, step, bytes(MIB)) for step in (1, 2)]
        made.nodes[1].kill()
        newer = made.save(3, bytes(MIB), ranks=[made.ranks[0], made.ranks[2]])
        made.ranks[0].commit(newer)
        assert not made.ranks[0].committed(newer.version).is_protected
        assert _of_job(made, 0) == {*old, newer.version}
        # Under pressure the same is left alone, though there would be room without it.
        held = made.nodes[0].status().sealed_bytes
        with pytest.raises(StoreFullError):
            made.ranks[0].reserve(20 * MIB - held // 3)
        assert _of_job(made, 0) >= {old[1], newer.version}
        made.nodes[1].start()
        made.ranks[0].protected(newer.version)
        wait_until(lambda: _of_job(made, 0) == {old[1], newer.version}, "the oldest is dropped")


def test_nothing_is_dropped_for_a_reservation_that_cannot_be_met_all_the_same(shm_root: Path) -> None:
    """F04: the older protected step stays when giving it up would not make enough room."""
    with cluster(shm_root, 2, "--budget-bytes", "20Mi") as made:
        made.join()
        older, newer = (_protect(made, step, bytes(3 * MIB)) for step in (1, 2))
        with pytest.raises(StoreFullError, match="budget of 20971520 bytes"):
            made.ranks[0].reserve(18 * MIB)
        assert _of_job(made, 0) == {older, newer}
        assert made.ranks[0].reserve(13 * MIB).capacity == 13 * MIB
        assert _of_job(made, 0) == {newer}


def test_leftovers_of_a_save_that_was_never_committed_go_with_the_next_protected_one(three: Cluster) -> None:
    left = three.save(1)
    kept = _protect(three, 2)
    for index in range(3):
        wait_until(lambda index=index: _of_job(three, index) == {kept}, f"n{index} keeps one")
    assert left.version not in _of_job(three, 0)


def test_what_is_recovered_is_committed_on_every_member_of_the_new_incarnation(three: Cluster) -> None:
    """F10: a replacement is no member when the step is committed, and another node's agent makes the plan. What the
    replacement then brings is no leftover to it, and stays like on the others."""
    first, second, replacement = three.ranks
    three.join(first.open_job([first.node, second.node]), ranks=[first, second])
    manifest = three.save(6, ranks=[first, second])
    first.commit(manifest)
    first.protected(manifest.version)
    assert replacement.node.versions().isdisjoint({manifest.version})
    three.join(first.open_job(three.nodes))
    plan = first.lookup()
    assert manifest.version in replacement.node.committed()
    assert manifest.version in replacement.node.protected()
    events = replacement.retrieve(manifest.version, sources_of(plan))
    assert all(event.done for event in events.values())
    newer = _protect(three, 9)
    wait_until(lambda: newer in replacement.node.protected(), "the replacement hears of the newer one")
    assert _of_job(three, 2) == {manifest.version, newer}


def _offer_again(made: Cluster, manifest: Manifest, info) -> peer_pb2.OfferEvent:  # type: ignore[no-untyped-def]
    request = peer_pb2.OfferRequest(
        sender=sender_to_pb(Sender(made.nodes[0].address.identity, made.ranks[0].job, 1)),
        objects=[info_to_pb(info)],
        source=node_address_to_pb(made.nodes[0].address),
        deadline_ms=1000,
    )
    (event,) = made.nodes[1].offer(request)
    return event


def test_a_late_copy_of_a_dropped_step_is_refused_and_makes_no_directory(three: Cluster) -> None:
    """F48."""
    manifest = three.save(1)
    info = three.nodes[0].held(manifest.version.object("shard-0"))
    assert info is not None
    three.ranks[0].commit(manifest)
    three.ranks[0].protected(manifest.version)
    later = [_protect(three, step) for step in (2, 3)]
    wait_until(lambda: _of_job(three, 1) == set(later), "step 1 is dropped")
    event = _offer_again(three, manifest, info)
    assert event.failed.error_kind == "ReplicationError"
    assert "dropped" in event.failed.error_message
    assert _of_job(three, 1) == set(later)


def test_it_is_refused_after_a_restart_too(own_three: Cluster) -> None:
    """F48: what was dropped is forgotten, that it is too old is not."""
    manifest = own_three.save(1)
    info = own_three.nodes[0].held(manifest.version.object("shard-0"))
    own_three.ranks[0].commit(manifest)
    own_three.ranks[0].protected(manifest.version)
    later = [_protect(own_three, step) for step in (2, 3)]
    wait_until(lambda: _of_job(own_three, 1) == set(later), "step 1 is dropped")
    own_three.nodes[1].kill()
    own_three.nodes[1].start()
    event = _offer_again(own_three, manifest, info)
    assert event.failed.error_kind == "ReplicationError"
    assert "older than" in event.failed.error_message
    assert _of_job(own_three, 1) == set(later)


@pytest.fixture
def tight(shm_root: Path):  # type: ignore[no-untyped-def]
    """Two nodes that have room for a little more than two steps of 4 MiB per rank."""
    with cluster(shm_root, 2, "--budget-bytes", "22Mi", "--keep-last", "5") as made:
        made.join()
        yield made


def test_superseded_steps_make_room_before_a_reservation_fails(tight: Cluster) -> None:
    """F22: keep_last = 5 would keep more than there is room for."""
    data = b"x" * (4 * MIB)
    versions = [_protect(tight, step, data) for step in (1, 2)]
    versions += [_protect(tight, step, data) for step in (3, 4, 5)]
    assert versions[-1] in _of_job(tight, 0)
    assert versions[-1] in _of_job(tight, 1)
    assert tight.nodes[0].counter("containers_dropped_under_pressure") >= 1
    for node in tight.nodes:
        assert all(node.held(versions[-1].object(f"shard-{i}")) is not None for i in range(2))


def test_the_last_good_step_survives_a_full_store(tight: Cluster) -> None:
    """F04: the error has numbers, and what was protected is still there and still recoverable."""
    kept = _protect(tight, 1, b"x" * (4 * MIB))
    rank: Rank = tight.ranks[0]
    with pytest.raises(StoreFullError, match="budget of 23068672 bytes"):
        rank.reserve(16 * MIB)
    assert kept in _of_job(tight, 0)
    plan = rank.lookup()
    assert plan.found, plan.reason
    # And a smaller one still fits.
    assert rank.reserve(4 * MIB).capacity


def test_what_is_brought_for_loading_is_kept_until_a_later_epoch_is_protected(three: Cluster) -> None:
    """An operator goes back to an older step: it must not be dropped between retrieval and load."""
    from cluster import sources_of

    old = _protect(three, 1)
    newest = _protect(three, 2)
    plan = three.ranks[2].lookup(step=1)
    events = three.ranks[2].retrieve(old, sources_of(plan))
    assert all(event.done for event in events.values())
    third = _protect(three, 3)
    wait_until(lambda: _of_job(three, 0) == {newest, third}, "n0 dropped it")
    assert old in _of_job(three, 2)
    three.join(2)
    later = [_protect(three, step) for step in (4, 5)]
    wait_until(lambda: _of_job(three, 2) == set(later), "n2 dropped it")


def test_a_step_with_a_hole_at_its_owner_supersedes_nothing(three: Cluster) -> None:
    """F01, F04: of step 2 n0 lost its own object after it was copied, and the copy is bad too."""
    whole = _protect(three, 1)
    manifest = three.save(2)
    hurt = manifest.version.object("shard-0")
    assert three.ranks[0].outcome(hurt).ok
    # In the buddy's copy as well, so that n0 cannot bring it again from there.
    for node in three.nodes[:2]:
        with node.paths.object(hurt).open("r+b") as file:
            file.write(b"\0\0")
    entry = manifest.entries[0]
    source = ObjectSource(entry.name, entry.size, entry.crc32c, "n0", ())
    assert three.ranks[0].retrieve(manifest.version, [source])[entry.name].error_kind == "ObjectNotFoundError"
    # Through another coordinator, for n0 itself no longer has what the manifest says.
    three.ranks[1].commit(dataclasses.replace(manifest, coordinator_node_id="n1"))
    assert three.ranks[1].committed(manifest.version).ok
    newest = _protect(three, 3)
    # Two that are protected are kept: had step 2 been one of them, step 1 would be gone. (n0 was to load step 2.)
    for index in (1, 2):
        wait_until(lambda index=index: _of_job(three, index) == {whole, newest}, f"n{index} dropped step 2")
    assert whole in _of_job(three, 0)


def test_what_a_restart_went_back_to_goes_when_newer_ones_are_protected(three: Cluster) -> None:
    """The node that was asked for the plan keeps no more than the others do."""
    found = [_protect(three, step) for step in (1, 2)][-1]
    three.join(2)
    assert three.ranks[0].lookup().container.step == found.container.step
    later = [_protect(three, step) for step in (3, 4)]
    for index in range(3):
        wait_until(lambda index=index: _of_job(three, index) == set(later), f"n{index} keeps two")


def test_an_observer_pins_nothing(three: Cluster) -> None:
    """What `replicator-admin recover --dry-run` asks an agent does not change what the agent keeps."""
    for step in (1, 2):
        _protect(three, step)
    with grpc.insecure_channel(three.nodes[0].address.grpc_address) as channel:
        request = admin_pb2.RecoverRequest(job=three.ranks[0].job)
        assert call(channel, "AdminService/Recover", request, types_pb2.Plan).container.step == 2
    later = [_protect(three, step) for step in (3, 4)]
    wait_until(lambda: _of_job(three, 0) == set(later), "n0 keeps two")
