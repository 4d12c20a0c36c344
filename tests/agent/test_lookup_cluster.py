"""Recovery lookup and retrieval between real agents: who is asked, who is silent, what is chosen, what arrives."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import time
from pathlib import Path

import grpc
import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, Node, Rank, call, cluster, dead_peer, mute_peer, sources_of

from replicator.decide.types import Manifest, ObjectSource
from replicator.errors import InvalidIdError, StaleEpochError
from replicator.ids import ContainerVersion, NodeAddress, NodeIdentity
from replicator.v1 import admin_pb2, local_pb2, types_pb2
from replicator.wire import node_address_to_pb, source_to_pb, version_from_pb, version_to_pb


def _protect(made: Cluster, step: int, data: bytes = b"shard", ranks: list[Rank] | None = None) -> Manifest:
    chosen = ranks or made.ranks
    manifest = made.save(step, data, ranks=chosen)
    chosen[0].commit(manifest)
    chosen[0].protected(manifest.version)
    return manifest


def _join_with(rank: Rank, members: list[NodeAddress], epoch: int = 1) -> None:
    rank.epoch = epoch
    request = local_pb2.JoinJobRequest(
        job=rank.job, epoch=epoch, members=[node_address_to_pb(one) for one in members], replicas=1
    )
    rank.call("JoinJob", request, local_pb2.JoinJobReply)


def test_every_agent_gives_the_same_plan(three: Cluster) -> None:
    """F09, F14, F21: whoever is asked. Step 0 is a step."""
    manifest = _protect(three, 0)
    for node in three.nodes:
        wait_until(lambda node=node: manifest.version in node.protected(), "everybody knows")
    plans = [rank.lookup() for rank in three.ranks]
    assert all(plan.found for plan in plans)
    assert {plan.SerializeToString(deterministic=True) for plan in plans} == {
        plans[0].SerializeToString(deterministic=True)
    }
    plan = plans[0]
    assert version_from_pb(plan.container) == manifest.version
    assert [source.name for source in plan.sources] == ["shard-0", "shard-1", "shard-2"]
    assert [source.node_ids[0] for source in plan.sources] == ["n0", "n1", "n2"]
    assert [len(source.node_ids) for source in plan.sources] == [2, 2, 2]
    assert plan.world_size == 3
    assert [node.identity.node_id for node in plan.nodes] == ["n0", "n1", "n2"]
    assert not plan.unanswered


def test_a_node_that_is_no_member_any_more_is_searched(three: Cluster) -> None:
    """F13: it runs, it has the only copy of its shard, and the job went on without it."""
    first, former, newcomer = three.ranks
    first.job = former.job = newcomer.job = f"without-{first.job}"
    three.join(first.open_job([first.node, former.node]), ranks=[first, former], replicas=0)
    manifest = _protect(three, 1, ranks=[first, former])
    three.join(newcomer.open_job([first.node, newcomer.node]), ranks=[first, newcomer], replicas=0)
    for rank in (first, newcomer):
        plan = rank.lookup()
        assert version_from_pb(plan.container) == manifest.version
        assert [list(source.node_ids) for source in plan.sources] == [["n0"], ["n1"]]


def test_a_job_that_never_ran_on_a_node_is_found_through_it_too(three: Cluster) -> None:
    """F13, F21: any agent that knows those who hold it can be asked, also one that lost what it knew of the job."""
    first, second, _ = three.ranks
    first.job = second.job = f"elsewhere-{first.job}"
    three.join(first.open_job([first.node, second.node]), ranks=[first, second])
    manifest = _protect(three, 1, ranks=[first, second])
    with grpc.insecure_channel(three.nodes[2].address.grpc_address) as channel:
        request = admin_pb2.RecoverRequest(job=first.job, deadline_ms=3000)
        plan = call(channel, "AdminService/Recover", request, types_pb2.Plan)
    assert version_from_pb(plan.container) == manifest.version
    assert [list(source.node_ids) for source in plan.sources] == [["n0", "n1"], ["n1", "n0"]]


def test_nothing_saved_is_said_in_words(three: Cluster) -> None:
    plan = three.ranks[0].lookup()
    assert not plan.found
    assert "3 nodes" in plan.reason


def test_what_was_sealed_and_never_committed_is_not_offered(three: Cluster) -> None:
    """F05."""
    committed = _protect(three, 1)
    later = three.save(2)
    plan = three.ranks[1].lookup()
    assert version_from_pb(plan.container) == committed.version
    assert [version_from_pb(one.container) for one in plan.rejected] == [later.version]
    assert "never committed" in plan.rejected[0].reason


def test_a_certain_step_can_be_asked_for(three: Cluster) -> None:
    first, second = _protect(three, 1), _protect(three, 2)
    assert version_from_pb(three.ranks[0].lookup(step=1).container) == first.version
    assert version_from_pb(three.ranks[0].lookup().container) == second.version
    plan = three.ranks[0].lookup(step=77)
    assert not plan.found
    assert "77" in plan.reason


def test_a_job_or_step_that_cannot_be_one_is_refused(three: Cluster) -> None:
    with pytest.raises(InvalidIdError):
        three.ranks[0].lookup(step=2**63)
    three.ranks[0].job = "../x"
    with pytest.raises(InvalidIdError):
        three.ranks[0].lookup()


def test_a_lost_node_is_recovered_from_its_buddy_into_an_empty_replacement(own_three: Cluster) -> None:
    """The main job. F10: the replacement has another name; F13: sources are searched everywhere."""
    manifest = _protect(own_three, 5, os.urandom(MIB) * 9)
    lost = own_three.nodes[0]
    contents = {
        f"shard-{i}": node.bytes_of(manifest.version.object(f"shard-{i}")) for i, node in enumerate(own_three.nodes)
    }
    lost.kill()
    shutil.rmtree(lost.root)
    replacement = own_three.add("n9")
    survivors = own_three.ranks[1:3]
    chosen = [replacement, *survivors]
    epoch = replacement.open_job([rank.node for rank in chosen])
    assert epoch == 2
    own_three.join(epoch, ranks=chosen)
    plan = replacement.lookup()
    assert plan.found, plan.reason
    assert version_from_pb(plan.container) == manifest.version
    by_name = {source.name: list(source.node_ids) for source in plan.sources}
    assert by_name["shard-0"] == ["n1"]
    events = replacement.retrieve(manifest.version, sources_of(plan))
    assert {name: event.error_message for name, event in events.items() if not event.done} == {}
    assert {event.lane for event in events.values()} == {"bulk"}
    for name, content in contents.items():
        one = manifest.version.object(name)
        held = replacement.node.held(one)
        assert held is not None
        assert held.owner_node_id == f"n{name[-1]}"
        assert replacement.node.bytes_of(one) == content
    # The manifest is kept by the node that recovers, so that it counts as committed there too.
    assert manifest.version in replacement.node.committed()
    again = replacement.retrieve(manifest.version, sources_of(plan))
    assert all(event.was_local and event.done for event in again.values())


def test_the_next_save_of_the_restarted_job_is_the_newest(three: Cluster) -> None:
    """F11: an older step of a later epoch is newer than what the former incarnation reached."""
    _protect(three, 8)
    three.join(three.ranks[0].open_job(three.nodes))
    rolled_back = _protect(three, 3)
    plan = three.ranks[2].lookup()
    assert version_from_pb(plan.container) == rolled_back.version


def test_dead_and_mute_members_are_named_and_the_rest_is_found(three: Cluster) -> None:
    """F15, F19."""
    manifest = _protect(three, 1)
    rank = three.ranks[0]
    with mute_peer() as mute, dead_peer() as dead:
        members = [node.address for node in three.nodes]
        members += [NodeAddress(NodeIdentity("silent", 1), mute), NodeAddress(NodeIdentity("gone", 1), dead)]
        _join_with(rank, members, 2)
        began = time.monotonic()
        plan = rank.lookup(deadline_s=2.0)
        assert time.monotonic() - began < 3.0
    assert version_from_pb(plan.container) == manifest.version
    silent = {who.node_id: who.reason for who in plan.unanswered}
    assert set(silent) == {"silent", "gone"}
    assert mute in silent["silent"]
    assert dead in silent["gone"]
    assert "silent" in plan.reason
    assert "gone" in plan.reason


def test_a_stopped_process_is_silent_like_a_mute_one(own_three: Cluster) -> None:
    """F15: the connection was up before."""
    manifest = _protect(own_three, 1)
    assert own_three.nodes[2].agent is not None
    assert own_three.ranks[0].lookup().found
    own_three.nodes[2].agent.signal(signal.SIGSTOP)
    plan = own_three.ranks[0].lookup(deadline_s=1.0)
    assert version_from_pb(plan.container) == manifest.version
    (silent,) = plan.unanswered
    assert silent.node_id == "n2"
    assert "waited" in silent.reason
    events = own_three.ranks[0].retrieve(manifest.version, sources_of(plan), deadline_s=1.0)
    assert all(event.done for event in events.values())


def test_when_all_holders_of_an_object_are_gone_the_older_step_is_chosen(three: Cluster) -> None:
    old = _protect(three, 1)
    new = _protect(three, 2)
    # shard-0 of step 2 is on n0 and n1: take it away there as a loss of memory would.
    for node in three.nodes[:2]:
        path = node.paths.object(new.version.object("shard-0"))
        with path.open("r+b") as file:
            file.write(b"\0")
    for rank in three.ranks[:2]:
        entry = new.entries[0]
        source = ObjectSource(entry.name, entry.size, entry.crc32c, "n0", ())
        event = rank.retrieve(new.version, [source])[entry.name]
        assert event.error_kind == "ObjectNotFoundError"
    plan = three.ranks[2].lookup()
    assert version_from_pb(plan.container) == old.version
    assert "shard-0" in plan.rejected[0].reason


def test_configured_peers_are_asked_by_an_agent_that_knows_no_members(three: Cluster) -> None:
    """F13, F21: an operator asks an agent that never saw the job."""
    manifest = _protect(three, 1)
    flags = ("--deadline-s", "6", "--peers", three.nodes[2].address.grpc_address)
    outsider = Node("out", three.base / "out", flags)
    try:
        with grpc.insecure_channel(outsider.start().address.grpc_address) as channel:
            request = admin_pb2.RecoverRequest(job=three.ranks[0].job)
            plan = call(channel, "AdminService/Recover", request, types_pb2.Plan)
    finally:
        outsider.kill()
    assert version_from_pb(plan.container) == manifest.version
    # n2 told of the others.
    assert {node.identity.node_id for node in plan.nodes} == {"n0", "n1", "n2", "out"}
    # An observer changes nothing.
    assert not outsider.versions()


def test_an_old_incarnation_gets_no_plan(three: Cluster) -> None:
    """F11: also when only a peer knows that it was superseded."""
    _protect(three, 1)
    for rank in three.ranks[1:]:
        rank.join(2, three.nodes)
    with pytest.raises(StaleEpochError):
        three.ranks[0].lookup()


def test_a_replacement_on_the_same_port_with_another_name_does_not_answer_for_the_lost_node(own_three: Cluster) -> None:
    """F34, F45."""
    manifest = _protect(own_three, 1)
    lost = own_three.nodes[1]
    port = lost.port
    lost.kill()
    other = Node("n8", own_three.base / "n8", lost.flags)
    own_three.nodes.append(other)
    other.start("--port", str(port))
    plan = own_three.ranks[0].lookup()
    assert version_from_pb(plan.container) == manifest.version
    assert [who.node_id for who in plan.unanswered] == ["n1"]
    assert "found node n8" in plan.unanswered[0].reason
    assert "n8" in {node.identity.node_id for node in plan.nodes}


# -- retrieval


def _everything(manifest: Manifest, holders: dict[str, tuple[str, ...]]) -> list[ObjectSource]:
    return [
        ObjectSource(entry.name, entry.size, entry.crc32c, entry.owner_node_id, holders[entry.name])
        for entry in manifest.entries
    ]


def _flip(node: Node, version: ContainerVersion, name: str, at: int = 100) -> None:
    path = node.paths.object(version.object(name))
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_corrupt_local_copy_is_set_aside_and_pulled(three: Cluster) -> None:
    """F01, F08: the trainer asks for nothing but the object."""
    manifest = _protect(three, 1, b"x" * 10_000)
    _flip(three.nodes[0], manifest.version, "shard-0")
    quarantined = three.nodes[0].status().quarantined_objects
    plan = three.ranks[0].lookup()
    event = three.ranks[0].retrieve(manifest.version, sources_of(plan))["shard-0"]
    assert event.done
    assert not event.was_local
    assert event.source_node_id == "n1"
    assert three.nodes[0].held(manifest.version.object("shard-0")) is not None
    assert three.nodes[0].status().quarantined_objects == quarantined + 1


@pytest.mark.parametrize("size", [10_000, MIB])
def test_a_sound_local_copy_stays_when_somebody_asks_for_other_content(three: Cluster, size: int) -> None:
    """F01's kind: no node has such bytes, so the caller is wrong and not the copy."""
    manifest = _protect(three, 1, b"x" * size)
    quarantined = three.nodes[0].status().quarantined_objects
    source = dataclasses.replace(sources_of(three.ranks[0].lookup())[0], crc32c=1)
    event = three.ranks[0].retrieve(manifest.version, [source])[source.name]
    assert event.error_kind == "CorruptObjectError", event
    assert three.nodes[0].held(manifest.version.object(source.name)) is not None
    assert three.nodes[0].status().quarantined_objects == quarantined


def test_a_bad_block_at_one_source_comes_from_the_other(three: Cluster) -> None:
    """F01: only the bad block is brought again, and that source is asked last from then on."""
    manifest = _protect(three, 1, os.urandom(MIB) * 13)
    one = manifest.version.object("shard-0")
    content = three.nodes[0].bytes_of(one)
    _flip(three.nodes[0], manifest.version, "shard-0", 5 * MIB)
    source = _everything(manifest, {"shard-0": ("n0", "n1"), "shard-1": (), "shard-2": ()})[:1]
    bad = three.nodes[2].counter("bad_blocks_received")
    quarantined = three.nodes[0].counter("objects_quarantined")
    event = three.ranks[2].retrieve(manifest.version, source)["shard-0"]
    assert event.done, event
    assert three.nodes[2].bytes_of(one) == content
    assert three.nodes[2].counter("bad_blocks_received") == bad + 1
    # The source looked at its copy, found the same, and does not offer it any more; a good one may come in its place.
    wait_until(
        lambda: three.nodes[0].counter("objects_quarantined") == quarantined + 1,
        "the bad copy is set aside where it is",
    )


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_copy_that_cannot_be_opened_is_set_aside_where_it_is(three: Cluster, is_cut: bool) -> None:
    """F01: a file that was cut short, or whose trailer is damaged. A good copy comes in its place, perhaps in time."""
    manifest = _protect(three, 1, os.urandom(MIB))
    one = manifest.version.object("shard-0")
    content = three.nodes[0].bytes_of(one)
    with three.nodes[0].paths.object(one).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.truncate() if is_cut else file.write(b"?")
    source = _everything(manifest, {"shard-0": ("n0", "n1"), "shard-1": (), "shard-2": ()})[:1]
    quarantined = three.nodes[0].counter("objects_quarantined")
    event = three.ranks[2].retrieve(manifest.version, source)["shard-0"]
    assert event.done, event
    assert three.nodes[2].bytes_of(one) == content
    wait_until(
        lambda: three.nodes[0].counter("objects_quarantined") == quarantined + 1,
        "the bad copy is set aside where it is",
    )


def test_a_corrupt_copy_everywhere_is_an_error_with_each_reason_and_leaves_nothing(three: Cluster) -> None:
    """F01."""
    manifest = _protect(three, 1, b"x" * 10_000)
    for node in three.nodes[:2]:
        _flip(node, manifest.version, "shard-0")
    source = _everything(manifest, {"shard-0": ("n0", "n1"), "shard-1": (), "shard-2": ()})[:1]
    reserved = three.nodes[2].status().reserved_bytes  # by trainers of tests before this one
    event = three.ranks[2].retrieve(manifest.version, source)["shard-0"]
    assert event.error_kind == "CorruptObjectError"
    assert "n0" in event.error_message
    assert "n1" in event.error_message
    assert three.nodes[2].held(manifest.version.object("shard-0")) is None
    assert three.nodes[2].status().reserved_bytes <= reserved


def test_a_block_table_that_is_not_the_manifests_is_not_trusted(three: Cluster) -> None:
    manifest = _protect(three, 1, b"x" * 10_000)
    (source,) = _everything(manifest, {"shard-0": ("n0", "n1"), "shard-1": (), "shard-2": ()})[:1]
    event = three.ranks[2].retrieve(manifest.version, [dataclasses.replace(source, crc32c=source.crc32c ^ 1)])[
        "shard-0"
    ]
    assert event.error_kind == "CorruptObjectError"


def test_a_dead_source_is_passed_over(own_three: Cluster) -> None:
    manifest = _protect(own_three, 1, b"x" * 10_000)
    own_three.nodes[0].kill()
    source = _everything(manifest, {"shard-0": ("n0", "n1"), "shard-1": (), "shard-2": ()})[:1]
    event = own_three.ranks[2].retrieve(manifest.version, source, deadline_s=2.0)["shard-0"]
    assert event.done
    assert event.source_node_id == "n1"


def test_a_source_that_falls_silent_in_the_middle_is_replaced_by_the_next(own_three: Cluster) -> None:
    """F15, F47: progress deadline; the trainer hears something all the time."""
    manifest = _protect(own_three, 1, os.urandom(MIB) * 20)
    assert own_three.nodes[0].agent is not None
    # The connection is up and greeted when the source stops.
    first = _everything(manifest, {"shard-0": (), "shard-1": ("n1",), "shard-2": ()})[1:2]
    assert own_three.ranks[0].retrieve(manifest.version, first)["shard-1"].done
    own_three.nodes[0].agent.signal(signal.SIGSTOP)
    source = _everything(manifest, {"shard-0": ("n0", "n1"), "shard-1": (), "shard-2": ()})[:1]
    began = time.monotonic()
    event = own_three.ranks[2].retrieve(manifest.version, source, deadline_s=1.0)["shard-0"]
    assert event.done, event
    assert event.source_node_id == "n1"
    assert 0.8 < time.monotonic() - began < 6
    assert len(own_three.ranks[2].progress) > 1


def test_many_objects_come_at_once_and_each_one_is_told(three: Cluster) -> None:
    """F20: more than there are slots."""
    rank = three.ranks[0]
    version = rank.begin(1)
    infos = [rank.write(version.object(f"o{i:03}"), os.urandom(1000 + i)) for i in range(150)]
    sources = [ObjectSource(info.object.name, info.size, info.crc32c, "n0", ("n0",)) for info in infos]
    events = three.ranks[2].retrieve(version, sources)
    assert len(events) == 150
    assert all(event.done for event in events.values())
    assert all(three.nodes[2].held(info.object) is not None for info in infos)


def test_a_trainer_that_goes_away_stops_what_only_it_wanted(three: Cluster) -> None:
    """Nothing stays reserved."""
    manifest = _protect(three, 1, os.urandom(MIB) * 20)
    assert three.nodes[0].agent is not None
    three.nodes[0].agent.signal(signal.SIGSTOP)
    source = _everything(manifest, {"shard-0": ("n0",), "shard-1": (), "shard-2": ()})[:1]
    request = local_pb2.RetrieveRequest(
        client_id=three.ranks[2].client_id,
        epoch=1,
        container=version_to_pb(manifest.version),
        objects=[source_to_pb(one) for one in source],
        deadline_ms=60_000,
    )
    function = three.ranks[2].channel.unary_stream(
        "/replicator.v1.LocalService/Retrieve",
        request_serializer=local_pb2.RetrieveRequest.SerializeToString,
        response_deserializer=local_pb2.RetrieveEvent.FromString,
    )
    stream = function(request)
    three.nodes[0].agent.signal(signal.SIGCONT)
    stream.cancel()
    wait_until(lambda: three.nodes[2].status().reserved_bytes == 0, "nothing is reserved")


def test_an_object_is_read_through_any_agent(three: Cluster) -> None:
    """For `replicator-admin pull`: forwarded from a holder, verified on the way."""
    writer = three.ranks[0]
    one = writer.begin(1).object("a")
    content = os.urandom(4096) * 9000 + b"end"
    info = writer.write(one, content)
    source = ObjectSource("a", info.size, info.crc32c, "n0", ("n0",))
    request = admin_pb2.ReadObjectRequest(
        container=version_to_pb(one.version), object=source_to_pb(source), deadline_ms=5000
    )
    for node in (three.nodes[0], three.nodes[2]):
        with grpc.insecure_channel(node.address.grpc_address) as channel:
            read = channel.unary_stream(
                "/replicator.v1.AdminService/ReadObject",
                request_serializer=admin_pb2.ReadObjectRequest.SerializeToString,
            )
            pieces = list(read(request))
        assert all(len(piece) <= MIB for piece in pieces)
        assert b"".join(pieces) == content
    assert three.nodes[2].held(one) is None


def test_a_lookup_works_on_a_single_node(shm_root: Path) -> None:
    with cluster(shm_root, 1) as made:
        made.join()
        manifest = _protect(made, 1)
        plan = made.ranks[0].lookup()
        assert version_from_pb(plan.container) == manifest.version
