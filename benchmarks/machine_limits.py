"""The limits by themselves: what else this machine could do, for reading the other rows."""

from __future__ import annotations

from benchmarks.harness import Settings, closing_all, measure, rate_result
from benchmarks.limits import Tcp, copy
from benchmarks.results import Result
from benchmarks.single import Sibling


def measure_limits(settings: Settings) -> list[Result]:
    """Copies and raw TCP, recycled and fresh memory, one and two at once, and the system's congestion control."""
    size, directory, congestion = settings.size, settings.directory, settings.congestion
    tcp = "raw TCP, 2 connections"
    # Copies and connections stand each for itself, so one group needs not wait for the other's memory.
    with closing_all() as copies:
        once = copy("memcpy into a mapped recycled segment", directory, size)
        copies += [
            once,
            Sibling("memcpy by 2 threads into a mapped recycled segment", once, threads=2),
        ]
        names = ["memcpy", "memcpy_2"]
        if not settings.quick:
            copies += [
                Sibling("memcpy into a fresh file", once, fresh=True),
                Sibling("memcpy by 2 threads into a fresh file", once, threads=2, fresh=True),
            ]
            names += ["memcpy_fresh", "memcpy_2_fresh"]
        series = measure(copies, settings)
    with closing_all() as contenders:
        contenders += [
            Tcp("raw TCP, 1 connection", directory, size, 1, congestion),
            Tcp(tcp, directory, size, 2, congestion),
        ]
        names += ["tcp_1", "tcp_2"]
        if not settings.quick:
            contenders.append(Tcp(f"{tcp}, into a fresh file", directory, size, 2, congestion, recycled=False))
            names.append("tcp_2_fresh")
        if congestion and not settings.quick:
            contenders.append(Tcp(f"{tcp}, the system's congestion control", directory, size, 2))
            names.append("tcp_2_system")
        series.update(measure(contenders, settings))
    return [
        rate_result(f"limit_{name}", contender.name, size, series[contender.name])
        for name, contender in zip(names, [*copies, *contenders], strict=True)
    ]
