"""What every lane must do. Each test runs against both."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from transfer_support import (
    BLOCK,
    LANES,
    VERSION,
    Mute,
    Peer,
    PeerProcess,
    Relay,
    eventually,
    fetch,
    flip_bit,
    open_lanes,
    place,
    policy_for,
    some_bytes,
)

from replicator.checksum import BLOCK_SIZE, block_count
from replicator.errors import (
    CorruptObjectError,
    ObjectNotFoundError,
    PeerUnavailableError,
    TransferError,
    TransferStalledError,
)
from replicator.native import crc32c, crc32c_combine
from replicator.store.trailer import ObjectInfo
from replicator.transfer.lane import Lane, Source
from replicator.transfer.pull import PullSource, pull

Lanes = dict[str, Lane]
MakePeer = Callable[[str], Awaitable[Peer]]
MakeProcess = Callable[[str], PeerProcess]

pytestmark = pytest.mark.parametrize("lane", LANES)
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 40 * BLOCK + 17]


@pytest.mark.parametrize("size", SIZES)
async def test_whole_object(lane: str, lanes: Lanes, peer: Peer, size: int) -> None:
    data = some_bytes(size)
    info = peer.add("whole", data)
    target = bytearray(b"\xa5" * (size + 2))
    progress: list[int] = []
    report = await pull(
        info,
        [peer.pull_source(info)],
        memoryview(target)[1:-1],
        lanes=lanes,
        policy=policy_for(lane),
        on_progress=progress.append,
    )
    assert target == b"\xa5" + data + b"\xa5"
    assert report.size == size
    assert (report.bad_blocks, report.failures) == ((), ())
    assert [(part.node_id, part.lane, part.size) for part in report.parts] == ([("node-a", lane, size)] if size else [])
    assert progress == sorted(progress)
    assert not size or progress[-1] == size


async def test_large_object_over_several_connections(lane: str, lanes: Lanes, peer: Peer) -> None:
    """Blocks of the usual size; a range that the bulk lane stripes."""
    data = some_bytes(1 << 20) * 29 + b"end"
    info = peer.add("large", data, BLOCK_SIZE)
    target = bytearray(len(data))
    report = await pull(info, [peer.pull_source(info)], memoryview(target), lanes=lanes, policy=policy_for(lane))
    assert target == data
    assert report.main_part is not None
    assert report.main_part.blocks == block_count(len(data))
    assert len(peer.asked) == (2 if lane == "bulk" else 1)


@pytest.mark.parametrize("blocks", [[0], [4], [1, 2, 3], [0, 2, 4], [0, 1, 2, 3, 4], []])
async def test_some_blocks_packed(lane: str, lanes: Lanes, peer: Peer, blocks: list[int]) -> None:
    data = some_bytes(4 * BLOCK + 100)
    info = peer.add("blocks", data)
    expected = b"".join(data[block * BLOCK : (block + 1) * BLOCK] for block in blocks)
    target = bytearray(len(expected))
    report = await pull(
        info, [peer.pull_source(info)], memoryview(target), lanes=lanes, policy=policy_for(lane), blocks=blocks
    )
    assert target == expected
    assert report.size == len(expected)


@pytest.mark.parametrize("blocks", [[1, 0], [0, 0], [-1], [2]])
async def test_impossible_blocks(lane: str, lanes: Lanes, peer: Peer, blocks: list[int]) -> None:
    info = peer.add("two", some_bytes(2 * BLOCK))
    with pytest.raises(ValueError, match="block"):
        await pull(
            info,
            [peer.pull_source(info)],
            memoryview(bytearray(len(blocks) * BLOCK)),
            lanes=lanes,
            policy=policy_for(lane),
            blocks=blocks,
        )
    assert peer.asked == []


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK + 1])
async def test_target_of_another_size(lane: str, lanes: Lanes, peer: Peer, size: int) -> None:
    info = peer.add("one", some_bytes(BLOCK))
    with pytest.raises(ValueError, match="expected a writable target of 65536 bytes"):
        await pull(info, [peer.pull_source(info)], memoryview(bytearray(size)), lanes=lanes, policy=policy_for(lane))


async def test_offsets_beyond_4_gib(lane: str, lanes: Lanes, peer: Peer) -> None:
    """F29: a sparse object of more than 4 GiB, with bytes that are not zero on both sides of the boundary."""
    end = some_bytes(BLOCK_SIZE + 5)
    whole_blocks = 1024
    size = whole_blocks * BLOCK_SIZE + len(end)
    zeros = crc32c(bytes(BLOCK_SIZE))
    before = some_bytes(BLOCK_SIZE, seed=1)
    crcs = (*[zeros] * (whole_blocks - 1), crc32c(before), crc32c(end[:BLOCK_SIZE]), crc32c(end[BLOCK_SIZE:]))
    whole = 0
    for number, crc in enumerate(crcs):
        whole = crc32c_combine(whole, crc, min(BLOCK_SIZE, size - number * BLOCK_SIZE))
    info = ObjectInfo(VERSION.object("sparse"), size, whole, BLOCK_SIZE, crcs, "owner", "c0ffee")
    path = place(peer.paths, info, b"")
    with path.open("r+b") as file:
        file.seek((whole_blocks - 1) * BLOCK_SIZE)
        file.write(before + end)
    blocks = [0, 1023, 1024, 1025]
    target = bytearray(3 * BLOCK_SIZE + 5)
    await pull(info, [peer.pull_source(info)], memoryview(target), lanes=lanes, policy=policy_for(lane), blocks=blocks)
    assert target[:BLOCK_SIZE] == bytes(BLOCK_SIZE)
    assert target[BLOCK_SIZE:] == before + end


async def test_killed_in_the_middle_and_gone_on_elsewhere(
    lane: str, lanes: Lanes, make_process: MakeProcess, peer: Peer
) -> None:
    """SIGKILL of the serving process; the next source is asked only for the blocks that are still missing."""
    data = some_bytes(1 << 20) * 48
    info = peer.add("object", data)
    doomed = make_process("doomed")
    doomed.add("object", data)
    await doomed.start()
    opened: Source = await doomed.source(info.object)
    address = opened.bulk_address if lane == "bulk" else opened.node.grpc_address
    with Relay(address, act_after=8 << 20, act=lambda: doomed.signal(signal.SIGKILL)) as relay:

        async def open_it() -> Source:
            return relay.in_front_of(opened, lane)

        target = bytearray(len(data))
        report = await pull(
            info,
            [PullSource("doomed", open_it), peer.pull_source(info)],
            memoryview(target),
            lanes=lanes,
            policy=policy_for(lane),
        )
    assert target == data
    first, second = report.parts[0], report.parts[-1]
    assert (first.node_id, second.node_id) == ("doomed", "node-a")
    assert 0 < first.blocks < block_count(len(data), BLOCK)
    assert sum(part.blocks for part in report.parts) == block_count(len(data), BLOCK)
    assert [node_id for node_id, _ in report.failures] == ["doomed"]


async def test_mute_peer(lane: str, lanes: Lanes, peer: Peer) -> None:
    """Accepts the connection and never answers: a typed error within the deadline, naming whom and how long."""
    info = peer.add("object", some_bytes(100))
    with Mute() as mute:
        begin = time.monotonic()
        with pytest.raises(TransferStalledError, match=r"mute.*0\.5 s"):
            await pull(
                info, [mute.pull_source()], memoryview(bytearray(100)), lanes=lanes, policy=policy_for(lane, 0.5)
            )
        assert time.monotonic() - begin < 5
        target = bytearray(100)
        report = await pull(
            info,
            [mute.pull_source(), peer.pull_source(info)],
            memoryview(target),
            lanes=lanes,
            policy=policy_for(lane, 0.5),
        )
    assert target == some_bytes(100)
    assert [node_id for node_id, _ in report.failures] == ["mute"]


async def test_peer_that_stops_in_the_middle(lane: str, lanes: Lanes, make_process: MakeProcess, peer: Peer) -> None:
    """SIGSTOP: the connection stays open, and nothing more comes over it."""
    data = some_bytes(1 << 20) * 48
    info = peer.add("object", data)
    frozen = make_process("frozen")
    frozen.add("object", data)
    await frozen.start()
    opened = await frozen.source(info.object)
    address = opened.bulk_address if lane == "bulk" else opened.node.grpc_address
    with Relay(address, act_after=8 << 20, act=lambda: frozen.signal(signal.SIGSTOP)) as relay:

        async def open_it() -> Source:
            return relay.in_front_of(opened, lane)

        sources = [PullSource("frozen", open_it)]
        with pytest.raises(TransferStalledError, match=r"frozen.*0\.5 s, after [0-9]+ of"):
            await pull(info, sources, memoryview(bytearray(len(data))), lanes=lanes, policy=policy_for(lane, 0.5))
        target = bytearray(len(data))
        await pull(
            info,
            [*sources, peer.pull_source(info)],
            memoryview(target),
            lanes=lanes,
            policy=policy_for(lane, 1.5),
        )
    assert target == data
    frozen.signal(signal.SIGCONT)


async def test_flipped_bit_at_one_source(lane: str, lanes: Lanes, make_peer: MakePeer) -> None:
    """F01: the bad block comes from the next source, is reported, and is not asked from the bad source again."""
    data = some_bytes(5 * BLOCK + 9)
    first, second = await make_peer("node-a"), await make_peer("node-b")
    info = first.add("object", data)
    second.add("object", data)
    flip_bit(first.path(info), 2 * BLOCK + 1234)
    flip_bit(first.path(info), 5 * BLOCK + 8)
    target = bytearray(len(data))
    report = await pull(
        info,
        [first.pull_source(info), second.pull_source(info)],
        memoryview(target),
        lanes=lanes,
        policy=policy_for(lane),
    )
    assert target == data
    assert sorted(report.bad_blocks) == [("node-a", 2), ("node-a", 5)]
    assert [(part.node_id, part.blocks) for part in report.parts] == [("node-a", 4), ("node-b", 2)]
    assert len(first.asked) == 1


async def test_the_same_block_is_bad_everywhere(lane: str, lanes: Lanes, make_peer: MakePeer) -> None:
    """Each bad block is told as it is found, so that who gave it is known although the pull fails."""
    data = some_bytes(3 * BLOCK)
    peers = [await make_peer("node-a"), await make_peer("node-b")]
    for one in peers:
        info = one.add("object", data)
        flip_bit(one.path(info), BLOCK)
    told: list[tuple[str, int]] = []
    with pytest.raises(CorruptObjectError, match=r"node-a: its blocks 1 do not.*node-b: its blocks 1 do not"):
        await pull(
            info,
            [one.pull_source(info) for one in peers],
            memoryview(bytearray(len(data))),
            lanes=lanes,
            policy=policy_for(lane),
            on_bad_block=lambda node_id, block: told.append((node_id, block)),
        )
    assert told == [("node-a", 1), ("node-b", 1)]


async def test_a_cut_file_is_an_error_and_not_zeros(lane: str, lanes: Lanes, peer: Peer) -> None:
    """The payload is there, and the file shrinks while it is open for serving."""
    data = some_bytes(1 << 20) * 4
    info = peer.add("object", data)
    peer.on_open = lambda one: os.truncate(peer.path(info), BLOCK)
    with pytest.raises((TransferError, CorruptObjectError), match="node-a"):
        await pull(
            info, [peer.pull_source(info)], memoryview(bytearray(len(data))), lanes=lanes, policy=policy_for(lane)
        )


async def test_object_that_is_not_there(lane: str, lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", some_bytes(10))
    peer.path(info).unlink()
    source = peer.source(info.object)
    with pytest.raises(ObjectNotFoundError, match="node-a"):
        await fetch(lanes[lane], source, info)
    with pytest.raises(TransferError, match=r"node-a: .*does not hold"):
        await pull(info, [peer.pull_source(info)], memoryview(bytearray(10)), lanes=lanes, policy=policy_for(lane))


async def test_nobody_listens(lane: str, lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", some_bytes(10))
    source = peer.source(info.object)
    await peer.stop()
    with pytest.raises(PeerUnavailableError, match="node-a"):
        await fetch(lanes[lane], source, info)


async def test_no_source(lane: str, lanes: Lanes, peer: Peer) -> None:
    info = peer.add("object", some_bytes(10))
    with pytest.raises(TransferError, match="from any of 0 sources, 1 of 1 blocks are missing: there is none"):
        await pull(info, [], memoryview(bytearray(10)), lanes=lanes, policy=policy_for(lane))


async def test_cancelled_pull_stops_and_frees_its_threads(lane: str, peer: Peer) -> None:
    """With two threads in all, two pulls from a mute peer take both; cancelled, they leave them to the next pull."""
    data = some_bytes(3 * BLOCK)
    info = peer.add("object", data)
    async with open_lanes(max_threads=2) as lanes:
        with Mute() as mute:
            pulls = [
                asyncio.ensure_future(
                    pull(
                        info,
                        [mute.pull_source(f"mute-{number}")],
                        memoryview(bytearray(len(data))),
                        lanes=lanes,
                        policy=policy_for(lane, 60.0),
                    )
                )
                for number in range(2)
            ]
            await asyncio.sleep(0.1)
            begin = time.monotonic()
            for one in pulls:
                one.cancel()
            await asyncio.wait(pulls, timeout=5)
            assert all(one.cancelled() for one in pulls)
            target = bytearray(len(data))
            await pull(info, [peer.pull_source(info)], memoryview(target), lanes=lanes, policy=policy_for(lane))
            assert time.monotonic() - begin < 5
    assert target == data


async def test_nothing_is_written_after_a_cancellation(lane: str, lanes: Lanes, peer: Peer) -> None:
    """The memory may be given to somebody else at once, though bytes are still on their way."""
    data = b"\xff" * (8 << 20)
    info = peer.add("object", data)
    opened = peer.source(info.object)
    address = opened.bulk_address if lane == "bulk" else opened.node.grpc_address
    with Relay(address, pause_s=0.005, piece=16 << 10) as relay:

        async def open_it() -> Source:
            return relay.in_front_of(opened, lane)

        target = bytearray(len(data))
        started = asyncio.Event()
        one = asyncio.ensure_future(
            pull(
                info,
                [PullSource("node-a", open_it)],
                memoryview(target),
                lanes=lanes,
                policy=policy_for(lane),
                on_progress=lambda done: started.set(),
            )
        )
        await asyncio.wait_for(started.wait(), 10)
        one.cancel()
        await asyncio.wait([one], timeout=5)
        assert one.cancelled()
        target[:] = bytes(len(data))
        passed = relay.passed
        await asyncio.to_thread(eventually, lambda: relay.passed > passed + (64 << 10), 0.5)
        assert not any(target)


async def test_killed_and_back_on_the_same_port(lane: str, lanes: Lanes, make_process: MakeProcess) -> None:
    """F45: connections to the dead process are not used again; the next pull reaches the new one."""
    data = some_bytes(3 * BLOCK)
    process = make_process("phoenix")
    info = process.add("object", data)
    for _ in range(3):
        await process.start()
        for _ in range(2):
            target = bytearray(len(data))
            report = await pull(
                info, [process.pull_source(info)], memoryview(target), lanes=lanes, policy=policy_for(lane)
            )
            assert target == data
            assert report.failures == ()
        await process.kill()


async def test_deadline_is_for_progress_and_not_for_the_whole(lane: str, lanes: Lanes, peer: Peer) -> None:
    """F47: a transfer that takes several times the deadline succeeds as long as bytes keep coming."""
    data = some_bytes(1 << 20) * 8
    info = peer.add("object", data)
    opened = peer.source(info.object)
    deadline_s = 0.5
    address = opened.bulk_address if lane == "bulk" else opened.node.grpc_address
    with Relay(address, pause_s=deadline_s / 10, piece=4 * BLOCK) as relay:

        async def open_it() -> Source:
            return relay.in_front_of(opened, lane)

        target = bytearray(len(data))
        progress: list[int] = []
        begin = time.monotonic()
        report = await pull(
            info,
            [PullSource("node-a", open_it)],
            memoryview(target),
            lanes=lanes,
            policy=policy_for(lane, deadline_s),
            on_progress=progress.append,
        )
        assert time.monotonic() - begin > 2 * deadline_s
    assert target == data
    assert report.failures == ()
    assert len(progress) > 3, "nobody was told of the progress in between"


async def test_a_busy_python_thread_does_not_stop_the_lane(lane: str, lanes: Lanes, make_process: MakeProcess) -> None:
    data = some_bytes(1 << 20) * 64
    process = make_process("server")
    info = process.add("object", data, BLOCK_SIZE)
    await process.start()
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        target = bytearray(len(data))
        async with asyncio.timeout(30):
            await pull(info, [process.pull_source(info)], memoryview(target), lanes=lanes, policy=policy_for(lane))
    finally:
        stop.set()
        thread.join()
    assert target == data


async def test_many_small_objects_at_once(lane: str, lanes: Lanes, peer: Peer, shm_root: Path) -> None:
    """More pulls at a time than there are connections, threads or slots: each one gets its turn."""
    infos = [peer.add(f"small-{number}", some_bytes(number, seed=number)) for number in range(1, 100)]
    targets = [bytearray(info.size) for info in infos]
    await asyncio.gather(
        *(
            pull(info, [peer.pull_source(info)], memoryview(target), lanes=lanes, policy=policy_for(lane))
            for info, target in zip(infos, targets, strict=True)
        )
    )
    assert [bytes(target) for target in targets] == [some_bytes(n, seed=n) for n in range(1, 100)]
