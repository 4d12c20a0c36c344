"""Scratch memory that the agent fills for a trainer: whose it is, and that nobody else gets it before."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, Rank, stream

from replicator.checksum import BLOCK_SIZE
from replicator.decide.types import ObjectSource
from replicator.errors import InvalidIdError, SegmentError, StoreError, UnsupportedError
from replicator.ids import ObjectVersion
from replicator.native import block_crcs
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2
from replicator.wire import source_to_pb, version_to_pb


def _request(
    rank: Rank,
    info: ObjectInfo,
    segment: str,
    blocks: Sequence[int],
    *,
    holder: str = "n0",
    block_size: int = BLOCK_SIZE,
    whole: bool = False,
) -> local_pb2.RetrieveWindowRequest:
    one = info.object
    return local_pb2.RetrieveWindowRequest(
        client_id=rank.client_id,
        epoch=1,
        container=version_to_pb(one.version),
        object=source_to_pb(ObjectSource(one.name, info.size, info.crc32c, holder, (holder,))),
        segment=segment,
        block_size_bytes=block_size,
        blocks=blocks,
        with_table=True,
        whole=whole,
        deadline_ms=20_000,
    )


def _last(rank: Rank, request: local_pb2.RetrieveWindowRequest) -> local_pb2.WindowEvent:
    return list(stream(rank.channel, "LocalService/RetrieveWindow", request, local_pb2.WindowEvent))[-1]


def _call(rank: Rank, request: local_pb2.RetrieveWindowRequest) -> Any:
    """The call, under way: its first event has come."""
    function = rank.channel.unary_stream(
        "/replicator.v1.LocalService/RetrieveWindow",
        request_serializer=local_pb2.RetrieveWindowRequest.SerializeToString,
        response_deserializer=local_pb2.WindowEvent.FromString,
    )
    call = function(request)
    assert not next(call).done, "the pull was too fast for this test"
    return call


def _write(made: Cluster, size: int) -> tuple[ObjectVersion, ObjectInfo, bytes]:
    """An object that only n0 holds."""
    data = os.urandom(MIB) * (size // MIB) + b"end"
    one = made.ranks[0].begin(1).object("a")
    return one, made.ranks[0].write(one, data), data


def test_a_window_holds_the_blocks_that_were_asked_for(three: Cluster) -> None:
    """F44: those, one after the other, and the checksums of all."""
    _, info, data = _write(three, 17 * MIB)
    rank = three.ranks[2]
    mapped = rank.reserve(8 * MIB)
    last = _last(rank, _request(rank, info, mapped.name, [1, 4]))
    assert (last.done, last.source_node_id) == (True, "n0")
    assert list(last.block_crc32c) == block_crcs(data)
    wanted = data[4 * MIB : 8 * MIB] + data[16 * MIB :]
    assert last.bytes_done == len(wanted)
    assert mapped.view[: len(wanted)] == wanted


def test_a_window_of_what_is_in_the_store_is_not_brought(three: Cluster) -> None:
    _, info, _ = _write(three, 5 * MIB)
    rank = three.ranks[0]
    mapped = rank.reserve(8 * MIB)
    assert _last(rank, _request(rank, info, mapped.name, [0])).in_store


def test_windows_that_are_refused(three: Cluster) -> None:
    _, info, _ = _write(three, 17 * MIB)
    rank, other = three.ranks[2], three.ranks[1]
    mapped, theirs = rank.reserve(8 * MIB), other.reserve(8 * MIB)
    for segment, blocks, block_size, error in (
        (theirs.name, [0], BLOCK_SIZE, SegmentError),
        ("../../x", [0], BLOCK_SIZE, StoreError),
        (mapped.name, [0, 1, 2], BLOCK_SIZE, SegmentError),
        (mapped.name, [1, 0], BLOCK_SIZE, InvalidIdError),
        (mapped.name, [0, 0], BLOCK_SIZE, InvalidIdError),
        (mapped.name, [5], BLOCK_SIZE, InvalidIdError),
        (mapped.name, [], BLOCK_SIZE, InvalidIdError),
        (mapped.name, [0], 0, InvalidIdError),
        (mapped.name, [0], BLOCK_SIZE // 2, UnsupportedError),
    ):
        with pytest.raises(error):
            _last(rank, _request(rank, info, segment, blocks, block_size=block_size))
    assert _last(rank, _request(rank, info, mapped.name, [0, 1])).done


def test_scratch_of_a_trainer_that_died_is_not_handed_on_while_it_is_filled(own_three: Cluster) -> None:
    """Its connection stays open, as when a data loader that it forked lives on: so the pull goes on too."""
    size = 64 * MIB
    _, info, _ = _write(own_three, size)
    dead, other = own_three.ranks[2], Rank(own_three.nodes[2])
    holder = own_three.nodes[0].agent
    assert holder is not None
    try:
        segment = dead.reserve(size).name
        assert _last(dead, _request(dead, info, segment, [0])).done  # so that the holder is known
        holder.signal(signal.SIGSTOP)
        call = _call(dead, _request(dead, info, segment, range(size // BLOCK_SIZE)))
        dead.lock.close()
        wait_until(lambda: own_three.nodes[2].status().reserved_bytes == 0, "the trainer is given up")
        other.job, other.epoch = dead.job, 1
        mapped = other.reserve(size)
        mapped.view[:] = bytes(len(mapped.view))
        holder.signal(signal.SIGCONT)
        with contextlib.suppress(grpc.RpcError):
            assert list(call)[-1].done, "nothing is filled any more"
        assert not any(mapped.view), "another node's bytes came into this trainer's memory"
    finally:
        holder.signal(signal.SIGCONT)
        other.close()


def test_scratch_of_a_call_that_was_given_up_is_not_handed_out_while_it_is_filled(own_three: Cluster) -> None:
    """Nor is it filled for two calls at a time."""
    rank, size = own_three.ranks[2], 64 * MIB
    _, info, _ = _write(own_three, size)
    holder = own_three.nodes[0].agent
    assert holder is not None
    segment = rank.reserve(size).name
    request = _request(rank, info, segment, range(size // BLOCK_SIZE))
    assert _last(rank, _request(rank, info, segment, [0])).done
    try:
        holder.signal(signal.SIGSTOP)
        call = _call(rank, request)
        with pytest.raises(SegmentError, match="being filled"):
            _last(rank, request)
        call.cancel()
        rank.call(
            "Release", local_pb2.ReleaseRequest(client_id=rank.client_id, segment=segment), local_pb2.ReleaseReply
        )
        mapped = rank.reserve(size)
        mapped.view[:] = bytes(len(mapped.view))
        holder.signal(signal.SIGCONT)
        # By now the holder has sent all that it was asked for before.
        again = rank.reserve(size)
        assert _last(rank, _request(rank, info, again.name, range(size // BLOCK_SIZE))).done
        assert any(again.view)
        assert not any(mapped.view), "the agent wrote into memory that was reserved for something else"
        with pytest.raises((grpc.FutureCancelledError, grpc.RpcError)):
            next(call)
    finally:
        holder.signal(signal.SIGCONT)
