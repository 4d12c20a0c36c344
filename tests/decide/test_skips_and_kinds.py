"""Which saves are skipped."""

from __future__ import annotations

import pytest
from decide_samples import manifest, version

from replicator.decide.backpressure import plan_skips
from replicator.decide.retention import RetentionView, plan_retention
from replicator.decide.supersede import still_wanted, superseding
from replicator.errors import ConfigError
from replicator.ids import CheckpointContainerId, ContainerVersion
from replicator.wire import manifest_from_bytes, manifest_to_bytes

A, B, C, D = (version(step, attempt=step) for step in (1, 2, 3, 4))


def _all(*versions: ContainerVersion) -> dict[ContainerVersion, bool]:
    return dict.fromkeys(versions, True)


def test_one_whose_copies_are_made_and_the_newest_stay() -> None:
    assert plan_skips(_all(A), A) == ()
    assert plan_skips(_all(A, B), B) == ()
    (skip,) = plan_skips(_all(C, A, B), C)
    assert skip.version == B
    assert skip.reason == (
        "Step 2 (epoch 1, attempt 2) was skipped: superseded by step 3 (epoch 1, attempt 3), which is committed, while "
        "the copies of step 1 (epoch 1, attempt 1) were still being made"
    )
    assert [skip.version for skip in plan_skips(_all(D, C, B, A), D)] == [B, C]


def test_what_is_newer_than_what_is_committed_now_is_left_alone() -> None:
    assert plan_skips(_all(A, B, C), B) == ()


def test_other_jobs_and_epochs_are_left_alone() -> None:
    later = version(5, epoch=2, attempt=1)
    assert plan_skips(_all(A, B, C, later), later) == ()
    other = ContainerVersion(CheckpointContainerId("other", 2), B.generation)
    assert plan_skips(_all(A, other, D), D) == ()


def test_a_model_only_one_skips_nothing_that_a_job_can_go_on_from() -> None:
    """F43."""
    waiting = {A: True, B: True, C: False, D: False}
    assert [skip.version for skip in plan_skips(waiting, D, newest_resumable=False)] == [C]
    assert [skip.version for skip in plan_skips({**waiting, D: True}, D)] == [B, C]


def test_a_model_only_one_evicts_nothing_that_a_job_can_go_on_from() -> None:
    """F43: the last save, of the model alone, is the newest protected one; the resumable ones stay as they were."""
    steps = [RetentionView(one, True, True) for one in (A, B, C)]
    last = RetentionView(D, True, True, resumable=False)
    assert [drop.version for drop in plan_retention([*steps, last], 2)] == [A]
    assert plan_retention([*steps[:1], last], 1) == ()
    # The other way round it goes like all others, and does not count as one that is kept.
    early = RetentionView(version(1, attempt=0), True, True, resumable=False)
    assert [drop.version for drop in plan_retention([early, *steps], 3)] == [early.version]


def test_what_a_job_can_go_on_from_is_superseded_by_its_like_only() -> None:
    """F43: the copies of the resumable one are still wanted, however many newer ones of the model alone are safe."""
    protected = {C: False, D: False}
    assert superseding(A, False, protected) == D
    assert superseding(A, True, protected) is None
    assert superseding(A, True, {**protected, B: True}) == B
    assert superseding(B, True, {A: True, B: True}) is None
    assert superseding(ContainerVersion(CheckpointContainerId("other", 1), A.generation), False, protected) is None


def test_copies_of_both_kinds_are_wanted_and_few_of_each() -> None:
    """F43."""
    committed = {A: True, B: False, C: False, D: False}
    assert still_wanted(committed, {}, 2) == (D, C, A)
    assert still_wanted(committed, {C: False}, 2) == (D, A)
    assert still_wanted(committed, {C: True}, 2) == (D,)
    assert still_wanted(committed, dict.fromkeys(committed, True), 2) == ()


def test_every_nth_step_is_kept_also() -> None:
    steps = [RetentionView(version(step), True, True) for step in range(0, 70, 10)]
    kept = {0, 30, 60, 50}
    assert {drop.version.container.step for drop in plan_retention(steps, 2, keep_every=30)} == set(
        range(0, 70, 10)
    ) - kept
    unprotected = RetentionView(version(30), True, False)
    assert [drop.version for drop in plan_retention([unprotected, steps[-1]], 1, 30)] == [version(30)]
    with pytest.raises(ConfigError, match="keep_every"):
        plan_retention(steps, 1, -1)


def test_the_manifest_says_what_is_resumable() -> None:
    """And one from before there was such a word is resumable."""
    made = manifest(A)
    assert manifest_from_bytes(manifest_to_bytes(made)).resumable
    import dataclasses

    assert not manifest_from_bytes(manifest_to_bytes(dataclasses.replace(made, resumable=False))).resumable
