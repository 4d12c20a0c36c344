"""Segments made ahead of need: who gets them, whom they never stand in the way of, what is left of a stopped one."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store_support import MIB, Trainer, check_accounts, reopened, version

from replicator.errors import StoreError, StoreFullError
from replicator.store import Store
from replicator.store.paths import open_root
from replicator.store.segment import MappedSegment
from replicator.store.stock import fault_in


class Agent(Trainer):
    """An agent as a client of its store."""

    def __init__(self, store: Store, name: str = "a") -> None:
        super().__init__(store.paths, f"agent-{name}")
        self.store = store

    def stock(self, capacity: int, blank: bool = False, populate: bool = True) -> bool:
        def fault(mapped: MappedSegment, is_stopped: Callable[[], bool]) -> bool:
            done = fault_in(mapped, is_stopped, populate)
            if done:
                self.mappings.keep(mapped)
            return done

        return self.store.stock(self.client_id, capacity, fault, blank)


@pytest.fixture
def agent(store: Store) -> Agent:
    return Agent(store)


def files(store: Store) -> list[str]:
    return sorted(path.name for path in store.paths.segments.iterdir())


@pytest.mark.parametrize("populate", [True, False])
def test_what_was_touched_serves_the_next_pull(store: Store, agent: Agent, populate: bool) -> None:
    assert agent.stock(40 * MIB, populate=populate)
    (free,) = store.free_segments(agent.client_id)
    assert os.stat(store.paths.segments / free.name.text).st_blocks * 512 >= 40 * MIB
    check_accounts(store)
    kept = agent.mappings.mapped_bytes()
    mapped = agent.reserve(store, 38 * MIB)
    assert (mapped.inode, mapped.capacity) == (free.inode, 40 * MIB)
    assert agent.mappings.mapped_bytes() == kept == 40 * MIB
    assert bytes(mapped.view[:4096]) == bytes(4096)
    check_accounts(store)


def test_a_blank_one_is_cut_to_any_object(store: Store, agent: Agent) -> None:
    assert agent.stock(32 * MIB, blank=True)
    data = os.urandom(3 * MIB + 17)
    inode = agent.save(store, version().object("a"), data)
    assert os.stat(store.paths.object(version().object("a"))).st_ino == inode
    assert not store.free_segments(agent.client_id)
    assert store.usage().used_bytes < 4 * MIB
    check_accounts(store)
    store.drop(version())
    assert agent.reserve(store, 3 * MIB + 100).inode == inode
    check_accounts(store)


def test_one_that_is_not_blank_is_not_cut(store: Store, agent: Agent) -> None:
    assert agent.stock(32 * MIB)
    assert agent.reserve(store, 3 * MIB).capacity == 3 * MIB
    assert [segment.capacity for segment in store.free_segments(agent.client_id)] == [32 * MIB]


def test_it_never_takes_room_from_a_reservation(store: Store, agent: Agent, trainer: Trainer) -> None:
    """Of the budget of 64 MiB; nothing that is sealed is dropped for it either."""
    store.on_pressure = lambda wanted: pytest.fail("something would be dropped")
    assert agent.stock(30 * MIB, blank=True)
    assert agent.stock(30 * MIB)
    assert not agent.stock(5 * MIB)
    assert trainer.reserve(store, 60 * MIB).capacity == 60 * MIB
    assert not agent.stock(5 * MIB)
    assert store.usage().used_bytes <= 64 * MIB
    check_accounts(store)


def test_a_reservation_stops_what_is_being_touched(store: Store, agent: Agent, trainer: Trainer) -> None:
    begun = threading.Event()
    result: list[bool] = []

    def fault(mapped: MappedSegment, is_stopped: Callable[[], bool]) -> bool:
        assert not is_stopped()
        begun.set()
        while not is_stopped():
            threading.Event().wait(0.01)
        return False

    store.on_pressure = lambda wanted: pytest.fail("something would be dropped")
    working = threading.Thread(target=lambda: result.append(store.stock(agent.client_id, 60 * MIB, fault, False)))
    working.start()
    assert begun.wait(30)
    assert trainer.reserve(store, 50 * MIB).capacity == 50 * MIB
    working.join(30)
    assert result == [False]
    assert len(files(store)) == 1
    assert store.stocking.quiet_s() < 60
    check_accounts(store)


def test_a_full_file_system_is_an_error_and_leaves_nothing(shm_root: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    mount = shm_root / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mount], check=True)
    try:
        store = Store(open_root(mount / "store", create=True), 14 * MIB)
        store.rebuild()
        agent = Agent(store)
        assert not agent.stock(20 * MIB)

        other = mount / "other"
        for populate in (True, False):

            def fault(mapped: MappedSegment, is_stopped: Callable[[], bool], populate: bool = populate) -> bool:
                # Somebody else fills the file system meanwhile.
                with other.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 10 * MIB)
                return fault_in(mapped, is_stopped, populate)

            with pytest.raises(StoreError, match="ahead of need"):
                store.stock(agent.client_id, 12 * MIB, fault, False)
            other.unlink()
            assert files(store) == []
            check_accounts(store)
        assert agent.stock(12 * MIB)
        agent.close()
        store.close()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_the_next_agent_replaces_what_the_last_one_touched(store: Store, agent: Agent, trainer: Trainer) -> None:
    assert agent.stock(40 * MIB)
    store.reserve(trainer.client_id, 16 * MIB)
    agent.close()
    again = reopened(store)
    second = Agent(again, "b")
    assert second.stock(40 * MIB)
    assert [segment.capacity for segment in again.free_segments(second.client_id)] == [40 * MIB]
    assert again.usage().free_bytes == 40 * MIB
    check_accounts(again)
    with pytest.raises(StoreFullError):
        again.reserve(trainer.client_id, 60 * MIB)
    again.close()
