"""All measurements by name, and how one that fails is reported."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence

from benchmarks import machine
from benchmarks.async_save import measure_async_save
from benchmarks.harness import Settings
from benchmarks.load import measure_load
from benchmarks.machine_limits import measure_limits
from benchmarks.memory import measure_memory
from benchmarks.replicate import measure_pull, measure_replicate
from benchmarks.restore import measure_restore
from benchmarks.results import Result
from benchmarks.save import measure_first_save, measure_save
from benchmarks.scale import measure_agents, measure_counts, measure_decisions, measure_sizes
from benchmarks.small import measure_small

MEASUREMENTS: Mapping[str, Callable[[Settings], Sequence[Result]]] = {
    "limits": measure_limits,
    "save": measure_save,
    "first_save": measure_first_save,
    "replicate": measure_replicate,
    "pull": measure_pull,
    "load": measure_load,
    "restore": measure_restore,
    "small": measure_small,
    "async_save": measure_async_save,
    "memory": measure_memory,
    "sizes": measure_sizes,
    "counts": measure_counts,
    "agents": measure_agents,
    "decisions": measure_decisions,
}
SIZES_IN_MEMORY: Mapping[str, float] = {
    "limits": 10,
    "save": 11,
    "first_save": 8,
    "replicate": 11.5,
    "pull": 13,
    "load": 10,
    "restore": 10,
    "small": 0,
    "async_save": 11,
    "memory": 9,
}
"""What all processes and tmpfs files of a measurement take together, in units of `--size`."""
QUICK = ("save", "first_save", "replicate", "pull", "load", "small", "async_save", "memory")
"""What has a bar."""


def run_measurement(name: str, settings: Settings) -> list[Result]:
    """The rows of one measurement; a single failed row when it could not be done at all."""
    needed = SIZES_IN_MEMORY.get(name, 0) * settings.size
    available = machine.available_memory()
    if needed > available:
        reason = f"needs {needed / 2**30:.0f} GiB of memory, {available / 2**30:.1f} GiB are available"
        return [Result(name=name, what=name, unit="", reason=reason, failed=True)]
    try:
        return list(MEASUREMENTS[name](settings))
    except Exception as error:
        settings.log(traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
        return [Result(name=name, what=name, unit="", reason=reason, failed=True)]
