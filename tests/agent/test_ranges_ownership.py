"""Memory that the agent fills for a trainer: nobody else gets it before the agent has stopped writing into it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import grpc
import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, Rank

from replicator.decide.types import ObjectSource
from replicator.ids import ContainerVersion
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2
from replicator.wire import source_to_pb, version_to_pb


def _all_of(rank: Rank, version: ContainerVersion, info: ObjectInfo, holder: str) -> Any:
    """The call for every block of an object, under way."""
    source = ObjectSource(info.object.name, info.size, info.crc32c, holder, (holder,))
    request = local_pb2.RetrieveRangesRequest(
        client_id=rank.client_id,
        epoch=1,
        container=version_to_pb(version),
        object=source_to_pb(source),
        ranges=[local_pb2.ByteRange(offset_bytes=0, length_bytes=info.size)],
        deadline_ms=20_000,
    )
    function = rank.channel.unary_unary(
        "/replicator.v1.LocalService/RetrieveRanges",
        request_serializer=local_pb2.RetrieveRangesRequest.SerializeToString,
        response_deserializer=local_pb2.RetrieveRangesReply.FromString,
    )
    return function.future(request)


def test_scratch_of_a_trainer_that_died_is_not_handed_on_while_it_is_filled(own_three: Cluster) -> None:
    """Its connection stays open, as when a data loader that it forked lives on: so the pull goes on too."""
    size = 64 * MIB
    writer = own_three.ranks[0]
    one = writer.begin(1).object("a")
    info = writer.write(one, os.urandom(MIB) * 64)
    dead, other = own_three.ranks[2], Rank(own_three.nodes[2])
    holder = own_three.nodes[0].agent
    assert holder is not None
    try:
        call = _all_of(dead, one.version, info, "n0")
        wait_until(lambda: own_three.nodes[2].status().reserved_bytes > 0, "the pull has begun")
        holder.signal(signal.SIGSTOP)
        assert not call.done(), "the pull was too fast for this test"
        dead.lock.close()
        wait_until(lambda: own_three.nodes[2].status().reserved_bytes == 0, "the trainer is given up")
        other.job, other.epoch = dead.job, 1
        mapped = other.reserve(size)
        mapped.view[:] = bytes(len(mapped.view))
        holder.signal(signal.SIGCONT)
        time.sleep(2)
        assert not any(mapped.view), "another node's bytes came into this trainer's memory"
    finally:
        holder.signal(signal.SIGCONT)
        other.close()


def test_scratch_of_a_call_that_was_given_up_is_not_handed_out_while_it_is_filled(own_three: Cluster) -> None:
    """The copy of this node's own object is made in a thread, which a cancelled call does not end."""
    rank = own_three.ranks[0]
    size = 512 * MIB
    one = rank.begin(1).object("a")
    info = rank.write(one, os.urandom(MIB) * 512)
    call = _all_of(rank, one.version, info, "n0")
    wait_until(lambda: own_three.nodes[0].status().reserved_bytes >= size, "the copy has begun")
    call.cancel()
    with pytest.raises((grpc.FutureCancelledError, grpc.RpcError)):
        call.result()
    mapped = rank.reserve(size)
    tail = mapped.view[size - 64 * MIB : size]
    tail[:] = bytes(len(tail))
    time.sleep(2)
    assert tail == bytes(len(tail)), "the agent wrote into memory that was reserved for something else"
