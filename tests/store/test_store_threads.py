"""The store from several threads at once, as an agent with its loop and its workers uses it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier, Event

from store_support import MIB, Trainer, check_accounts, version

from replicator.errors import ObjectNotFoundError, StoreFullError
from replicator.ids import ObjectVersion
from replicator.store import Store
from replicator.store.reader import open_object
from replicator.store.trailer import PAGE

WRITERS, READERS, ROUNDS, KEPT = 4, 2, 60, 3


def _content(one: ObjectVersion) -> bytes:
    return random.Random(str(one)).randbytes(4096) * 40


def test_readers_see_whole_objects_while_others_are_written_and_dropped(store: Store) -> None:
    """F03, the tenth promise. Each object's bytes follow from its name, and a reader looks twice."""
    over = Event()
    looked = count()

    def write(number: int) -> None:
        trainer = Trainer(store.paths)
        for step in range(ROUNDS):
            one = version(step, job=f"job{number}").object("a")
            trainer.save(store, one, _content(one))
            if step >= KEPT:
                store.drop(version(step - KEPT, job=f"job{number}"))
        trainer.close()
        store.client_gone(trainer.client_id)

    def read(seed: int) -> None:
        choose = random.Random(seed)
        while not over.is_set():
            versions = store.versions()
            if not versions:
                continue
            one = choose.choice(versions).object("a")
            try:
                with open_object(store.paths, one) as held:
                    assert held.info.object == one
                    for _ in range(2):
                        held.verify()
                        assert bytes(held.view) == _content(one)
                next(looked)
            except ObjectNotFoundError:
                continue

    with ThreadPoolExecutor(WRITERS + READERS) as pool:
        reading = [pool.submit(read, seed) for seed in range(READERS)]
        writing = [pool.submit(write, number) for number in range(WRITERS)]
        try:
            for done in writing:
                done.result(60)
        finally:
            over.set()
        for done in reading:
            done.result(10)
    assert next(looked) > 0
    assert len(store.versions()) == WRITERS * KEPT
    assert store.usage().reserved_bytes == 0
    check_accounts(store)


def test_the_budget_holds_also_for_many_at_once(store: Store, trainer: Trainer) -> None:
    """What is being allocated without the lock counts."""
    start = Barrier(8)
    one = 12 * MIB

    def reserve() -> int:
        start.wait(10)
        try:
            return store.reserve(trainer.client_id, one).capacity
        except StoreFullError:
            return 0

    with ThreadPoolExecutor(8) as pool:
        got = [done.result(30) for done in [pool.submit(reserve) for _ in range(8)]]
    assert sorted(got) == [0] * 3 + [one] * 5
    check_accounts(store)


def test_a_segment_is_given_out_once(store: Store, trainer: Trainer) -> None:
    for name in map(str, range(40)):
        trainer.save(store, version().object(name), b"x" * PAGE)
    store.drop(version())
    start = Barrier(8)

    def reserve() -> list[int]:
        start.wait(10)
        return [store.reserve(trainer.client_id, 2 * PAGE).inode for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        inodes = [inode for done in [pool.submit(reserve) for _ in range(8)] for inode in done.result(30)]
    assert len(set(inodes)) == 80
    check_accounts(store)
