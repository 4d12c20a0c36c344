"""Invariants that are broken on purpose, to see that the simulator notices: `--break NAME`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from replicator.agent import commit, own_copies, packed, retention, scrub
from replicator.agent.jobs import Jobs
from replicator.decide.retention import Drop, RetentionView, plan_retention
from replicator.decide.supersede import superseding
from replicator.decide.types import recency
from replicator.ids import ContainerVersion
from replicator.store import reader
from replicator.transfer import pull


class _Anything(int):
    """A checksum that is always the right one."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


@contextlib.contextmanager
def _commit_before_ack() -> Iterator[None]:
    """A commit succeeds when the coordinator alone has the manifest."""
    remember = commit.Committer._remember

    def alone(self: Any, manifest: Any, epoch: int) -> Any:
        entry = remember(self, manifest, epoch)
        entry.needed = 1
        return entry

    with mock.patch.object(commit.Committer, "_remember", alone):
        yield


@contextlib.contextmanager
def _skip_crc() -> Iterator[None]:
    """Nobody who receives or reads bytes checks them."""

    def unchecked(*_: Any) -> int:
        return _Anything()

    fetch_run = pull._Pull._fetch_run

    async def trusting(self: Any, lane: Any, source: Any, first: int, last: int, bad: set[int], verified: Any) -> None:
        class Trusting:
            name = lane.name

            async def fetch(self, *args: Any, on_blocks: Any, **kwargs: Any) -> None:
                await lane.fetch(
                    *args, on_blocks=lambda block, crcs: on_blocks(block, [_Anything()] * len(crcs)), **kwargs
                )

        await fetch_run(self, Trusting(), source, first, last, bad, verified)

    with (
        mock.patch.object(packed, "crc32c", unchecked),
        mock.patch.object(reader, "crc32c", unchecked),
        mock.patch.object(pull._Pull, "_fetch_run", trusting),
    ):
        yield


@contextlib.contextmanager
def _drop_newest() -> Iterator[None]:
    """Retention drops the newest protected container instead of what is superseded."""

    def wrong(views: list[RetentionView], keep_last: int, keep_every: int = 0) -> tuple[Drop, ...]:
        protected = [view.version for view in views if view.is_protected and view.committed]
        return (Drop(max(protected, key=recency), "it is the newest"),) if protected else ()

    with mock.patch.object(retention, "plan_retention", wrong):
        yield


@contextlib.contextmanager
def _model_supersedes() -> Iterator[None]:
    """What makes older containers superfluous is asked without looking at whether a job can go on from it."""

    def plan(views: list[RetentionView], keep_last: int, keep_every: int = 0) -> tuple[Drop, ...]:
        alike = [dataclasses.replace(view, resumable=True) for view in views]
        return plan_retention(alike, keep_last, keep_every)

    def newer(version: ContainerVersion, resumable: bool, protected: Mapping[ContainerVersion, bool]) -> Any:
        return superseding(version, True, dict.fromkeys(protected, True))

    with (
        mock.patch.object(retention, "plan_retention", plan),
        mock.patch.object(retention, "superseding", newer),
        mock.patch.object(commit, "superseding", newer),
        mock.patch.object(own_copies, "superseding", newer),
    ):
        yield


@contextlib.contextmanager
def _forget_epoch() -> Iterator[None]:
    """An epoch is what the last message said, also when it is an older one."""

    def believing(self: Any, job: str, epoch: int) -> None:
        if epoch != self.epoch(job):
            self._put(dataclasses.replace(self._state(job), epoch=epoch, attempt=0))

    with mock.patch.object(Jobs, "check", believing):
        yield


@contextlib.contextmanager
def _blind_scrubber() -> Iterator[None]:
    """The scrubber reads everything and finds nothing wrong."""
    with mock.patch.object(scrub, "verify", return_value=[]):
        yield


BREAKS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "commit-before-ack": _commit_before_ack,
    "skip-crc": _skip_crc,
    "drop-newest": _drop_newest,
    "model-supersedes": _model_supersedes,
    "forget-epoch": _forget_epoch,
    "blind-scrubber": _blind_scrubber,
}


def broken_on_purpose(name: str) -> contextlib.AbstractContextManager[None]:
    """Within the block the product is broken as named; not at all for an empty name."""
    return BREAKS[name]() if name else contextlib.nullcontext()
