"""Thousands of small objects back to a node that has none of them, from whoever has them right."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from agent_harness import wait_until
from cluster import Cluster, cluster
from test_small_objects import WAIT_S, check, manifest_of, mixed, outcomes, session, write

from replicator.errors import InvalidIdError, ReplicatorError, StaleEpochError, TransferError
from replicator.ids import CheckpointContainerId, ObjectVersion
from replicator.packs import MAX_CALL_OBJECTS
from replicator.rpc_errors import error_from_rpc
from replicator.rpc_options import channel_options
from replicator.store.trailer import ObjectInfo
from replicator.transfer.packed import decode_piece
from replicator.v1 import data_pb2
from replicator.wire import Sender, sender_to_pb, version_to_pb

Saved = tuple[Cluster, Mapping[ObjectVersion, ObjectInfo], list[bytes]]


def _save(made: Cluster, contents: list[bytes]) -> Mapping[ObjectVersion, ObjectInfo]:
    """A protected container on n0 and n1."""
    with session(made, 0) as trainer:
        version = trainer.begin(CheckpointContainerId(trainer.job, 1))
        infos = write(trainer, version, contents)
        assert set(outcomes(trainer.replication.async_replicate_many(list(infos))).values()) == {None}
        trainer.agent.commit(manifest_of(trainer, version, infos)).protected.result(WAIT_S)
    return infos


@pytest.fixture
def saved(three: Cluster) -> Saved:
    contents = mixed(300, seed=3)
    return three, _save(three, contents), contents


def test_hundreds_come_to_an_empty_node(three: Cluster) -> None:
    contents = mixed(800, seed=4)
    infos = _save(three, contents)
    with session(three, 2) as trainer:
        progress: dict[str, int] = {}
        plan = trainer.lookup()
        got = trainer.replication.sync_bulk_retrieve(plan, on_progress=progress.__setitem__)
        assert [one.object for one in got] == list(infos)
        assert not any(one.was_local for one in got)
        assert {one.source_node_id for one in got if infos[one.object].size} <= {"n0", "n1"}
        assert progress == {one.name: info.size for one, info in infos.items()}
        check(three.nodes[2], infos, contents)

        pulled = three.nodes[2].counter("bytes_pulled")
        assert all(one.was_local for one in trainer.replication.sync_bulk_retrieve(plan))
        assert three.nodes[2].counter("bytes_pulled") == pulled


def test_a_local_copy_that_is_bad_is_set_aside_and_brought_again(saved: Saved) -> None:
    """F01."""
    made, infos, contents = saved
    bad = max(infos, key=lambda one: infos[one].size)
    with session(made, 2) as trainer:
        plan = trainer.lookup()
        trainer.replication.sync_bulk_retrieve(plan)
        with made.nodes[2].paths.object(bad).open("r+b") as file:
            file.write(b"not that")
        got = trainer.replication.sync_bulk_retrieve(plan)
    assert [one.object for one in got if not one.was_local] == [bad]
    check(made.nodes[2], infos, contents)


def test_what_one_holder_has_wrong_or_not_at_all_comes_from_another(saved: Saved) -> None:
    """F01."""
    made, infos, contents = saved
    flipped, gone = [one for one, info in infos.items() if info.size > 5000][:2]
    with session(made, 2) as trainer:
        sources = {source.name: source for source in trainer.lookup().sources}
        for one in (flipped, gone):
            first = {node.node_id: node for node in made.nodes}[sources[one.name].node_ids[0]]
            if one is gone:
                first.paths.object(one).unlink()
            else:
                with first.paths.object(one).open("r+b") as file:
                    file.write(b"not that")
                holder, quarantined = first, first.counter("objects_quarantined")
        plan = trainer.lookup()
        trainer.replication.sync_bulk_retrieve(plan)
    check(made.nodes[2], infos, contents)
    wait_until(
        lambda: holder.counter("objects_quarantined") == quarantined + 1, "the bad copy is set aside where it is"
    )


def test_two_ranks_that_want_the_same_get_it_once(saved: Saved) -> None:
    """F20."""
    made, infos, contents = saved
    before = made.nodes[2].counter("objects_pulled")
    with session(made, 2) as first, session(made, 2) as second:
        plan = first.lookup()
        threads = [
            threading.Thread(target=trainer.replication.sync_bulk_retrieve, args=(plan,)) for trainer in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    check(made.nodes[2], infos, contents)
    assert made.nodes[2].counter("objects_pulled") - before == len(infos)


@pytest.fixture
def own_saved(shm_root: Path) -> Iterator[Saved]:
    with cluster(shm_root, 3) as made:
        made.join()
        contents = mixed(300, seed=5)
        yield made, _save(made, contents), contents


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_holder_that_hangs_or_is_gone_is_replaced_by_the_other(own_saved: Saved, number: int) -> None:
    """F15, F47."""
    made, infos, contents = own_saved
    assert made.nodes[0].agent is not None
    with session(made, 2) as trainer:
        plan = trainer.lookup()
        made.nodes[0].agent.signal(number)
        got = trainer.replication.sync_bulk_retrieve(plan, deadline_s=2.0)
    assert {one.source_node_id for one in got if infos[one.object].size} == {"n1"}
    check(made.nodes[2], infos, contents)


# -- the source, spoken to directly


def _read(made: Cluster, infos: Mapping[ObjectVersion, ObjectInfo], names: list[str], epoch: int = 1) -> list[bytes]:
    owner = made.nodes[0]
    request = data_pb2.ReadPackedRequest(
        sender=sender_to_pb(Sender(owner.address.identity, made.ranks[0].job, epoch)),
        container=version_to_pb(next(iter(infos)).version),
        names=names,
    )
    with grpc.insecure_channel(owner.address.grpc_address, options=channel_options()) as channel:
        method = channel.unary_stream(
            "/replicator.v1.DataService/ReadPacked",
            request_serializer=data_pb2.ReadPackedRequest.SerializeToString,
            response_deserializer=None,
        )
        try:
            return list(method(request))
        except grpc.RpcError as error:
            raise error_from_rpc(error, "packed objects", "n0", 1.0) from None


def test_names_that_nobody_has_are_absent_and_paths_are_no_names(saved: Saved) -> None:
    """F38."""
    made, infos, contents = saved
    known = next(iter(infos)).name
    (message,) = _read(made, infos, ["unknown", known])
    assert [None if one is None else bytes(one) for one in decode_piece(message)] == [None, contents[0]]
    for path in ("../../../../store.json", "/etc/passwd"):
        with pytest.raises(InvalidIdError, match="object name"):
            _read(made, infos, [known, path])


def test_a_call_has_bounds_and_an_epoch(saved: Saved) -> None:
    """F11, F20."""
    made, infos, _ = saved
    largest = max(infos, key=lambda one: infos[one].size)
    with pytest.raises(InvalidIdError, match="names"):
        _read(made, infos, ["unknown"] * (MAX_CALL_OBJECTS + 1))
    with pytest.raises(InvalidIdError, match="names"):
        _read(made, infos, [])
    with pytest.raises(InvalidIdError, match="bytes"):
        _read(made, infos, [largest.name] * 33)
    made.join(2)
    with pytest.raises(StaleEpochError):
        _read(made, infos, [largest.name], epoch=1)


def test_an_object_that_no_node_gives_is_named_and_the_others_come(saved: Saved) -> None:
    made, infos, contents = saved
    lost = next(one for one, info in infos.items() if info.size > 5000)
    with session(made, 2) as trainer:
        plan = trainer.lookup()
        for node in made.nodes[:2]:
            node.paths.object(lost).unlink()
        with pytest.raises(TransferError, match=lost.name):
            trainer.replication.sync_bulk_retrieve(plan)
    position = list(infos).index(lost)
    rest = {one: info for one, info in infos.items() if one != lost}
    check(made.nodes[2], rest, contents[:position] + contents[position + 1 :])


def test_who_retrieves_is_told_at_once_when_a_local_copy_cannot_be_looked_at(saved: Saved) -> None:
    """As when the agent has no descriptor left: here the name leads nowhere."""
    made, infos, contents = saved
    odd = next(one for one, info in infos.items() if info.size > 5000)
    with session(made, 2) as trainer:
        plan = trainer.lookup()
        trainer.replication.sync_bulk_retrieve(plan)
        path = made.nodes[2].paths.object(odd)
        path.unlink()
        path.symlink_to(path)
        started = time.monotonic()
        with pytest.raises(ReplicatorError, match="symbolic links"):
            trainer.replication.sync_bulk_retrieve(plan)
        assert time.monotonic() - started < 5
        path.unlink()
        trainer.replication.sync_bulk_retrieve(plan)
    check(made.nodes[2], infos, contents)
