"""What may be dropped, and what never."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from decide_samples import version
from hypothesis import given
from hypothesis import strategies as st

from replicator.decide.retention import RetentionView, plan_retention
from replicator.decide.types import recency
from replicator.errors import ConfigError
from replicator.ids import CheckpointContainerId, ContainerVersion

VERSIONS = st.builds(version, st.integers(0, 4), st.integers(1, 3), st.integers(0, 1))


@st.composite
def views(draw: st.DrawFn) -> RetentionView:
    committed = draw(st.booleans())
    return RetentionView(
        draw(VERSIONS),
        committed,
        committed and draw(st.booleans()),
        draw(st.booleans()),
        committed and draw(st.booleans()),
        draw(st.integers(0, 5)) == 0,
        was_protected=committed and draw(st.booleans()),
    )


LISTS = st.lists(views(), max_size=10, unique_by=lambda view: view.version)


def newest(items: list[RetentionView], qualifies: Callable[[RetentionView], bool]) -> ContainerVersion | None:
    chosen = sorted((view.version for view in items if qualifies(view)), key=recency)
    return chosen[-1] if chosen else None


@given(LISTS, st.integers(1, 3))
def test_what_is_needed_is_never_dropped(items: list[RetentionView], keep_last: int) -> None:
    """F04, F49: newest committed, protected, recoverable; the kept ones; whatever nothing protected supersedes."""
    dropped = {drop.version for drop in plan_retention(items, keep_last)}
    for qualifies in (
        lambda view: view.committed,
        lambda view: view.is_protected,
        lambda view: view.recoverable,
    ):
        assert newest(items, qualifies) not in dropped
    protected = sorted((view.version for view in items if view.is_protected), key=recency)
    assert not dropped & set(protected[-keep_last:])
    once = sorted((view.version for view in items if view.is_protected or view.was_protected), key=recency)
    assert not dropped & set(once[-keep_last:])
    assert not dropped & {view.version for view in items if view.pinned}
    safe = newest(items, lambda view: view.is_protected and view.complete_locally)
    for gone in dropped:
        assert safe is not None
        assert recency(safe) > recency(gone)


@given(LISTS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_order_of_the_input_does_not_matter(items: list[RetentionView], keep_last: int, chance: random.Random) -> None:
    other = list(items)
    chance.shuffle(other)
    assert plan_retention(items, keep_last) == plan_retention(other, keep_last)


@given(LISTS, st.integers(1, 3))
def test_second_run_drops_nothing_more(items: list[RetentionView], keep_last: int) -> None:
    dropped = {drop.version for drop in plan_retention(items, keep_last)}
    assert plan_retention([view for view in items if view.version not in dropped], keep_last) == ()


@given(st.lists(views(), min_size=1, max_size=10, unique_by=lambda view: view.version))
def test_superseded_ones_do_go(items: list[RetentionView]) -> None:
    """With nothing special about them, all older than a protected container are dropped with keep_last = 1."""
    plain = [RetentionView(view.version, view.committed, False) for view in items]
    shield = RetentionView(version(9, epoch=9), True, True)
    dropped = {drop.version for drop in plan_retention([*plain, shield], 1)}
    assert dropped == {view.version for view in plain}


def test_written_locally_is_not_enough() -> None:
    """F49: step 20 is committed but its replicas are not acknowledged; step 10 stays."""
    assert plan_retention([RetentionView(version(10), True, True), RetentionView(version(20), True, False)], 1) == ()


def test_gap_in_the_newest_protected_keeps_the_one_before() -> None:
    """F01: an object of step 20 was quarantined here, so step 20 does not make step 10 superfluous."""
    steps = [RetentionView(version(0), True, True), RetentionView(version(10), True, True)]
    damaged = RetentionView(version(20), True, True, complete_locally=False)
    assert [drop.version for drop in plan_retention([*steps, damaged], 1)] == [version(0)]


def test_leftovers_of_an_older_epoch_wait_for_a_protected_checkpoint() -> None:
    """Step 30 was abandoned when the job went back to step 10: it goes when epoch 2 has protected something."""
    protected, leftover = RetentionView(version(10), True, True), RetentionView(version(30), False, False)
    begun = RetentionView(version(15, epoch=2), True, False)
    assert plan_retention([protected, leftover, begun], 2) == ()
    done = RetentionView(version(15, epoch=2), True, True)
    drops = plan_retention([protected, leftover, done], 2)
    assert [(drop.version, drop.reason) for drop in drops] == [
        (
            version(30),
            "Step 30 (epoch 1, attempt 0) has no manifest on this node, "
            "and step 15 (epoch 2, attempt 0) is newer and protected.",
        )
    ]


def test_keep_last_counts_protected_ones_and_oldest_go_first() -> None:
    steps = [RetentionView(version(step), True, True) for step in (0, 10, 20, 30)]
    drops = plan_retention(steps, 2)
    assert [drop.version for drop in drops] == [version(0), version(10)]
    assert "older than the 2 newest protected checkpoints" in drops[0].reason


def test_known_recoverable_outlives_a_protected_one_that_lost_its_holders() -> None:
    """Never broken, 4: the newest recoverable container stays, whatever is newer by name."""
    only_hope = RetentionView(version(10), True, False, recoverable=True)
    assert plan_retention([only_hope, *(RetentionView(version(s), True, True) for s in (20, 30))], 1) != ()
    dropped = plan_retention([only_hope, *(RetentionView(version(s), True, True) for s in (20, 30))], 1)
    assert [drop.version for drop in dropped] == [version(20)]


def test_jobs_do_not_supersede_each_other() -> None:
    other = ContainerVersion(CheckpointContainerId("other", 5), version(0).generation)
    assert plan_retention([RetentionView(other, True, False), RetentionView(version(20), True, True)], 1) == ()


def test_keep_last_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_last: expected 1 or more, found 0"):
        plan_retention([], 0)


def test_what_lacks_a_copy_since_it_was_protected_is_still_one_of_those_that_are_kept() -> None:
    """F01: its bad copy is to be made again, not to be the reason for dropping the good ones."""
    older = RetentionView(version(1), True, False, was_protected=True)
    never = RetentionView(version(2), True, False)
    newest_one = RetentionView(version(3), True, True)
    assert [drop.version for drop in plan_retention([older, never, newest_one], 2)] == [never.version]
    drops = plan_retention([older, never, newest_one], 1)
    assert [drop.version for drop in drops] == [older.version, never.version]
    assert "is older than the 1 newest protected" in drops[0].reason
    assert "was never acknowledged by all buddies" in drops[1].reason


def test_what_keep_every_keeps_stays_while_a_lost_copy_of_it_is_made_again() -> None:
    """F04: the newest step has its copies back first; that must not take the older ones away that are still short."""
    short = RetentionView(version(10), True, False, was_protected=True)
    between = RetentionView(version(15), True, False, was_protected=True)
    drops = plan_retention([short, between, RetentionView(version(20), True, True)], 1, keep_every=10)
    assert [drop.version for drop in drops] == [between.version]
