"""Futures of replications and commits, as the agent's events and replies come in any order."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from replicator.client import outstanding as module
from replicator.client.outstanding import Outstanding
from replicator.errors import CommitError, ReplicationError, TransferStalledError
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation
from replicator.v1 import local_pb2, types_pb2
from replicator.wire import object_to_pb, version_to_pb

VERSION = ContainerVersion(CheckpointContainerId("job", 5), make_generation(3, 1))
ONE, TWO = VERSION.object("one"), VERSION.object("two")


def replica(one: object, buddy: str, error: Exception | None = None) -> local_pb2.AttachEvent:
    event = local_pb2.ReplicationEvent(object=object_to_pb(one), buddy_node_id=buddy, ok=error is None)  # type: ignore[arg-type]
    if error is not None:
        event.error_kind, event.error_message = type(error).__name__, str(error)
    else:
        event.verified.CopyFrom(types_pb2.ObjectDescriptor(size_bytes=10, crc32c=20))
        event.lane, event.duration_ms = "bulk", 1500
    return local_pb2.AttachEvent(replication=event)


def commit(ok: bool = True, protected: bool = False) -> local_pb2.AttachEvent:
    event = local_pb2.CommitEvent(container=version_to_pb(VERSION), ok=ok, is_protected=protected, stored_on=["a", "b"])
    if not ok:
        event.error_kind, event.error_message = "CommitError", "only here"
    return local_pb2.AttachEvent(commit=event)


def test_one_future_per_buddy() -> None:
    waiting = Outstanding()
    entries = waiting.expect_replicas([ONE, TWO], 3)
    futures = waiting.name_buddies(entries, ["b1", "b2"])
    assert [len(futures[one]) for one in (ONE, TWO)] == [2, 2]
    waiting.on_event(replica(ONE, "b2"))
    assert [future.done() for future in futures[ONE]] == [False, True]
    info = futures[ONE][1].result()
    assert (info.object, info.buddy_node_id, info.size, info.crc32c, info.lane, info.duration_s) == (
        ONE,
        "b2",
        10,
        20,
        "bulk",
        1.5,
    )
    waiting.on_event(replica(ONE, "b1", TransferStalledError("no bytes")))
    with pytest.raises(TransferStalledError, match="no bytes"):
        futures[ONE][0].result()
    assert waiting.replications() == {("job", 3): [TWO]}


def test_event_overtakes_reply() -> None:
    waiting = Outstanding()
    entries = waiting.expect_replicas([ONE], 3)
    waiting.on_event(replica(ONE, "b1"))
    (future,) = waiting.name_buddies(entries, ["b1"])[ONE]
    assert future.result().buddy_node_id == "b1"
    assert waiting.replications() == {}


def test_asked_twice_gives_the_same_futures() -> None:
    waiting = Outstanding()
    first = waiting.name_buddies(waiting.expect_replicas([ONE], 3), ["b1"])[ONE]
    again = waiting.expect_replicas([ONE], 3)
    waiting.on_event(replica(ONE, "b1"))
    assert waiting.name_buddies(again, ["b1"])[ONE] == first


def test_other_buddies_after_a_restart() -> None:
    """Nobody waits for ever on a node that is no longer a buddy."""
    waiting = Outstanding()
    (old,) = waiting.name_buddies(waiting.expect_replicas([ONE], 3), ["b1"])[ONE]
    waiting.name_buddies(waiting.expect_replicas([ONE], 3), ["b2"])
    with pytest.raises(ReplicationError, match="buddies changed"):
        old.result(0)
    waiting.on_event(replica(ONE, "b2"))
    assert waiting.replications() == {}


def test_no_buddies() -> None:
    waiting = Outstanding()
    assert waiting.name_buddies(waiting.expect_replicas([ONE], 3), []) == {ONE: []}
    assert waiting.replications() == {}


def test_refused() -> None:
    waiting = Outstanding()
    entries = waiting.expect_replicas([ONE], 3)
    waiting.on_event(replica(TWO, "b1"))
    waiting.fail_replicas(entries, ReplicationError("no"))
    assert waiting.replications() == {}


def test_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every queue has a bound: the oldest is given up, with an error that says so."""
    monkeypatch.setattr(module, "MAX_OBJECTS", 3)
    waiting = Outstanding()
    objects = [VERSION.object(f"o{i}") for i in range(4)]
    futures = [waiting.name_buddies(waiting.expect_replicas([one], 3), ["b1"])[one][0] for one in objects]
    with pytest.raises(ReplicationError, match="more than 3"):
        futures[0].result(0)
    assert not any(future.done() for future in futures[1:])


def test_cancelled_by_its_owner() -> None:
    waiting = Outstanding()
    (future,) = waiting.name_buddies(waiting.expect_replicas([ONE], 3), ["b1"])[ONE]
    future.set_exception(RuntimeError("somebody else's"))
    waiting.on_event(replica(ONE, "b1"))
    assert waiting.replications() == {}


def test_commit_then_protected() -> None:
    waiting = Outstanding()
    futures = waiting.expect_commit(VERSION, local_pb2.CommitRequest())
    assert waiting.expect_commit(VERSION, local_pb2.CommitRequest()) is futures
    waiting.on_event(commit())
    assert futures.committed.result(0).stored_on == ("a", "b")
    assert not futures.protected.done()
    assert list(waiting.commits()) == [VERSION]
    waiting.on_event(commit(protected=True))
    assert futures.protected.result(0).is_protected
    assert waiting.commits() == {}


def test_protected_at_once() -> None:
    waiting = Outstanding()
    futures = waiting.expect_commit(VERSION, local_pb2.CommitRequest())
    waiting.on_event(commit(protected=True))
    assert futures.committed.done()
    assert futures.protected.done()


def test_commit_fails() -> None:
    waiting = Outstanding()
    futures = waiting.expect_commit(VERSION, local_pb2.CommitRequest())
    waiting.on_event(commit(ok=False))
    for future in (futures.committed, futures.protected):
        with pytest.raises(CommitError, match="only here"):
            future.result(0)
    assert waiting.commits() == {}


def test_closing_resolves_everything() -> None:
    waiting = Outstanding()
    (future,) = waiting.name_buddies(waiting.expect_replicas([ONE], 3), ["b1"])[ONE]
    futures = waiting.expect_commit(VERSION, local_pb2.CommitRequest())
    waiting.fail_all(lambda awaited: ReplicationError(f"closed before {awaited}"))
    everything: list[Future[object]] = [future, futures.committed, futures.protected]  # type: ignore[list-item]
    assert all("closed before" in str(one.exception(0)) for one in everything)


def test_a_callback_may_call_in() -> None:
    """Futures are resolved outside the lock."""
    waiting = Outstanding()
    (future,) = waiting.name_buddies(waiting.expect_replicas([ONE], 3), ["b1"])[ONE]
    seen: list[object] = []
    future.add_done_callback(lambda _: seen.append(dict(waiting.replications())))
    waiting.on_event(replica(ONE, "b1"))
    assert len(seen) == 1
