"""Saving: 1 GiB of mixed tensors to sealed objects, against memcpy and against what PyTorch offers."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness import Contender, Settings, closing_all, measure, rate_result
from benchmarks.limits import copy
from benchmarks.product import Fresh, Trainer, budget_for_two
from benchmarks.results import Result, ratio_at_least
from benchmarks.single import Sibling, Single

ROLE = "checkpointing:SaveRole"


def measure_save(settings: Settings) -> list[Result]:
    """The steady state: segments, or for PyTorch directories, are used in turn."""
    size, directory = settings.size, settings.directory
    with closing_all() as shared:
        memcpy_once = copy("memcpy into a mapped recycled segment", directory, size)
        shared.append(memcpy_once)
        stock_once = Single("FileSystemWriter", "peers.stock:SaveRole", directory=directory, size=size)
        shared.append(stock_once)
        stock_by_2 = Sibling("FileSystemWriter, 2 threads", stock_once, threads=2)
        # One trainer after the other: each keeps the segments of three checkpoints.
        with closing_all() as contenders:
            contenders.append(Trainer("our save", ROLE, settings, size=size, replicas=0))
            by_one: list[Contender] = [memcpy_once, stock_once, stock_by_2, *contenders]
            if not settings.quick:
                by_one.append(Sibling("torch.save", stock_once, way="torch.save"))
            series = measure(by_one, settings)
            memcpy, stock, stock2, own, *plain = (series[contender.name] for contender in by_one)
        fastest_stock = min((stock, stock2), key=lambda one: one.median_s or float("inf"))
        rows = [
            rate_result(
                "save_steady",
                "save, steady state, CRC included: tensors to sealed objects",
                size,
                own.span("sealed"),
                memcpy,
                bar=ratio_at_least(1.0),
            ),
            rate_result(
                "save_vs_dcp",
                "whole dcp.save, steady state, against stock DCP",
                size,
                own,
                fastest_stock,
                limit_name=f"{fastest_stock.name} (the faster one)",
                bar=ratio_at_least(4.0),
            ),
            *(rate_result("save_vs_torch_save", "whole dcp.save against torch.save", size, own, one) for one in plain),
        ]
        with closing_all() as contenders:
            flags = budget_for_two(size)
            contenders.append(Trainer("our save, budget for two", ROLE, settings, flags=flags, size=size, replicas=0))
            memcpy, own = measure([memcpy_once, *contenders], settings).values()
        what = "save, steady state, budget for two checkpoints"
        rows.append(rate_result("save_tight", what, size, own.span("sealed"), memcpy))
        if settings.quick:
            return rows
        with closing_all() as contenders:
            contenders.append(Trainer("our save, 2 threads", ROLE, settings, size=size, replicas=0, threads=2))
            by_2: list[Contender] = [Sibling("memcpy by 2 threads", memcpy_once, threads=2), *contenders, stock_by_2]
            series = measure(by_2, settings)
            memcpy2, own2, stock_beside_2 = (series[contender.name] for contender in by_2)
    return [
        *rows,
        rate_result("save_steady_2_threads", "the same by 2 threads", size, own2.span("sealed"), memcpy2),
        rate_result("save_vs_dcp_2_threads", "whole dcp.save, both by 2 threads", size, own2, stock_beside_2),
    ]


def measure_first_save(settings: Settings) -> list[Result]:
    """The very first save of a job: no segment is there, every page is faulted in."""
    size = settings.size
    with closing_all() as contenders:
        stock_once = Single("FileSystemWriter", "peers.stock:SaveRole", directory=settings.directory, size=size)
        contenders += [
            Fresh("our first save, 2 threads", ROLE, settings, size=size, replicas=0, threads=2),
            Sibling("FileSystemWriter, 2 threads", stock_once, threads=2),
        ]
        taking_turns = contenders[:]
        contenders.append(stock_once)
        # A very first save has nothing to warm; PyTorch's writer works in a process that has saved before.
        taking_turns[1].run()
        series = measure(taking_turns, replace(settings, warmups=0))
    own, stock = (series[contender.name] for contender in taking_turns)
    return [
        rate_result(
            "save_first",
            "save, very first, 4 KiB pages, 2 threads",
            size,
            own,
            stock,
            bar=ratio_at_least(1.0),
        )
    ]
