"""Replication between real agents: what is sealed here becomes a verified copy there, or a typed error."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import JOB, MIB, Cluster, cluster, dead_peer, mute_peer, sources_of

from replicator.agent.published import LAST, RECORD
from replicator.errors import InvalidIdError, ObjectNotFoundError, StaleEpochError
from replicator.ids import NodeAddress, NodeIdentity
from replicator.v1 import peer_pb2
from replicator.wire import Sender, info_to_pb, node_address_to_pb, sender_to_pb


def test_every_object_becomes_a_verified_copy_with_its_owner_kept(three: Cluster) -> None:
    """F01: sizes of no byte, less than a block, several blocks with a short last one."""
    rank = three.ranks[0]
    version = rank.begin(0)
    random.seed(5)
    sizes = {"empty": 0, "small": 5, "page": 4096, "block": 4 * MIB, "several/parts": 9 * MIB + 17}
    infos = {}
    for name, size in sizes.items():
        infos[name] = rank.write(version.object(name), random.randbytes(size))
    buddies = rank.replicate([info.object for info in infos.values()])
    assert buddies == ("n1",)
    for name, info in infos.items():
        event = rank.wait(lambda event, name=name: event.replication.object.name == name, name).replication
        assert event.ok, event
        assert (event.verified.size_bytes, event.verified.crc32c) == (info.size, info.crc32c)
        lane = "bulk" if info.size > 256 << 10 else "grpc"
        assert event.lane == (lane if info.size else "")
        copy = three.nodes[1].held(info.object)
        assert copy is not None
        assert copy.same_content(info)
        assert copy.owner_node_id == "n0"
        assert copy.client_id.startswith("agent-")
        assert three.nodes[1].bytes_of(info.object) == three.nodes[0].bytes_of(info.object)
        assert three.nodes[2].held(info.object) is None


def test_repeating_it_for_a_copy_that_is_there_moves_no_byte(three: Cluster) -> None:
    rank = three.ranks[0]
    one = rank.begin(1).object("a")
    rank.write(one, b"x" * 100_000)
    rank.replicate([one])
    assert rank.outcome(one).lane == "grpc"
    pulled = three.nodes[1].counter("bytes_pulled")
    rank.replicate([one, one])
    event = rank.outcome(one)
    assert event.ok
    assert event.lane == ""
    assert three.nodes[1].counter("bytes_pulled") == pulled


def test_what_was_acknowledged_is_asked_again_after_the_owner_was_killed(own_three: Cluster) -> None:
    rank = own_three.ranks[0]
    one = rank.begin(1).object("a")
    rank.write(one, b"x" * 100_000)
    rank.replicate([one])
    assert rank.outcome(one).ok
    own_three.nodes[0].kill()
    own_three.nodes[0].start()
    rank.attach()
    rank.replicate([one])
    event = rank.outcome(one)
    assert event.ok
    assert event.lane == ""


def test_the_buddy_is_killed_in_the_middle_and_comes_back_on_another_port(own_three: Cluster) -> None:
    """F45, F34: the copy is made all the same, by the same request."""
    rank, buddy = own_three.ranks[0], own_three.nodes[1]
    version = rank.begin(1)
    objects = [version.object(f"o{i}") for i in range(200)]
    for one in objects:
        rank.write(one, os.urandom(4096) * 64)
    rank.replicate(objects, deadline_s=15)
    rank.wait(lambda event: event.HasField("replication"), "the first copy")
    assert buddy.agent is not None
    buddy.agent.signal(signal.SIGSTOP)
    before, done = buddy.port, sum(buddy.held(one) is not None for one in objects)
    assert done < len(objects)
    buddy.kill()
    # Without them it would take its old port again.
    for name in (RECORD, LAST):
        (buddy.root / name).unlink(missing_ok=True)
    buddy.start()
    assert buddy.port != before
    outcomes = {event.replication.object.name: event.replication for event in rank.seen}
    while len(outcomes) < len(objects):
        event = rank.wait(lambda event: event.HasField("replication"), "all copies").replication
        outcomes[event.object.name] = event
    assert all(event.ok for event in outcomes.values()), outcomes
    assert all(buddy.held(one) is not None for one in objects)
    assert buddy.counter("objects_pulled") >= len(objects) - done


def test_a_buddy_that_stays_away_is_named_with_every_attempt(own_three: Cluster) -> None:
    """F15: and the trainer's own calls do not wait for it."""
    rank = own_three.ranks[0]
    own_three.nodes[1].kill()
    one = rank.begin(1).object("a")
    rank.write(one, b"x" * 1000)
    rank.replicate([one], deadline_s=1.0)
    event = rank.outcome(one)
    assert not event.ok
    assert event.error_kind == "ReplicationError"
    assert all(part in event.error_message for part in ("n1", "attempts in", "1.0 s", "PeerUnavailableError"))
    again = rank.begin(2).object("b")
    rank.write(again, b"y")
    assert own_three.nodes[0].held(again) is not None


def test_a_mute_buddy_ends_in_a_deadline(shm_root: Path) -> None:
    """F15: an agent that accepts connections and says nothing."""
    with cluster(shm_root, 1, "--deadline-s", "2") as made, mute_peer() as address:
        rank = made.ranks[0]
        ghost = NodeAddress(NodeIdentity("n9", 1), address)
        rank.epoch = 1
        _join(rank, [made.nodes[0].address, ghost])
        one = rank.begin(1).object("a")
        rank.write(one, b"x" * 1000)
        assert rank.replicate([one], deadline_s=1.0) == ("n9",)
        event = rank.outcome(one)
        assert event.error_kind == "ReplicationError"
        assert "n9" in event.error_message
        assert address in event.error_message


def _join(rank, members, epoch=1) -> None:  # type: ignore[no-untyped-def]
    from replicator.v1 import local_pb2

    request = local_pb2.JoinJobRequest(
        job=JOB, epoch=epoch, members=[node_address_to_pb(one) for one in members], replicas=1
    )
    rank.call("JoinJob", request, local_pb2.JoinJobReply)


def test_another_node_on_the_buddys_address_is_not_the_buddy(own_three: Cluster) -> None:
    """F34, F45: the same port, a different node."""
    rank, buddy = own_three.ranks[0], own_three.nodes[1]
    one = rank.begin(1).object("a")
    rank.write(one, b"x" * 1000)
    rank.replicate([one])
    assert rank.outcome(one).ok
    port = buddy.port
    buddy.kill()
    stranger = dataclasses.replace(buddy.address, identity=NodeIdentity("stranger", 1))
    buddy.node_id, buddy.root = stranger.node_id, buddy.root.with_name("stranger")
    buddy.start("--port", str(port))
    other = rank.begin(2).object("b")
    rank.write(other, b"y" * 1000)
    rank.replicate([other], deadline_s=1.0)
    event = rank.outcome(other)
    assert event.error_kind == "ReplicationError"
    assert "expected node n1" in event.error_message
    assert "stranger" in event.error_message
    assert buddy.held(other) is None


def test_a_replaced_buddy_with_an_empty_store_gets_everything_again(own_three: Cluster) -> None:
    """F19: same name, same port, other incarnation: what the old one acknowledged counts for nothing."""
    rank, buddy = own_three.ranks[0], own_three.nodes[1]
    manifest = own_three.save(1, b"z" * 10_000)
    mine = manifest.version.object("shard-0")
    assert rank.outcome(mine).ok
    port = buddy.port
    buddy.kill()
    buddy.root = buddy.root.with_name("replacement")
    buddy.start("--port", str(port))
    assert buddy.held(mine) is None
    rank.replicate([mine])
    event = rank.outcome(mine)
    assert event.ok
    assert event.lane == "grpc"
    assert buddy.held(mine) is not None
    assert own_three.nodes[0].counter("peers_replaced") >= 1


def test_two_replicas_make_two_copies(shm_root: Path) -> None:
    with cluster(shm_root, 3) as made:
        made.join(replicas=2)
        rank = made.ranks[0]
        one = rank.begin(1).object("a")
        rank.write(one, b"x" * 1000)
        assert set(rank.replicate([one])) == {"n1", "n2"}
        assert {rank.outcome(one).buddy_node_id, rank.outcome(one).buddy_node_id} == {"n1", "n2"}
        assert all(node.held(one) is not None for node in made.nodes)


def test_a_single_node_has_no_buddies(shm_root: Path) -> None:
    with cluster(shm_root, 1) as made:
        made.join()
        rank = made.ranks[0]
        one = rank.begin(1).object("a")
        rank.write(one, b"x")
        assert rank.replicate([one]) == ()


def test_the_gRPC_lane_alone_does_it_too(shm_root: Path) -> None:
    with cluster(shm_root, 2, "--lane", "grpc") as made:
        made.join()
        rank = made.ranks[0]
        one = rank.begin(1).object("a")
        info = rank.write(one, os.urandom(MIB) * 9)
        rank.replicate([one])
        event = rank.outcome(one)
        assert event.ok
        assert event.lane == "grpc"
        copy = made.nodes[1].held(one)
        assert copy is not None
        assert copy.same_content(info)


def test_with_tls_bytes_take_the_encrypted_port_only(shm_root: Path, certificates: Path) -> None:
    """F37, F39: no plain TCP is offered, and recovery works the same."""
    files = {"--tls-ca": "ca.pem", "--tls-cert": "node.pem", "--tls-key": "node.key"}
    flags = [part for flag, name in files.items() for part in (flag, str(certificates / name))]
    with cluster(shm_root, 2, *flags) as made:
        made.join()
        manifest = made.save(1, b"secret" * 1_000_000)
        made.ranks[0].commit(manifest)
        made.ranks[0].protected(manifest.version)
        events = [event.replication for event in made.ranks[0].seen if event.HasField("replication")]
        assert [event.lane for event in events] == ["grpc"]
        assert made.nodes[0].agent is not None
        assert made.nodes[0].agent.record["bulk_address"] == ""
        retrieved = made.ranks[0].retrieve(manifest.version, sources_of(made.ranks[0].lookup()))
        assert all(event.done for event in retrieved.values())
        assert {event.lane for event in retrieved.values() if not event.was_local} <= {"grpc"}


def test_a_full_buddy_says_so_with_numbers(shm_root: Path) -> None:
    """F22."""
    with cluster(shm_root, 2, "--budget-bytes", "3Mi") as made:
        made.join()
        rank = made.ranks[0]
        one = rank.begin(1).object("a")
        rank.write(one, b"x" * 2 * MIB)
        filler = made.ranks[1].reserve(2 * MIB)
        assert filler.capacity
        rank.replicate([one], deadline_s=0.5)
        event = rank.outcome(one)
        assert event.error_kind == "ReplicationError"
        assert "StoreFullError" in event.error_message
        assert "budget of 3145728 bytes" in event.error_message


def test_asking_for_an_object_that_is_not_here_is_refused(three: Cluster) -> None:
    one = three.ranks[0].begin(1).object("a")
    with pytest.raises(ObjectNotFoundError):
        three.ranks[0].replicate([one])


def test_an_object_that_is_not_here_fails_alone(three: Cluster) -> None:
    """After an agent was away it may have dropped one of many that it is asked for again."""
    rank = three.ranks[0]
    version = rank.begin(1)
    gone, there = version.object("gone"), version.object("there")
    rank.write(there, b"x" * 1000)
    (buddy,) = rank.replicate([gone, there])
    assert rank.outcome(there).ok
    refused = rank.outcome(gone)
    assert (refused.ok, refused.buddy_node_id, refused.error_kind) == (False, buddy, "ObjectNotFoundError")
    assert f"{gone} is not sealed on this node" in refused.error_message


# -- the receiver, spoken to directly


def _offer(made: Cluster, one, epoch: int = 1, **changes) -> peer_pb2.OfferRequest:  # type: ignore[no-untyped-def]
    owner = made.nodes[0]
    info = owner.held(one)
    assert info is not None
    return peer_pb2.OfferRequest(
        sender=sender_to_pb(Sender(owner.address.identity, made.ranks[0].job, epoch)),
        objects=[info_to_pb(dataclasses.replace(info, **changes))],
        source=node_address_to_pb(owner.address),
        deadline_ms=2000,
    )


def _written(made: Cluster, data: bytes = b"x" * 10_000):  # type: ignore[no-untyped-def]
    rank = made.ranks[0]
    one = rank.begin(1).object("a")
    rank.write(one, data)
    return one


def test_a_superseded_incarnation_cannot_offer(three: Cluster) -> None:
    """F11."""
    one = _written(three)
    three.join(2)
    with pytest.raises(StaleEpochError, match="epoch 1 was superseded by epoch 2"):
        three.nodes[1].offer(_offer(three, one, epoch=1))
    with pytest.raises(InvalidIdError):
        three.nodes[1].offer(_offer(three, one, epoch=0))
    assert three.nodes[1].held(one) is None


def test_an_offer_with_an_impossible_name_or_table_is_refused_for_that_object_alone(three: Cluster) -> None:
    """F38, F01."""
    one = _written(three)
    request = _offer(three, one)
    traversal = peer_pb2.OfferRequest.FromString(request.SerializeToString()).objects[0]
    traversal.object.name = "../../../escape"
    table = peer_pb2.OfferRequest.FromString(request.SerializeToString()).objects[0]
    table.block_crc32c[0] ^= 1
    request.objects.extend([traversal, table])
    events = three.nodes[1].offer(request)
    kinds = sorted(event.failed.error_kind or "sealed" for event in events)
    assert kinds == ["CorruptObjectError", "InvalidIdError", "sealed"]
    assert not list(three.base.rglob("*escape*"))


def test_an_offer_of_another_job_is_refused(three: Cluster) -> None:
    one = _written(three)
    request = _offer(three, one)
    request.sender.job = "another"
    (event,) = three.nodes[1].offer(request)
    assert event.failed.error_kind == "InvalidIdError"


def test_other_content_under_the_same_name_is_refused(three: Cluster) -> None:
    one = _written(three)
    (event,) = three.nodes[1].offer(_offer(three, one))
    assert event.sealed.size_bytes == 10_000
    request = _offer(three, one)
    request.objects[0].size_bytes, request.objects[0].crc32c = 0, 0
    del request.objects[0].block_crc32c[:]
    (event,) = three.nodes[1].offer(request)
    assert event.failed.error_kind == "ObjectExistsError"


def test_a_bit_flipped_at_the_source_never_becomes_a_copy(three: Cluster) -> None:
    """F01: the owner's memory changed after the seal; the buddy sees it and seals nothing."""
    one = _written(three, os.urandom(MIB) * 9)
    path = three.nodes[0].paths.object(one)
    request = _offer(three, one)
    # Trainers of tests before this one may have reservations.
    reserved = three.nodes[1].status().reserved_bytes
    with path.open("r+b") as file:
        file.seek(5 * MIB)
        byte = file.read(1)
        file.seek(5 * MIB)
        file.write(bytes([byte[0] ^ 4]))
    (event,) = three.nodes[1].offer(request)
    assert event.failed.error_kind == "CorruptObjectError"
    assert "block" in event.failed.error_message
    assert three.nodes[1].held(one) is None
    status = three.nodes[1].status()
    assert status.reserved_bytes <= reserved
    assert status.counters["bad_blocks_received"] >= 1


def test_an_owner_whose_own_copy_is_bad_sets_it_aside(three: Cluster) -> None:
    """F01: never offered again, and the trainer is told."""
    rank = three.ranks[0]
    one = _written(three, b"x" * 10_000)
    with three.nodes[0].paths.object(one).open("r+b") as file:
        file.write(b"y")
    rank.replicate([one], deadline_s=10)
    event = rank.outcome(one)
    assert event.error_kind == "ReplicationError"
    assert "CorruptObjectError" in event.error_message
    assert not three.nodes[0].paths.object(one).exists()
    assert three.nodes[1].held(one) is None


def test_a_source_that_is_not_there_is_named(three: Cluster) -> None:
    one = _written(three)
    request = _offer(three, one)
    with dead_peer() as address:
        request.source.grpc_address = address
        (event,) = three.nodes[1].offer(request)
    assert event.failed.error_kind == "TransferError"
    assert address in event.failed.error_message


def test_one_object_offered_many_times_at_once_is_pulled_once(three: Cluster) -> None:
    """F20."""
    from concurrent.futures import ThreadPoolExecutor

    one = _written(three, os.urandom(MIB) * 30)
    request = _offer(three, one)
    pulled = three.nodes[1].counter("objects_pulled")
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: three.nodes[1].offer(request), range(8)))
    assert all(event.sealed.size_bytes == 30 * MIB for (event,) in outcomes)
    assert three.nodes[1].counter("objects_pulled") == pulled + 1
    agent = three.nodes[1].agent
    assert agent is not None
    # F33: at which rate, from where and over which lane is logged.

    def pulls() -> list[str]:
        return [line for line in agent.output if '"object pulled"' in line and one.version.container.job in line]

    wait_until(pulls, "it is logged")
    told = json.loads(pulls()[0])
    assert (told["bytes"], told["source"], told["lane"]) == (30 * MIB, "n0", "bulk")
    assert told["seconds"] > 0


def test_an_owner_that_goes_away_while_it_offers_leaves_nothing_reserved(own_three: Cluster) -> None:
    one = _written(own_three, os.urandom(MIB) * 30)
    request = _offer(own_three, one)
    own_three.nodes[0].kill()
    (event,) = own_three.nodes[1].offer(request)
    assert event.failed.error_kind == "TransferError"
    wait_until(lambda: own_three.nodes[1].status().reserved_bytes == 0, "nothing is reserved")
