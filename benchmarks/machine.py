"""What the machine is doing: CPU time and memory of processes, and whether somebody else is busy.

Linux only. CPU times are nanosecond clocks of whole processes (all threads), also of other processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

QUIET_IDLE_SHARE = 0.92
"""The machine is quiet when at least this share of its CPU time was idle."""
QUIET_WINDOW_S = 0.2
FOREIGN_SHARE = 0.08
"""A run is disturbed when processes that are not ours took more than this share of the machine."""
FOREIGN_SLACK_S = 0.03
"""Ticks of 10 ms are the resolution of /proc/stat: this much foreign CPU time says nothing."""

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuTicks:
    """CPU seconds of the whole machine since boot. `stolen` went to other guests of the host."""

    busy: float
    idle: float
    stolen: float

    @classmethod
    def now(cls) -> CpuTicks:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, idle, iowait, _irq, _softirq, steal = (int(field) * _TICK_S for field in fields)
        return cls(user + nice + system, idle + iowait, steal)


def wait_until_quiet(limit_s: float = 20.0, window_s: float = QUIET_WINDOW_S) -> bool:
    """Wait for a window of time in which the machine was idle; False when none came within the limit."""
    end = time.monotonic() + limit_s
    while True:
        before = CpuTicks.now()
        time.sleep(window_s)
        after = CpuTicks.now()
        idle = after.idle - before.idle
        total = idle + after.busy - before.busy + after.stolen - before.stolen
        if total > 0 and idle / total >= QUIET_IDLE_SHARE:
            return True
        if time.monotonic() >= end:
            return False


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all its threads; 0 when it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def page_faults(pid: int) -> int:
    """Minor page faults of a process since it began: pages that it touched and that were not mapped yet."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])
    except OSError:
        return 0


def descendants(pid: int) -> list[int]:
    """The process and everything below it that is still alive."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        current = queue.pop()
        found.append(current)
        queue.extend(parents.get(current, ()))
    return found


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, in bytes. `shared` are pages of mapped tmpfs files, `private` everything else."""

    private: int
    shared: int
    peak: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        fields: dict[str, int] = {}
        try:
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                key, _, value = line.partition(":")
                if key.startswith(("Rss", "VmHWM", "VmRSS")):
                    fields[key] = int(value.split()[0]) * 1024
        except OSError:
            return cls(0, 0, 0)
        return cls(
            fields.get("RssAnon", 0) + fields.get("RssFile", 0), fields.get("RssShmem", 0), fields.get("VmHWM", 0)
        )


def reset_peak(pid: int) -> None:
    """Start the peak of a process's memory anew; without the right to, it stays the peak of its life."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        pass


class Watch:
    """Tells, for one span of time, how much CPU processes used that are not below this one.

    Kernel threads count as foreign, interrupts do not. Children that were reaped meanwhile are ours.
    """

    def __init__(self, extra: Iterable[int] = ()) -> None:
        self._extra = tuple(extra)
        self._pids = self._ours()
        self._before = {pid: cpu_seconds(pid) for pid in self._pids}
        self._reaped = _reaped_cpu()
        self._ticks = CpuTicks.now()

    def _ours(self) -> set[int]:
        pids = set(descendants(os.getpid()))
        for pid in self._extra:
            pids.update(descendants(pid))
        return pids

    def foreign(self) -> tuple[float, float]:
        """(CPU seconds of others and stolen ones, CPU seconds the machine had) since the watch began."""
        ticks = CpuTicks.now()
        ours = sum(cpu_seconds(pid) - self._before.get(pid, 0.0) for pid in self._ours())
        ours += _reaped_cpu() - self._reaped
        busy = ticks.busy - self._ticks.busy
        stolen = ticks.stolen - self._ticks.stolen
        return max(busy - ours, 0.0) + stolen, busy + stolen + ticks.idle - self._ticks.idle

    def is_disturbed(self) -> bool:
        foreign, total = self.foreign()
        return foreign > max(FOREIGN_SHARE * total, FOREIGN_SLACK_S)


def _reaped_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def available_memory() -> int:
    """Bytes that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def filesystem_of(directory: Path) -> str:
    """Type of the file system that a directory lies on, for instance tmpfs."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown"


def tmpfs_bytes(directory: Path) -> int:
    """Bytes that the files below a directory occupy, each inode once, also holes not counted."""
    seen: set[int] = set()
    total = 0
    for parent, _dirs, names in os.walk(directory):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                total += status.st_blocks * 512
    return total


def describe() -> dict[str, object]:
    """What a reader of the results needs to know of the machine."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    total = next(
        (int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line),
        0,
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(total / 2**30, 1),
        "kernel": os.uname().release,
        "shmem_huge_pages": _bracketed(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "tcp_congestion": default_congestion(),
    }


def default_congestion() -> str:
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return ""


def available_congestions() -> list[str]:
    try:
        return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    except OSError:
        return []


def _bracketed(path: Path) -> str:
    try:
        text = path.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]
