"""Which containers a node may drop. Only what is superseded by something safer and newer (F04, F43, F49).

Being newer is not enough, and being written locally is not enough: a container makes older ones
superfluous once it is *protected*, that is committed and acknowledged by all buddies of all owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicator.decide.types import describe, recency, sentence
from replicator.errors import ConfigError
from replicator.ids import ContainerVersion


@dataclass(frozen=True, slots=True)
class RetentionView:
    """What a node knows of one container that it holds something of.

    Args:
        version: which attempt at which step.
        committed: its manifest is stored here.
        is_protected: committed, and every object acknowledged by all buddies of its owner.
        complete_locally: everything of it that this node is to hold, it does hold (nothing was quarantined or
            is still being pulled). A protected container with a gap here does not supersede older ones.
        recoverable: known to have a verified holder for every object right now (from a recent lookup).
        pinned: to be kept whatever its age, for instance while somebody reads or flushes it.
        resumable: a job can go on from it (F43); what is not known to be otherwise is.
        was_protected: it was, and lacks a copy since, which is to be made again.
    """

    version: ContainerVersion
    committed: bool
    is_protected: bool
    complete_locally: bool = True
    recoverable: bool = False
    pinned: bool = False
    resumable: bool = True
    was_protected: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """A container to drop, and why, in words."""

    version: ContainerVersion
    reason: str


def plan_retention(containers: Sequence[RetentionView], keep_last: int, keep_every: int = 0) -> tuple[Drop, ...]:
    """What may be dropped now, oldest first within each job; the order of the input does not matter.

    Kept always: of a job, the newest committed, the newest protected and the newest recoverable container, and the same
    of those that are resumable; its `keep_last` newest protected resumable ones, and beside them those that lack
    a copy since; pinned ones; and everything that is newer than the newest protected container which is complete on
    this node. So without such a container nothing is dropped. A resumable container is superseded by a resumable one
    only (F43).

    Args:
        keep_every: containers whose step is a multiple of it and that are protected, or were and lack a copy since,
            are kept, too; 0: none.

    Raises:
        ConfigError: `keep_last` is below 1, or `keep_every` below 0.
    """
    if keep_last < 1:
        raise ConfigError(f"keep_last: expected 1 or more, found {keep_last}; the newest checkpoint is always kept")
    if keep_every < 0:
        raise ConfigError(f"keep_every: expected 0 or more steps, found {keep_every}")
    by_job: dict[str, list[RetentionView]] = {}
    for view in containers:
        by_job.setdefault(view.version.container.job, []).append(view)
    drops: list[Drop] = []
    for job in sorted(by_job):
        drops.extend(_plan_job(sorted(by_job[job], key=lambda view: recency(view.version)), keep_last, keep_every))
    return tuple(drops)


def _plan_job(oldest_first: list[RetentionView], keep_last: int, keep_every: int) -> list[Drop]:
    resumable = [view for view in oldest_first if view.resumable]
    protected = [view.version for view in resumable if _is_protected(view)]
    once = [view.version for view in resumable if _once_protected(view)]
    kept = {*protected[-keep_last:], *once[-keep_last:], *(view.version for view in oldest_first if view.pinned)}
    if keep_every:
        kept.update(
            view.version
            for view in oldest_first
            if _once_protected(view) and view.version.container.step % keep_every == 0
        )
    for views in (oldest_first, resumable):
        kept.update([view.version for view in views if view.committed][-1:])
        kept.update([view.version for view in views if view.is_protected][-1:])
        kept.update([view.version for view in views if view.recoverable][-1:])
    anchors = {True: _anchor(resumable), False: _anchor(oldest_first)}
    drops = []
    for view in oldest_first:
        anchor = anchors[view.resumable]
        if anchor is not None and recency(view.version) < recency(anchor) and view.version not in kept:
            drops.append(Drop(view.version, _reason(view, anchor, keep_last)))
    return drops


def _anchor(oldest_first: list[RetentionView]) -> ContainerVersion | None:
    """What supersedes older ones."""
    found = [view.version for view in oldest_first if _is_protected(view) and view.complete_locally]
    return found[-1] if found else None


def _is_protected(view: RetentionView) -> bool:
    return view.is_protected and view.committed


def _once_protected(view: RetentionView) -> bool:
    return view.committed and (view.is_protected or view.was_protected)


def _reason(view: RetentionView, anchor: ContainerVersion, keep_last: int) -> str:
    what = sentence(describe(view.version))
    newer = f"{describe(anchor)} is newer and protected"
    if _once_protected(view):
        return f"{what} is older than the {keep_last} newest protected checkpoints that are kept; {newer}."
    if view.committed:
        return f"{what} is committed but was never acknowledged by all buddies; {newer}."
    return f"{what} has no manifest on this node, and {newer}."
