"""How a pull goes on over its sources: whatever is wrong where, it ends right or with every reason."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_support import BLOCK, LANES, Peer, Relay, flip_bit, policy_for, some_bytes

from replicator.errors import (
    CorruptObjectError,
    DeadlineExceededError,
    ObjectNotFoundError,
    PeerUnavailableError,
    TransferError,
)
from replicator.transfer.lane import Lane, Source
from replicator.transfer.pull import PullSource, _runs, pull
from replicator.transfer.turns import PullPolicy

Lanes = dict[str, Lane]
MakePeer = Callable[[str], Awaitable[Peer]]


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_blocks(blocks: set[int]) -> None:
    runs = _runs(blocks)
    assert [block for first, last in runs for block in range(first, last + 1)] == sorted(blocks)
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(runs))


@pytest.mark.parametrize("seed", range(12))
async def test_any_damage_anywhere(lanes: Lanes, make_peer: MakePeer, seed: int) -> None:
    """Seeded: objects of random size, of which random blocks are bad or which are missing at three random sources.

    The bytes are right if every asked block is good somewhere, else CorruptObjectError; a bad block is never
    asked from the same source twice.
    """
    dice = random.Random(seed)
    peers = [await make_peer(f"node-{number}") for number in range(3)]
    data = some_bytes(dice.randrange(1, 12 * BLOCK), seed)
    count = -(-len(data) // BLOCK)
    bad: dict[str, set[int]] = {}
    absent: set[str] = set()
    for peer in peers:
        info = peer.add("object", data)
        bad[peer.node_id] = {block for block in range(count) if dice.random() < 0.4}
        for block in bad[peer.node_id]:
            flip_bit(peer.path(info), min(block * BLOCK + dice.randrange(BLOCK), len(data) - 1))
        if dice.random() < 0.3:
            absent.add(peer.node_id)
            peer.path(info).unlink()
    wanted = sorted(dice.sample(range(count), dice.randrange(1, count + 1)))
    good = all(any(b not in bad[p.node_id] for p in peers if p.node_id not in absent) for b in wanted)
    expected = b"".join(data[block * BLOCK : (block + 1) * BLOCK] for block in wanted)
    target = bytearray(len(expected))
    progress: list[int] = []
    pulling = pull(
        info,
        [peer.pull_source(info) for peer in peers],
        memoryview(target),
        lanes=lanes,
        policy=policy_for(dice.choice(LANES)),
        blocks=wanted,
        on_progress=progress.append,
    )
    if not good:
        with pytest.raises((CorruptObjectError, TransferError)):
            await pulling
        return
    report = await pulling
    assert target == expected
    assert progress == sorted(progress)
    assert progress[-1] == len(expected)
    assert len(set(report.bad_blocks)) == len(report.bad_blocks)
    assert all(block in bad[node_id] for node_id, block in report.bad_blocks)
    assert sum(part.blocks for part in report.parts) == len(wanted)


async def test_every_reason_is_told(lanes: Lanes, make_peer: MakePeer) -> None:
    data = some_bytes(2 * BLOCK)
    first, second, third = [await make_peer(f"node-{number}") for number in range(3)]
    info = first.add("object", data)
    flip_bit(first.path(info), 5)
    await third.stop()

    async def unreachable() -> Source:
        raise PeerUnavailableError("nobody answers at 10.0.0.9:1")

    sources = [
        first.pull_source(info),
        second.pull_source(info),
        third.pull_source(info),
        PullSource("node-9", unreachable),
    ]
    with pytest.raises(TransferError) as caught:
        await pull(info, sources, memoryview(bytearray(len(data))), lanes=lanes, policy=policy_for("auto"))
    text = str(caught.value)
    assert "job/step-7_ckpt@1.0/object could not be pulled from any of 4 sources, 1 of 2 blocks are missing" in text
    assert "node-0: its blocks 0 do not match" in text
    assert "node-1: " in text
    assert "does not hold" in text
    assert "node-2: " in text
    assert "cannot be reached" in text
    assert "node-9: nobody answers" in text


async def test_a_source_whose_opening_hangs(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", some_bytes(10))

    async def hangs() -> Source:
        await asyncio.Event().wait()
        raise AssertionError

    target = bytearray(10)
    report = await pull(
        info,
        [PullSource("hung", hangs), peer.pull_source(info)],
        memoryview(target),
        lanes=lanes,
        policy=policy_for("auto", 0.3),
    )
    assert target == some_bytes(10)
    assert report.failures == (
        (
            "hung",
            str(DeadlineExceededError.of("an open object", "node hung", 0.3)),
        ),
    )


async def test_an_empty_object_needs_no_source(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("empty", b"")
    report = await pull(info, [], memoryview(bytearray()), lanes=lanes, policy=PullPolicy())
    assert report.parts == ()
    assert report.main_part is None


async def test_a_connection_that_breaks_is_made_again(lanes: Lanes, make_peer: MakePeer) -> None:
    """The pull goes on at the same source with what is missing, but for the block that was bad there (F01)."""
    data = some_bytes(1 << 20) * 32
    peer, other = await make_peer("node-a"), await make_peer("node-b")
    info = peer.add("object", data)
    other.add("object", data)
    flip_bit(peer.path(info), BLOCK)
    opened: list[Relay] = []

    async def open_it() -> Source:
        source = peer.source(info.object)
        if opened:
            return source
        relay = Relay(source.bulk_address, act_after=4 << 20, act=lambda: relay.hang_up())
        opened.append(relay)
        return relay.in_front_of(source, "bulk")

    target = bytearray(len(data))
    try:
        report = await pull(
            info,
            [PullSource("node-a", open_it), other.pull_source(info)],
            memoryview(target),
            lanes=lanes,
            policy=policy_for("bulk"),
        )
    finally:
        opened[0].close()
    assert target == data
    assert [node_id for node_id, _ in report.failures] == ["node-a"]
    assert report.bad_blocks == (("node-a", 1),)
    assert [part.node_id for part in report.parts] == ["node-a", "node-a", "node-b"]
    assert report.parts[-1].blocks == 1
    assert all(part.blocks for part in report.parts)


async def test_what_is_no_error_of_ours_is_not_hidden(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", some_bytes(10))

    async def broken() -> Source:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await pull(info, [PullSource("x", broken)], memoryview(bytearray(10)), lanes=lanes, policy=PullPolicy())


async def test_a_lane_that_is_not_there(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", some_bytes(10))
    with pytest.raises(TransferError, match="this node has no grpc lane; it has bulk"):
        await pull(
            info,
            [peer.pull_source(info)],
            memoryview(bytearray(10)),
            lanes={"bulk": lanes["bulk"]},
            policy=policy_for("grpc"),
        )


async def test_object_not_found_is_not_asked_again(lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", some_bytes(10))
    asked = 0

    async def open_it() -> Source:
        nonlocal asked
        asked += 1
        raise ObjectNotFoundError("not here")

    with pytest.raises(TransferError, match="node-a: not here"):
        await pull(info, [PullSource("node-a", open_it)], memoryview(bytearray(10)), lanes=lanes, policy=PullPolicy())
    assert asked == 1


async def test_these_tests_run_on_the_loop_of_the_agent() -> None:
    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
