"""All ranks get the same answer or the same error, within a deadline, through a real store of torch.distributed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from replicator.client.agreement import Ranks, SingleRank, StoreRanks
from replicator.errors import ConfigError, DeadlineExceededError, ReplicatorError

WORLD = 4


@pytest.fixture(params=["tcp", "file"])
def ranks(request: pytest.FixtureRequest, tmp_path: Any) -> list[StoreRanks]:
    """WORLD ranks, each with its own connection to one store."""
    if request.param == "file":
        stores = [dist.FileStore(str(tmp_path / "store"), WORLD) for _ in range(WORLD)]
    else:
        master = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        others = [dist.TCPStore("127.0.0.1", master.port, None, False) for _ in range(WORLD - 1)]
        stores = [master, *others]
    return [StoreRanks(store, rank, WORLD, "test") for rank, store in enumerate(stores)]


def on_all(ranks: Sequence[Ranks], body: Callable[[Ranks], Any]) -> list[Any]:
    """The result or the exception of `body` on each rank, all at the same time."""
    outcomes: list[Any] = [None] * len(ranks)

    def run(index: int) -> None:
        try:
            outcomes[index] = body(ranks[index])
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


def joined(answers: Sequence[bytes]) -> bytes:
    return b"|".join(answers)


def test_all_get_what_rank_0_decides(ranks: list[StoreRanks]) -> None:
    def body(one: Ranks) -> list[bytes]:
        return [one.agree("a word", lambda i=i: b"%d.%d" % (one.rank, i), joined, 20) for i in range(3)]  # type: ignore[misc]

    expected = [b"|".join(b"%d.%d" % (rank, i) for rank in range(WORLD)) for i in range(3)]
    assert on_all(ranks, body) == [expected] * WORLD


def test_an_answer_of_many_pieces(ranks: list[StoreRanks]) -> None:
    """A store refuses large values; an answer of any size arrives."""
    large = bytes(range(256)) * (40 << 10)

    def body(one: Ranks) -> bytes:
        return one.agree("much", bytes, lambda _: large, 20)

    assert on_all(ranks, body) == [large] * WORLD


def test_the_first_value_counts_and_a_list_is_of_all(ranks: list[StoreRanks]) -> None:
    firsts = on_all(ranks, lambda one: one.first("word", b"of %d" % one.rank))
    assert len(set(firsts)) == 1
    assert firsts[0] in [b"of %d" % rank for rank in range(WORLD)]

    def append(one: Ranks) -> None:
        for number in range(3):
            one.append("list", b"%d.%d" % (one.rank, number))

    for _ in range(2):
        assert ranks[0].collect("list", 20) == []
        on_all(ranks, append)
        every = [b"%d.%d" % (rank, number) for rank in range(WORLD) for number in range(3)]
        assert sorted(ranks[0].collect("list", 20)) == every
    alone = SingleRank()
    alone.append("list", b"1")
    assert alone.first("word", b"2") == b"2"
    assert alone.collect("list", 1) == [b"1"]
    assert alone.collect("list", 1) == []


def test_an_error_of_one_rank_reaches_all(ranks: list[StoreRanks]) -> None:
    """F41: never one rank with an answer and another with an error."""

    def body(one: Ranks) -> bytes:
        def local() -> bytes:
            if one.rank == 2:
                raise ConfigError("no such thing")
            return b""

        return one.agree("a word", local, joined, 20)

    outcomes = on_all(ranks, body)
    assert {type(error) for error in outcomes} == {ConfigError}
    assert {str(error) for error in outcomes} == {"rank 2: no such thing"}


def test_an_error_of_the_decision_reaches_all(ranks: list[StoreRanks]) -> None:
    def decide(_: object) -> bytes:
        raise ZeroDivisionError("of all things")

    outcomes = on_all(ranks, lambda one: one.agree("a word", bytes, decide, 20))
    assert {type(error) for error in outcomes} == {ReplicatorError}
    assert {str(error) for error in outcomes} == {"ZeroDivisionError: of all things"}


@pytest.mark.parametrize("ranks", ["tcp"], indirect=True)
def test_a_rank_that_does_not_come_is_named(ranks: list[StoreRanks]) -> None:
    """F15, F41: a bounded wait, and its error says who was awaited. On every rank that did come."""
    outcomes = on_all(ranks[:3], lambda one: one.agree("a word", bytes, joined, 0.5))
    assert {type(error) for error in outcomes} == {DeadlineExceededError}
    assert {str(error) for error in outcomes} == {str(DeadlineExceededError.of("a word", "rank 3 of 4", 0.5))}


@pytest.mark.parametrize("ranks", ["tcp"], indirect=True)
def test_rank_0_does_not_come(ranks: list[StoreRanks]) -> None:
    started = time.monotonic()
    outcomes = on_all(ranks[1:], lambda one: one.agree("a word", bytes, joined, 0.4))
    assert time.monotonic() - started < 5
    assert {str(error) for error in outcomes} == {str(DeadlineExceededError.of("a word", "rank 0 of 4", 2.6))}


def test_the_store_ends_with_rank_0() -> None:
    """F11: every call says that the ranks' store is gone, what was awaited, and what to do. No error of PyTorch's."""
    master = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = StoreRanks(dist.TCPStore("127.0.0.1", master.port, None, False, timedelta(seconds=1)), 1, 2, "test")
    ranks.post("a word", b"1")
    del master
    calls: dict[str, Callable[[], Any]] = {
        "an answer": lambda: ranks.agree("an answer", bytes, joined, 3),
        "what is posted": lambda: ranks.post("what is posted", b""),
        "what is read": lambda: ranks.read("what is read", 3),
        "who is first": lambda: ranks.first("who is first", b"1"),
        "what is appended": lambda: ranks.append("what is appended", b"1"),
        "what is collected": lambda: ranks.collect("what is collected", 3),
        "a purpose": lambda: ranks.apart("a purpose"),
    }
    started = time.monotonic()
    for awaited, call in calls.items():
        with pytest.raises(ReplicatorError, match=f"{awaited} from the store .* rank 0 holds.* start all ranks again"):
            call()
    assert time.monotonic() - started < 10


def test_values_of_finished_rounds_are_removed(ranks: list[StoreRanks]) -> None:
    """The store of a job that runs for months stays small."""
    store = ranks[0]._store
    on_all(ranks, lambda one: one.agree("a word", bytes, joined, 20))
    assert store.check(["test/1/result"])
    on_all(ranks, lambda one: one.agree("a word", bytes, joined, 20))
    assert not any(store.check([f"test/1/{name}"]) for name in ("result", "1", "2", "3"))
    assert store.check(["test/2/result"])


def test_posted_values(ranks: list[StoreRanks]) -> None:
    ranks[0].post("generation", b"7")
    ranks[0].post("generation", b"8")
    assert [one.read("generation", 20) for one in ranks] == [b"8"] * WORLD
    with pytest.raises(DeadlineExceededError, match="something else"):
        ranks[1].read("something else", 0.1)


def test_what_an_earlier_incarnation_left_is_not_an_answer(ranks: list[StoreRanks]) -> None:
    """F11: torchrun keeps its store over an elastic restart. Each time all ranks meet anew, in any order."""
    stores = [one._store for one in ranks]
    names = set()
    for number in range(4):

        def body(one: Ranks, number: int = number) -> tuple[str, bytes]:
            if (one.rank + number) % 2:
                time.sleep(0.1)  # who comes first finds what the last ones left
            met = StoreRanks.meet(stores[one.rank], one.rank, WORLD, "place", 20)
            return met._name, met.agree("a word", lambda: b"%d" % number, joined, 20)

        outcomes = on_all(ranks, body)
        assert {answer for _, answer in outcomes} == {b"|".join([b"%d" % number] * WORLD)}
        (name,) = {name for name, _ in outcomes}
        names.add(name)
    assert len(names) == 4


@pytest.mark.parametrize("ranks", ["tcp"], indirect=True)  # waits in a file store are slow
def test_a_rank_that_does_not_come_to_the_meeting(ranks: list[StoreRanks]) -> None:
    """F15: all others hear which one it was, also when an earlier incarnation of it had come."""
    on_all(ranks, lambda one: StoreRanks.meet(one._store, one.rank, WORLD, "place", 20))

    def body(one: Any) -> bytes:
        met = StoreRanks.meet(one._store, one.rank, WORLD, "place", 0.5)
        return met.agree("a word", bytes, joined, 0.5)

    outcomes = on_all(ranks[:3], body)
    assert {str(error) for error in outcomes} == {str(DeadlineExceededError.of("a common start", "rank 3 of 4", 0.5))}


def test_alone() -> None:
    assert SingleRank().agree("a word", lambda: b"x", joined, 1) == b"x"
    with pytest.raises(ConfigError):
        SingleRank().agree("a word", lambda: (_ for _ in ()).throw(ConfigError("no")), joined, 1)
