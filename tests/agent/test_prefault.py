"""Memory touched ahead of need by a real agent; what is to be made, and when the CPUs are wanted, as functions."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agent_harness import wait_until
from cluster import MIB, cluster

from replicator.agent.counters import Counters
from replicator.agent.landing import Landing
from replicator.agent.load import CpuPressure
from replicator.agent.prefault import MAX_SEGMENTS, Prefaulter, next_segment
from replicator.config import AgentConfig
from replicator.store import Store
from replicator.store.paths import open_root
from replicator.store.segment import MappedSegment

PAGE = os.sysconf("SC_PAGE_SIZE")


def test_what_is_made_next() -> None:
    assert next_segment([], [], 100, 40) == (40, True)
    assert next_segment([], [40], 100, 40) == (40, True)
    assert next_segment([], [40, 40], 100, 40) is None
    big = 100 * MIB
    assert next_segment([big, 2 * big], [], 4 * big, big) == (2 * big, False)
    assert next_segment([big, 2 * big], [2 * big], 4 * big, big) == (big, False)
    assert next_segment([big, 2 * big], [2 * big, big], 4 * big, big) == (big, True)
    assert next_segment([big, 2 * big], [], big, big) == (big, False), "what has room"
    assert next_segment([], [1] * MAX_SEGMENTS, 10 * big, big) is None


def test_auto_is_one_container() -> None:
    big = 100 * MIB
    assert next_segment([], [], -1, big, is_auto=True) is None
    assert next_segment([big, big], [big], -1, big, is_auto=True) == (big, False)
    assert next_segment([big, big], [big, big + MIB], -1, big, is_auto=True) is None
    assert next_segment([big, big], [7 * big], -1, big, is_auto=True) is None, "others are free already"


def test_pressure_is_that_since_the_last_look(tmp_path: Path) -> None:
    now = [10.0]
    file = tmp_path / "cpu"

    def waited(microseconds: int) -> None:
        file.write_text(f"some avg10=99.00 avg60=0.00 avg300=0.00 total={microseconds}\nfull avg10=0.00 total=0\n")

    waited(5_000_000)
    pressure = CpuPressure(file, tmp_path / "none", lambda: now[0])
    assert pressure.percent() == 0
    now[0] += 1.0
    waited(5_250_000)
    assert pressure.percent() == 25
    now[0] += 0.05
    waited(9_000_000)
    assert pressure.percent() == 25
    now[0] += 9.95
    assert pressure.percent() == 37.5


def test_without_psi_the_load_average_counts(tmp_path: Path) -> None:
    now = [10.0]
    load = tmp_path / "loadavg"
    pressure = CpuPressure(tmp_path / "none", load, lambda: now[0])
    for text, percent in (("0.10 0.2 0.3 1/100 9", 0), ("9999.0 0.2 0.3 1/100 9", 100), ("", 0)):
        load.write_text(text)
        now[0] += 1.0
        assert pressure.percent() == percent
    assert CpuPressure().percent() >= 0


def faults_of(pid: int) -> int:
    """Page faults that the process took itself (proc(5), minflt)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_an_idle_agent_faults_before_and_not_in_the_pull(shm_root: Path) -> None:
    size = 96 * MIB
    flags = ("--prefault-bytes", "200Mi", "--prefault-segment-bytes", "100Mi", "--prefault-max-pressure", "100")
    with cluster(shm_root, 2, *flags) as two:
        two.join()
        owner, buddy = two.ranks
        wait_until(lambda: buddy.node.counter("segments_prefaulted") >= 1, "a segment was made ahead of need")
        wait_until(lambda: buddy.node.status().free_segment_bytes >= 100 * MIB, "it is free")
        one = owner.begin(1).object("shard")
        owner.write(one, bytes(range(256)) * (size >> 8))
        assert buddy.node.agent is not None
        pid = buddy.node.agent.process.pid
        before = faults_of(pid)
        owner.replicate([one], deadline_s=30.0)
        assert owner.outcome(one).ok
        assert faults_of(pid) - before < size // PAGE // 2
        assert buddy.node.held(one) is not None


def test_auto_makes_what_the_next_container_needs(shm_root: Path) -> None:
    with cluster(shm_root, 2, "--prefault-bytes", "auto", "--prefault-max-pressure", "100") as two:
        two.join()
        owner, buddy = two.ranks
        assert buddy.node.counter("segments_prefaulted") == 0
        one = owner.begin(1).object("shard")
        owner.write(one, bytes(8 * MIB))
        owner.replicate([one])
        assert owner.outcome(one).ok
        wait_until(lambda: buddy.node.counter("segments_prefaulted") == 1, "the next shard's segment was made")
        assert buddy.node.status().free_segment_bytes >= 8 * MIB
        assert owner.node.counter("segments_prefaulted") == 0, "it pulled nothing"


def test_off_is_off(shm_root: Path) -> None:
    with cluster(shm_root, 1) as one:
        assert one.nodes[0].status().free_segment_bytes == 0
        assert one.nodes[0].counter("segments_prefaulted") == 0


class FakeLanding(Landing):
    def __init__(self) -> None:
        self.kept: list[MappedSegment] = []

    def hold(self) -> None:
        pass

    def keep(self, mapped: MappedSegment) -> None:
        self.kept.append(mapped)


async def test_it_waits_until_the_cpus_are_free_and_stops_when_they_are_not(shm_root: Path) -> None:
    store = Store(open_root(shm_root / "store", create=True), 512 * MIB)
    store.rebuild()
    config = AgentConfig(prefault_bytes=300 * MIB, prefault_segment_bytes=200 * MIB, prefault_max_pressure=20.0)
    landing, counters = FakeLanding(), Counters()
    # Busy, then free for the first look of an attempt but not for its second, then free.
    told = [90.0, 20.1, 0.0, 50.0]
    used: list[int] = []

    def pressure() -> float:
        used.append(store.usage().free_bytes)
        return told.pop(0) if told else 0.0

    prefaulter = Prefaulter(config, "agent-a", store, landing, counters, pressure)
    running = asyncio.ensure_future(prefaulter.run())
    while not counters.get("segments_prefaulted"):
        assert not running.done()
        await asyncio.sleep(0.02)
    assert not told
    assert used[:5] == [0] * 5
    assert [mapped.capacity for mapped in landing.kept] == [store.usage().free_bytes]
    prefaulter.stop()
    running.cancel()
    await asyncio.wait([running])
    store.close()
