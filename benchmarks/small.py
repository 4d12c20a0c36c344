"""Many small objects: what each one costs."""

from __future__ import annotations

from benchmarks.harness import Settings, closing_all, count_result, measure
from benchmarks.limits import small_files
from benchmarks.product import Trainer
from benchmarks.results import Result, value_at_least

OBJECT_BYTES = 4096
OBJECTS = 1000


def measure_small(settings: Settings, count: int = OBJECTS) -> list[Result]:
    """Objects of 4 KiB per second, replicated and sealed; and how fast they are written before."""
    size = count * OBJECT_BYTES
    with closing_all() as contenders:
        contenders += [
            small_files("files written and renamed on tmpfs", settings.directory, count, OBJECT_BYTES),
            Trainer(
                "our replication", "trainer:ObjectsRole", settings, nodes=2, replicas=1, size=OBJECT_BYTES, count=count
            ),
        ]
        series = measure(contenders, settings)
    files, own = (series[contender.name] for contender in contenders)
    return [
        count_result(
            "small_objects",
            f"{count} objects of 4 KiB, replicated and sealed",
            count,
            size,
            own,
            files,
            bar=value_at_least(5000),
        ),
        count_result(
            "small_objects_written",
            f"{count} objects of 4 KiB, written and sealed by create_many",
            count,
            size,
            own.span("written"),
            files,
        ),
    ]
