"""Which saves are skipped when they come faster than their copies are made.

At most two containers of a job wait for their copies: the one whose copies are being made, and the newest one. What is
between them is skipped: its copies would be made after those of the one and be worth less than those of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replicator.decide.types import describe, recency, sentence
from replicator.ids import ContainerVersion


@dataclass(frozen=True, slots=True)
class Skip:
    """A container whose copies will not be made, and why, in words."""

    version: ContainerVersion
    reason: str


def plan_skips(
    waiting: Mapping[ContainerVersion, bool], newest: ContainerVersion, newest_resumable: bool = True
) -> tuple[Skip, ...]:
    """What is superseded by `newest`, which is committed, oldest first.

    The oldest of those that wait is the one whose copies are being made: it is never skipped, however long it takes,
    for else a job that always saves faster than its copies are made would never have any. What is resumable is
    superseded only by what is, too (F43). Containers of other jobs and of other epochs are left alone: a restart may
    be loading them.

    Args:
        waiting: committed or about to be, and not protected, and whether each is resumable; `newest` may be among them.
            Without those whose copies have not got any further for long: nothing would ever be protected after them.
    """
    older = sorted(
        (
            version
            for version in waiting
            if version.container.job == newest.container.job
            and version.epoch == newest.epoch
            and recency(version) < recency(newest)
        ),
        key=recency,
    )
    return tuple(
        Skip(
            version,
            f"{sentence(describe(version))} was skipped: superseded by {describe(newest)}, which is committed, while "
            f"the copies of {describe(older[0])} were still being made",
        )
        for version in older[1:]
        if newest_resumable or not waiting[version]
    )
