"""Saves, copies, losses and restarts in any order, and after each of them what retention and skipping may drop.

The machine is what a coordinator's node knows; a container is recoverable here when nothing of it was lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from decide_samples import JOB
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicator.decide.backpressure import plan_skips
from replicator.decide.retention import RetentionView, plan_retention
from replicator.decide.types import recency
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation


@dataclass
class _Container:
    """What is true of one attempt."""

    resumable: bool
    committed: bool = False
    protected: bool = False
    complete_locally: bool = True
    lost: bool = False

    @property
    def recoverable(self) -> bool:
        return self.committed and not self.lost


class RetentionMachine(RuleBasedStateMachine):
    """One job. `held` is what is left, `ever` what was saved; only the rules that drop take from `held`."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[ContainerVersion, _Container] = {}
        self.ever: dict[ContainerVersion, _Container] = {}
        self.epoch, self.attempt, self.step = 1, 0, 0
        self.found: ContainerVersion | None = None
        self.given_up: set[ContainerVersion] = set()

    @initialize(keep_last=st.integers(1, 3), keep_every=st.sampled_from((0, 2, 3)))
    def configure(self, keep_last: int, keep_every: int) -> None:
        self.keep_last, self.keep_every = keep_last, keep_every

    @rule(resumable=st.sampled_from((True, True, False)), is_committed=st.sampled_from((True, True, True, False)))
    def save(self, resumable: bool, is_committed: bool) -> None:
        self.step += 1
        self.attempt += 1
        version = ContainerVersion(CheckpointContainerId(JOB, self.step), make_generation(self.epoch, self.attempt))
        self.held[version] = self.ever[version] = _Container(resumable)
        if is_committed:
            self._commit(version)

    def _open(self) -> list[ContainerVersion]:
        """Begun in this epoch and not committed."""
        return [one for one, of in self.held.items() if not of.committed and one.epoch == self.epoch and not of.lost]

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def commit_late(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(self._open())))

    def _commit(self, version: ContainerVersion) -> None:
        self.held[version].committed = True
        waiting = {one: of.resumable for one, of in self.held.items() if of.committed and not of.protected}
        skips = plan_skips(waiting, version, self.held[version].resumable)
        of_epoch = sorted((one for one in waiting if one.epoch == version.epoch), key=recency)
        for skip in skips:
            assert skip.version not in (of_epoch[0], version), "what is being copied, and what supersedes"
            assert self.held[version].resumable or not self.held[skip.version].resumable, "F43"
            assert skip.version.epoch == self.epoch
            self._drop(skip.version)
        left = [one for one in of_epoch if one in self.held and recency(one) <= recency(version)]
        if self.held[version].resumable:
            assert len(left) <= 2, "one whose copies are made, and the newest"

    @precondition(lambda self: self._unprotected())
    @rule(data=st.data())
    def protect(self, data: st.DataObject) -> None:
        self.held[data.draw(st.sampled_from(self._unprotected()))].protected = True

    def _unprotected(self) -> list[ContainerVersion]:
        return [one for one, of in self.held.items() if of.recoverable and not of.protected]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), complete=st.booleans())
    def local_copy(self, data: st.DataObject, complete: bool) -> None:
        """One of it is put in quarantine here, or brought again."""
        self.held[data.draw(st.sampled_from(sorted(self.held)))].complete_locally = complete

    @precondition(lambda self: self.attempt > 3)
    @rule()
    def lose_a_node(self) -> None:
        """What has no copies is lost; the job comes back and looks for what is recoverable."""
        for of in self.held.values():
            of.lost = of.lost or not of.protected
        self.epoch += 1
        self.attempt = 0
        self.look_up()

    @rule()
    def look_up(self) -> None:
        found = [one for one, of in self.held.items() if of.recoverable and of.resumable]
        self.found = max(found, key=recency, default=None)
        self.step = self.found.container.step if self.found else 0

    @rule()
    def retain(self) -> None:
        for drop in plan_retention(self._views(), self.keep_last, self.keep_every):
            self._drop_superseded(drop.version)

    @rule()
    def press(self) -> None:
        """Somebody needs room: no more than what is needed is kept."""
        for drop in plan_retention(self._views(), 1):
            self._drop_superseded(drop.version)
            self.given_up.add(drop.version)

    def _drop_superseded(self, version: ContainerVersion) -> None:
        gone = self.held[version]
        assert any(
            of.protected
            and of.complete_locally
            and (of.resumable or not gone.resumable)
            and recency(one) > recency(version)
            for one, of in self.held.items()
        ), "F49, F43: by something safer and newer, from which a job can go on when it could from this"
        self._drop(version)

    def _views(self) -> list[RetentionView]:
        return [
            RetentionView(
                one,
                of.committed,
                of.protected,
                of.complete_locally,
                recoverable=one == self.found,
                resumable=of.resumable,
            )
            for one, of in self.held.items()
        ]

    def _drop(self, version: ContainerVersion) -> None:
        gone = self.held[version]
        for resumable_only in (False, True):
            safe = [one for one, of in self.held.items() if of.recoverable and (of.resumable or not resumable_only)]
            if gone.recoverable and (gone.resumable or not resumable_only):
                assert recency(version) < max(map(recency, safe)), "never the newest recoverable"
        del self.held[version]

    @invariant()
    def newest_stay(self) -> None:
        """Never broken, 4; F04, F43, F49: of all that ever was."""
        for resumable_only in (False, True):
            for reached in ("committed", "protected"):
                ever = [
                    one
                    for one, of in self.ever.items()
                    if getattr(of, reached) and (of.resumable or not resumable_only)
                ]
                if ever:
                    assert max(ever, key=recency) in self.held, (reached, resumable_only)

    @invariant()
    def configured_ones_stay(self) -> None:
        if not self.ever:
            return
        protected = sorted((one for one, of in self.ever.items() if of.protected), key=recency)
        resumable = [one for one in protected if self.ever[one].resumable]
        assert set(resumable[-self.keep_last :]) <= self.held.keys() | self.given_up
        if self.keep_every:
            assert {one for one in protected if one.container.step % self.keep_every == 0} <= (
                self.held.keys() | self.given_up
            )


class TestRetention(RetentionMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
