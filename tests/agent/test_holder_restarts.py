"""The agent of the only holder is started again, or gone, in the middle of what a trainer pulls from it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, Rank, cluster, stream

from replicator.checksum import BLOCK_SIZE
from replicator.decide.types import ObjectSource
from replicator.errors import PeerUnavailableError, ReplicatorError, from_wire
from replicator.ids import ObjectVersion
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2
from replicator.wire import source_to_pb, version_to_pb

SERVED_PER_S = 24 * MIB
"""So that there is a middle."""
LARGE = 16 * MIB


def _written(made: Cluster, count: int, size: int) -> dict[ObjectVersion, tuple[ObjectInfo, bytes]]:
    """A container of the first node, which nobody else has."""
    rank = made.ranks[0]
    version = rank.begin(1)
    contents = [os.urandom(size) for _ in range(count)]
    return {
        one: (rank.write(one, content), content)
        for one, content in ((version.object(f"o{number:03}"), content) for number, content in enumerate(contents))
    }


def _sources(infos: Sequence[ObjectInfo]) -> list[ObjectSource]:
    return [ObjectSource(info.object.name, info.size, info.crc32c, "n0", ("n0",)) for info in infos]


def _window(rank: Rank, info: ObjectInfo, segment: str, deadline_s: float) -> Iterator[local_pb2.WindowEvent]:
    request = local_pb2.RetrieveWindowRequest(
        client_id=rank.client_id,
        epoch=1,
        container=version_to_pb(info.object.version),
        object=source_to_pb(_sources([info])[0]),
        segment=segment,
        block_size_bytes=BLOCK_SIZE,
        blocks=range(len(info.block_crcs)),
        deadline_ms=int(deadline_s * 1000),
    )
    return stream(rank.channel, "LocalService/RetrieveWindow", request, local_pb2.WindowEvent)


def _ended_in_the_middle(made: Cluster, pulled: Callable[[], object], under_way: Callable[[], bool]) -> None:
    """Pull, and meanwhile kill the holder's agent and start it again."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            pulled()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(under_way, "some of it is here")
        made.nodes[0].kill()
        assert thread.is_alive(), "the pull was too fast for this test"
        made.nodes[0].start_elsewhere()
    finally:
        thread.join(30)
    assert not failed, failed


def test_it_is_started_again_in_the_middle(shm_root: Path) -> None:
    """F34, F45: at another port, and what is wanted comes all the same: a large object, small ones, and a window."""
    with cluster(shm_root, 2, "--serve-limit-bytes-per-s", str(SERVED_PER_S)) as made:
        made.join()
        rank, node = made.ranks[1], made.nodes[1]
        for written in (_written(made, 1, LARGE), _written(made, 70, 240_000)):
            infos = [info for info, _ in written.values()]
            _retrieve_in_spite_of_a_restart(made, infos)
            for one, (_, content) in written.items():
                assert node.bytes_of(one) == content
            made.ranks[0].attach()
        ((info, content),) = _written(made, 1, LARGE).values()
        mapped = rank.reserve(LARGE)
        events: list[local_pb2.WindowEvent] = []
        _ended_in_the_middle(
            made,
            lambda: events.extend(_window(rank, info, mapped.name, 5.0)),
            lambda: any(mapped.view[: 4 * MIB : 4096]),
        )
        assert events[-1].done
        assert mapped.view == content


def _retrieve_in_spite_of_a_restart(made: Cluster, infos: Sequence[ObjectInfo]) -> None:
    node, version = made.nodes[1], infos[0].object.version
    told: dict[str, local_pb2.RetrieveEvent] = {}
    objects = node.paths.objects_of(version)

    def under_way() -> bool:
        some = objects.exists() and any(objects.iterdir())
        return some or any(path.stat().st_blocks > 8192 for path in node.paths.segments.iterdir())

    _ended_in_the_middle(made, lambda: told.update(made.ranks[1].retrieve(version, _sources(infos), 5.0)), under_way)
    assert len(told) == len(infos)
    assert all(event.done for event in told.values()), told


@pytest.mark.parametrize("gone", [True, False], ids=["refuses", "hangs"])
def test_who_stays_away_is_waited_for_once_and_not_once_for_each_object(shm_root: Path, gone: bool) -> None:
    """F15: large objects (four at a time), small ones, and a window; each fails with what it waited for."""
    with cluster(shm_root, 2, "--deadline-s", "3") as made:
        made.join()
        _stays_away(made, gone)


def _stays_away(two: Cluster, gone: bool) -> None:
    rank, deadline_s = two.ranks[1], 0.5
    agent = two.nodes[0].agent
    assert agent is not None
    large, small = _written(two, 40, 300_000), _written(two, 40, 1000)
    infos = {kind: [info for info, _ in written.values()] for kind, written in (("large", large), ("small", small))}
    some = rank.retrieve(infos["small"][0].object.version, _sources(infos["small"][:1]))
    assert [event.done for event in some.values()] == [True], "the holder is known"
    if gone:
        two.nodes[0].kill()
    else:
        agent.signal(signal.SIGSTOP)
    try:
        for part in (infos["large"], infos["small"][1:]):
            began = time.monotonic()
            events = rank.retrieve(part[0].object.version, _sources(part), deadline_s)
            # The holder's patience, or what one call to it may take, and what those that were under way waited.
            assert time.monotonic() - began < 3.5
            errors = [from_wire(event.error_kind, event.error_message) for event in events.values()]
            assert len(errors) == len(part)
            if gone:
                assert {type(error) for error in errors} == {PeerUnavailableError}
            assert all("n0" in str(error) for error in errors)
        with pytest.raises(ReplicatorError, match="n0"):
            list(_window(rank, infos["large"][0], rank.reserve(MIB).name, deadline_s))
    finally:
        if not gone:
            agent.signal(signal.SIGCONT)
