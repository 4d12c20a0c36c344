"""The model of a job's history: which ones it allows, and what it says of the others."""

from __future__ import annotations

import pytest

from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation

from .history import CommitAsked, Committed, Damaged, Event, History, Opened, Protected, Restored, problems


def version(step: int, epoch: int = 1, attempt: int = 1) -> ContainerVersion:
    return ContainerVersion(CheckpointContainerId("job", step), make_generation(epoch, attempt))


OLD, NEW = version(1), version(2, attempt=2)
SAVED: tuple[Event, ...] = (
    Opened(0.0, 1.0, 1, 0, True),
    CommitAsked(2.0, OLD, 1),
    Committed(2.1, OLD),
    Protected(2.2, OLD),
    CommitAsked(3.0, NEW, 1),
    Committed(3.1, NEW),
    Protected(3.2, NEW),
)


MODEL: tuple[Event, ...] = (CommitAsked(6.0, version(3, attempt=3), 1, False), Protected(6.2, version(3, attempt=3)))


def restored(
    one: ContainerVersion | None,
    *,
    calm: bool = True,
    ranks: tuple[ContainerVersion | None, ...] | None = None,
    wrong: tuple[str, ...] = (),
    epoch: int = 2,
) -> Restored:
    return Restored(10.0, 11.0, epoch, one, calm, (one, one) if ranks is None else ranks, wrong)


@pytest.mark.parametrize(
    "then",
    [
        (restored(NEW),),
        (restored(OLD, calm=False),),
        (restored(None, calm=False),),
        # Lost on one node it must be there, on two it need not.
        (Damaged(4.0, NEW, "a"), Damaged(5.0, NEW, "a"), restored(NEW)),
        (Damaged(4.0, NEW, "a"), Damaged(5.0, NEW, "b"), restored(OLD)),
        # Asked for and never told of: it may be there.
        (CommitAsked(6.0, version(3, attempt=3), 1), restored(version(3, attempt=3))),
        (CommitAsked(6.0, version(3, attempt=3), 1), restored(NEW)),
        (Opened(9.0, 9.1, 2, 1, True), restored(NEW)),
        # Newer and protected, but of the model alone.
        (*MODEL, restored(NEW)),
    ],
)
def test_histories_that_can_be(then: tuple[Event, ...]) -> None:
    assert list(problems(History([*SAVED, *then]))) == []


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ((restored(OLD),), "newer, was protected"),
        ((restored(None),), "newer, was protected"),
        ((Damaged(4.0, NEW, "a"), restored(OLD)), "newer, was protected"),
        # Lost after it was restored.
        ((restored(OLD), Damaged(12.0, NEW, "a"), Damaged(12.0, NEW, "b")), "newer, was protected"),
        ((*MODEL, restored(version(3, attempt=3))), "model alone"),
        ((*MODEL, restored(OLD)), "newer, was protected"),
        ((restored(version(9, attempt=9)),), "never committed"),
        ((restored(version(9, attempt=9), calm=False),), "never committed"),
        ((restored(NEW, wrong=("shard-0",)),), "other bytes"),
        ((restored(NEW, ranks=(NEW, OLD)),), "ranks restored different"),
        ((CommitAsked(6.0, version(3, epoch=7), 1), restored(version(3, epoch=7))), "of a later one"),
        ((Committed(6.0, version(4, attempt=4)),), "nobody had asked"),
        ((Opened(9.0, 9.1, 1, 1, True),), "knew epoch 1 already"),
    ],
)
def test_histories_that_cannot_be(then: tuple[Event, ...], said: str) -> None:
    found = list(problems(History([*SAVED, *then])))
    assert any(said in problem for problem in found), found
