"""Loading from the node's own store into tensors, checksums included."""

from __future__ import annotations

from benchmarks.harness import Settings, closing_all, measure, rate_result
from benchmarks.limits import copy
from benchmarks.product import Trainer
from benchmarks.results import Result, ratio_at_least
from benchmarks.single import Sibling, Single


def measure_load(settings: Settings) -> list[Result]:
    """`dcp.load` into tensors whose pages are there, against memcpy from mapped memory and stock readers."""
    size, directory = settings.size, settings.directory
    with closing_all() as contenders:
        memcpy_once = copy("memcpy from memory that stays mapped", directory, size, into_file=False)
        contenders.append(memcpy_once)
        contenders += [
            Sibling("memcpy from a new mapping", memcpy_once, remap=True),
            Trainer("our load", "checkpointing:LoadRole", settings, size=size, replicas=0),
            Single("FileSystemReader", "peers.stock:LoadRole", directory=directory, size=size),
        ]
        if not settings.quick:
            contenders.append(
                Single("torch.load", "peers.stock:LoadRole", directory=directory, size=size, way="torch.save")
            )
        series = measure(contenders, settings)
    memcpy, remapped, own, stock, *plain = (series[contender.name] for contender in contenders)
    return [
        rate_result("load", "load into tensors, CRC included", size, own.span("read"), memcpy, bar=ratio_at_least(0.8)),
        rate_result("load_mapped_anew", "the same, which maps the object anew", size, own.span("read"), remapped),
        rate_result("load_vs_dcp", "whole dcp.load against stock DCP, which checks nothing", size, own, stock),
        *(rate_result("load_vs_torch_load", "whole dcp.load against torch.load", size, own, one) for one in plain),
    ]
