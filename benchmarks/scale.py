"""How cost grows: with the size of an object, with their number, with the number of agents."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace

from benchmarks import machine
from benchmarks.harness import Settings, closing_all, count_result, measure, rate_result, time_result
from benchmarks.limits import Tcp
from benchmarks.product import Commit, Fresh, Lookup, Trainer
from benchmarks.results import Bar, Result
from benchmarks.simulated import RANKS, STEPS, cluster, labelled
from benchmarks.small import OBJECT_BYTES
from replicator.decide.choose_step import choose_step
from replicator.decide.placement import strategy

SIZES = (1 << 20, 16 << 20, 256 << 20, 1 << 30, 4 << 30, 8 << 30)
COUNTS = (1, 10, 100, 1000, 10_000)
AGENTS = (2, 4, 8, 16, 32, 64)
WARM_COPIES = 8
"""Of an object: three on each node while steps replace each other, two of the raw limit's."""
COLD_COPIES = 2.2
"""Of an object that is written and copied once, with some room for what else there is."""
JOB_NODES = 4096
MOST_SECONDS = 0.5
"""To choose a step in a job of so many nodes."""
AGENT_BYTES = 120_000_000


def measure_sizes(settings: Settings) -> list[Result]:
    """Replication of one object of growing size, against raw TCP of the same size."""
    rows = []
    for size in SIZES:
        available = machine.available_memory()
        if WARM_COPIES * size <= available:
            rows.append(_warm_size(size, settings))
        elif COLD_COPIES * size <= available:
            rows.append(_cold_size(size, settings))
        else:
            reason = f"needs {COLD_COPIES * size / 2**30:.0f} GiB of memory, {available >> 30} GiB are available"
            rows.append(Result(name=_size_name(size), what=_size_words(size), unit="GB/s", reason=reason))
    return rows


def _warm_size(size: int, settings: Settings) -> Result:
    raw, own = "raw TCP", "our replication"
    with closing_all() as contenders:
        contenders += [
            Tcp(raw, settings.directory, size, settings.connections, settings.congestion),
            Trainer(own, "trainer:ObjectsRole", settings, nodes=2, size=size, replicas=1),
        ]
        series = measure(contenders, settings)
    return rate_result(_size_name(size), _size_words(size), size, series[own], series[raw])


def _cold_size(size: int, settings: Settings) -> Result:
    """Too large for a pool on this machine: new stores for each run, every page is faulted in; not in turns."""
    raw, own = "raw TCP into a fresh file", "our replication, cold"
    with closing_all() as contenders:
        contenders.append(Tcp(raw, settings.directory, size, settings.connections, settings.congestion, recycled=False))
        series = measure(contenders, settings)
    with closing_all() as contenders:
        contenders.append(Fresh(own, "trainer:ObjectsRole", settings, nodes=2, size=size, replicas=1))
        series.update(measure(contenders, settings))
    return rate_result(_size_name(size), f"{_size_words(size)}, cold", size, series[own], series[raw])


def _size_name(size: int) -> str:
    return f"scale_size_{size >> 20}_mib"


def _size_words(size: int) -> str:
    return f"replicate one object of {size >> 20} MiB"


def measure_counts(settings: Settings) -> list[Result]:
    """Replication of a growing number of objects of 4 KiB."""
    rows = []
    for count in COUNTS:
        with closing_all() as contenders:
            contenders.append(
                Trainer("objects", "trainer:ObjectsRole", settings, nodes=2, replicas=1, size=OBJECT_BYTES, count=count)
            )
            series = measure(contenders, settings)["objects"]
        words = f"replicate {count} objects of 4 KiB"
        rows.append(count_result(f"scale_count_{count}", words, count, count * OBJECT_BYTES, series))
    return rows


class Decision:
    """`choose_step` for a job of `JOB_NODES` nodes, one of them lost; the newest of its steps cannot be restored."""

    name = "choose_step"

    def __init__(self) -> None:
        self.processes = {"decision": os.getpid()}
        placement = strategy("group").arrange(labelled(JOB_NODES), 1)
        self._inventories, self._manifests = cluster(JOB_NODES, placement)
        newest = max(self._manifests)
        *entries, last = self._manifests[newest].entries
        self._manifests[newest] = replace(self._manifests[newest], entries=(*entries, replace(last, crc32c=1)))

    def prepare(self) -> None:
        gc.collect()

    def run(self) -> float:
        start = time.perf_counter()
        decision = choose_step(self._inventories, self._manifests)
        elapsed = time.perf_counter() - start
        if decision.version is None or len(decision.rejected) != 1:
            raise RuntimeError(f"expected the last but one of the steps, found: {decision.reason}")
        return elapsed

    def close(self) -> None:
        self._inventories, self._manifests = [], {}


def measure_decisions(settings: Settings) -> list[Result]:
    """The pure part of a recovery lookup: a job of thousands of nodes with 8 ranks and 3 steps."""
    with closing_all() as contenders:
        contenders.append(Decision())
        series = measure(contenders, settings)[Decision.name]
    words = f"choose a step, {JOB_NODES} nodes of {RANKS} ranks, {STEPS} steps"
    row = time_result("choose_step", words, 1, series, bar=Bar("value", False, MOST_SECONDS))
    return [replace(row, cpu_s_per_gb=None, cpu_by_process={})]


def measure_agents(settings: Settings) -> list[Result]:
    """Commit (stored on enough nodes, sent to all) and recovery lookup with a growing number of agents."""
    rows = []
    for count in AGENTS:
        needed = count * AGENT_BYTES
        if needed > machine.available_memory():
            reason = f"needs {needed >> 20} MiB of memory, {machine.available_memory() >> 20} MiB are available"
            rows.append(Result(name=f"scale_agents_{count}", what=f"{count} agents", unit="s", reason=reason))
            continue
        with closing_all() as contenders:
            commit = Commit("commit", settings, count)
            contenders += [commit, Lookup("lookup", commit)]
            series = measure(contenders, settings)
        for kind in ("commit", "lookup"):
            row = time_result(f"scale_{kind}_{count}_agents", f"{kind} with {count} agents", 1, series[kind])
            rows.append(replace(row, cpu_s_per_gb=None, cpu_by_process={}))
    return rows
