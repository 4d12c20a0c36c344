"""Which objects are offered next, which are given up, and what is said then: no network, no clock."""

from __future__ import annotations

import pytest

from replicator.agent.offers import MAX_OFFER_OBJECTS, MAX_OFFER_SMALL, OfferQueue
from replicator.errors import (
    InvalidIdError,
    ObjectExistsError,
    PeerUnavailableError,
    ReplicationError,
    ReplicatorError,
    StaleEpochError,
    TransferError,
)
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation
from replicator.store.trailer import ObjectInfo

VERSION = ContainerVersion(CheckpointContainerId("job", 1), make_generation(1, 1))
GONE = PeerUnavailableError("nobody at 1.2.3.4:5")


def _info(name: str, blocks: int = 1) -> ObjectInfo:
    return ObjectInfo(VERSION.object(name), 4096 * blocks, 0, 4096, (0,) * blocks, "me", "ab")


def _ignore(event: object) -> None:
    pass


@pytest.fixture
def queue() -> OfferQueue:
    return OfferQueue("buddy-7", jitter=lambda: 0.5)


def test_offers_are_bounded_by_objects_and_by_blocks(queue: OfferQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """F28: a message has room for so many block tables."""
    for i in range(MAX_OFFER_SMALL + 1):
        queue.add(_info(f"o{i}"), 1, 10, _ignore, 0)
        queue.add(_info(f"large{i}", 65), 1, 10, _ignore, 0)
    sizes = []
    while batch := queue.take(0):
        assert len({item.object.name.startswith("large") for item in batch}) == 1
        sizes.append(len(batch))
    assert sizes == [MAX_OFFER_SMALL, *[MAX_OFFER_OBJECTS] * 4, 1, 1]
    monkeypatch.setattr("replicator.agent.offers.MAX_OFFER_BLOCKS", 10)
    for name in ("a", "b", "huge", "c"):
        queue.add(_info(name, 100 if name == "huge" else 5), 1, 10, _ignore, 0)
    assert [[item.object.name for item in queue.take(0)] for _ in range(3)] == [["a", "b"], ["huge"], ["c"]]


def test_an_offer_is_of_one_epoch(queue: OfferQueue) -> None:
    """F11."""
    queue.add(_info("a"), 1, 10, _ignore, 0)
    queue.add(_info("b"), 2, 10, _ignore, 0)
    assert [[item.epoch for item in queue.take(0)] for _ in range(2)] == [[1], [2]]


def test_the_same_object_is_on_its_way_once_and_all_who_asked_are_told(queue: OfferQueue) -> None:
    queue.add(_info("a"), 1, 10, _ignore, 0)
    queue.add(_info("a"), 1, 10, _ignore, 1)
    (item,) = queue.take(1)
    assert len(item.outcomes) == 2
    for _ in range(100):
        queue.add(_info("a"), 1, 10, _ignore, 1)
    assert len(item.outcomes) <= 8


def test_pauses_grow_and_are_bounded(queue: OfferQueue) -> None:
    queue.add(_info("a"), 1, 1000, _ignore, 0)
    now, pauses = 0.0, []
    for _ in range(12):
        (item,) = queue.take(now)
        assert queue.failed(item, GONE, now)
        due = queue.next_due(now)
        assert due is not None
        assert queue.take(now + due * 0.99) == []
        pauses.append(due)
        now += due
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert max(pauses) == pytest.approx(5.0)


def test_it_is_given_up_after_the_deadline_without_progress_and_not_before(queue: OfferQueue) -> None:
    """F47: progress, not total time."""
    queue.add(_info("a"), 1, 10, _ignore, 0)
    (item,) = queue.take(0)
    queue.progressed(item, 9)
    assert queue.failed(item, GONE, 18)
    (item,) = queue.take(100)
    assert not queue.failed(item, GONE, 100)


def test_asking_again_gives_it_another_deadline(queue: OfferQueue) -> None:
    queue.add(_info("a"), 1, 10, _ignore, 0)
    (item,) = queue.take(0)
    queue.add(_info("a"), 1, 10, _ignore, 9)
    assert queue.failed(item, GONE, 18)


@pytest.mark.parametrize("kind", [StaleEpochError, ObjectExistsError, InvalidIdError, ReplicationError])
def test_a_final_refusal_is_not_tried_again(queue: OfferQueue, kind: type[ReplicatorError]) -> None:
    queue.add(_info("a"), 1, 10, _ignore, 0)
    (item,) = queue.take(0)
    error = kind("no")
    assert not queue.failed(item, error, 0.1)
    verdict = queue.verdict(item, error, 0.1)
    assert type(verdict) is (StaleEpochError if kind is StaleEpochError else ReplicationError)


def test_the_verdict_names_the_buddy_and_the_attempts(queue: OfferQueue) -> None:
    queue.add(_info("a"), 1, 2, _ignore, 0)
    now = 0.0
    errors = [GONE, TransferError("stalled at block 3"), GONE]
    for error in errors:
        (item,) = queue.take(now)
        queue.failed(item, error, now)
        now = item.not_before
    text = str(queue.verdict(item, GONE, now))
    assert all(part in text for part in ("buddy-7", "3 attempts", "2.0 s", "block 3", "1.2.3.4:5", "job/step-1_ckpt"))


def test_reasons_of_a_thousand_attempts_are_bounded(queue: OfferQueue) -> None:
    queue.add(_info("a"), 1, 1e9, _ignore, 0)
    for i in range(1000):
        (item,) = queue.take(i * 10.0)
        queue.failed(item, TransferError(f"reason {i}"), i * 10.0)
    assert len(item.failures) <= 4
    assert "reason 0" in item.failures[0]
    assert "reason 999" in item.failures[-1]


def test_what_was_never_offered_is_overdue_when_the_buddy_answers_nothing(queue: OfferQueue) -> None:
    """F15: objects behind those that fill the streams to a dead buddy."""
    for i in range(MAX_OFFER_SMALL + 1):
        queue.add(_info(f"o{i}"), 1, 10, _ignore, 0)
    offered = queue.take(0)
    assert queue.overdue(9.9) == []
    assert [item.object.name for item in queue.overdue(10)] == [f"o{MAX_OFFER_SMALL}"]
    queue.progressed(offered[0], 5)
    assert queue.overdue(10) == []
