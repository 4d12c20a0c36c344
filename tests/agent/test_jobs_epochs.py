"""Epochs, members and attempts of a job: what is answered was persisted, and nothing ever goes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicator.agent.jobs import MAX_JOBS, MAX_REMEMBERED, EpochAnswer, Jobs
from replicator.agent.placing import PlacementChoice
from replicator.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidIdError,
    StaleEpochError,
    StoreError,
)
from replicator.ids import (
    MAX_EPOCH,
    CheckpointContainerId,
    ContainerVersion,
    NodeAddress,
    NodeIdentity,
    make_generation,
)
from replicator.native import crc32c
from replicator.store.paths import open_root
from replicator.store.store import Store


def node(number: int, incarnation: int = 1, port: int = 0) -> NodeAddress:
    return NodeAddress(NodeIdentity(f"n{number}", incarnation), f"10.0.0.{number}:{port or 7000 + number}")


ME = node(1)
PAIR = (ME, node(2))


class Disk:
    """A store on tmpfs whose agent can be replaced: `restart` reads everything back from the files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store: Store | None = None

    def restart(self, me: NodeAddress = ME, replicas: int = 1, choice: PlacementChoice | None = None) -> Jobs:
        if self.store is not None:
            self.store.close()
        self.store = Store(open_root(self.root, create=True))
        self.store.rebuild()
        return Jobs(self.store, me, replicas, choice)


@pytest.fixture
def disk(shm_root: Path) -> Iterator[Disk]:
    made = Disk(shm_root)
    yield made
    if made.store is not None:
        made.store.close()


class Peers:
    """An EpochAsker: what each address answers. Silent ones let the deadline pass (without waiting for it)."""

    def __init__(self, answers: dict[str, EpochAnswer], silent: tuple[str, ...] = ()) -> None:
        self.answers, self.silent = answers, silent
        self.asked: dict[str, float] = {}

    async def __call__(self, job: str, address: str, expected: NodeAddress | None, deadline_s: float) -> EpochAnswer:
        self.asked.setdefault(address, deadline_s)  # the first time
        await asyncio.sleep(0)
        if address in self.silent:
            raise DeadlineExceededError.of("the epoch", address, deadline_s)
        return self.answers[address]


def test_older_epoch_is_refused_and_the_message_names_both(disk: Disk) -> None:
    """F11: an old incarnation of the job that still runs somewhere must not write any more."""
    jobs = disk.restart()
    jobs.join("job", 4, PAIR, 1)
    jobs.check("job", 4)
    jobs.check("job", 7)
    with pytest.raises(StaleEpochError, match="epoch 4 was superseded by epoch 7"):
        jobs.check("job", 4)
    assert jobs.epoch("job") == 7


def test_a_newer_epoch_survives_the_agent(disk: Disk) -> None:
    disk.restart().check("job", 9)
    jobs = disk.restart()
    assert jobs.epoch("job") == 9
    with pytest.raises(StaleEpochError):
        jobs.join("job", 8, PAIR, 1)
    with pytest.raises(StaleEpochError):
        jobs.begin("job", 0, 8)


@pytest.mark.parametrize("epoch", [0, -1, MAX_EPOCH + 1])
def test_impossible_epochs_are_refused(disk: Disk, epoch: int) -> None:
    jobs = disk.restart()
    with pytest.raises(InvalidIdError):
        jobs.check("job", epoch)
    assert jobs.names() == ()


async def test_opening_gives_one_more_than_anybody_knows(disk: Disk) -> None:
    jobs = disk.restart()
    jobs.check("job", 3)
    others = [node(2), node(3), node(4)]
    peers = Peers(
        {
            others[0].grpc_address: EpochAnswer(others[0], 2),
            others[1].grpc_address: EpochAnswer(others[1], 11),
            "10.0.0.9:7009": EpochAnswer(node(9), 5),
        },
        silent=(others[2].grpc_address,),
    )
    opened = await jobs.open_job("job", [ME, *others], ["10.0.0.9:7009"], peers, 6.0)
    assert opened == 12
    assert ME.grpc_address not in peers.asked
    assert disk.restart().epoch("job") == 12


async def test_a_first_start_gets_epoch_one(disk: Disk) -> None:
    assert await disk.restart().open_job("job", [ME], [], Peers({}), 1.0) == 1


async def test_two_openings_at_once_get_two_epochs(disk: Disk) -> None:
    jobs = disk.restart()
    peers = Peers({node(2).grpc_address: EpochAnswer(node(2), 4)})
    opened = await asyncio.gather(*(jobs.open_job("job", PAIR, [], peers, 1.0) for _ in range(5)))
    assert sorted(opened) == [5, 6, 7, 8, 9]


async def test_remembered_nodes_are_asked_but_not_waited_for_as_long(disk: Disk) -> None:
    """F13: who is no member any more may still know (and hold) something. F15: it is often dead."""
    jobs = disk.restart()
    jobs.join("job", 1, (ME, node(2), node(3)), 1)
    jobs.join("job", 2, PAIR, 1)
    jobs = disk.restart()
    peers = Peers({n.grpc_address: EpochAnswer(n, 2) for n in (node(2), node(3))})
    await jobs.open_job("job", PAIR, [], peers, 8.0)
    assert peers.asked == {node(2).grpc_address: 8.0, node(3).grpc_address: 2.0}


async def test_answers_teach_new_addresses_and_unknown_members(disk: Disk) -> None:
    """F34: a node that came back on another port is found by what it says of itself; hearsay only adds."""
    jobs = disk.restart()
    jobs.join("job", 1, (ME, node(2), node(3)), 1)
    moved = node(2, incarnation=2, port=9999)
    answer = EpochAnswer(moved, 1, (node(3, incarnation=8, port=1), node(4)))
    silent = (node(2).grpc_address, node(3).grpc_address)
    await jobs.open_job("job", [ME, moved], [], Peers({moved.grpc_address: answer}, silent), 1.0)
    assert jobs.members("job") == (ME, moved, node(3))
    assert disk.restart().everyone("job") == (ME, moved, node(3), node(4))


def test_joining_gives_buddies_and_keeps_former_members(disk: Disk) -> None:
    jobs = disk.restart()
    found = jobs.join("job", 1, (node(3), ME, node(2), ME), 2)
    assert set(found.node_ids) == {"n2", "n3"}
    assert jobs.members("job") == (ME, node(2), node(3))
    jobs.join("job", 2, (ME, node(4)), 1)
    for known in (jobs, disk.restart()):
        assert known.members("job") == (ME, node(4))
        assert known.everyone("job") == (ME, node(4), node(2), node(3))
        assert known.buddies("job") == ("n4",)
        assert known.buddy_addresses("job") == (node(4),)
        assert known.replicas("job") == 1


def test_a_node_alone_has_no_buddies_and_a_note(disk: Disk) -> None:
    found = disk.restart().join("job", 1, (ME,), 1)
    assert found.node_ids == ()
    assert "single node" in found.note


def test_a_node_that_was_renamed_has_no_buddies(disk: Disk) -> None:
    disk.restart().join("job", 1, PAIR, 1)
    assert disk.restart(node(9)).buddies("job") == ()


def test_joining_again_changes_nothing_and_keeps_what_was_learned(disk: Disk) -> None:
    jobs = disk.restart()
    jobs.join("job", 1, PAIR, 1)
    moved = node(2, incarnation=5, port=9999)
    jobs.learn("job", [moved], first_hand=True)
    jobs.join("job", 1, PAIR, 1)
    assert jobs.members("job") == (ME, moved)


def test_a_restarted_agent_knows_its_own_new_address(disk: Disk) -> None:
    disk.restart().join("job", 1, PAIR, 1)
    reborn = node(1, incarnation=2, port=8888)
    jobs = disk.restart(reborn)
    assert jobs.members("job") == (reborn, node(2))
    jobs.join("job", 1, PAIR, 1)
    assert jobs.members("job") == (reborn, node(2))


def test_one_epoch_cannot_have_two_sets_of_nodes(disk: Disk) -> None:
    """Two incarnations that opened at the same time on different nodes got one epoch: one of them must go."""
    jobs = disk.restart()
    jobs.join("job", 1, PAIR, 1)
    with pytest.raises(StaleEpochError, match="n1, n2, and now with n1, n3"):
        jobs.join("job", 1, (ME, node(3)), 1)
    assert jobs.members("job") == PAIR


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ((node(2), node(3)), "this node n1 is not among its members n2, n3"),
        ((ME, node(2), node(2, port=9)), "two agents call themselves 'n2'"),
        ((), "not among"),
    ],
)
def test_impossible_members_are_refused(disk: Disk, members: tuple[NodeAddress, ...], reason: str) -> None:
    jobs = disk.restart()
    with pytest.raises(ConfigError, match=reason):
        jobs.join("job", 1, members, 1)
    assert jobs.epoch("job") == 0


def test_generations_only_grow_whatever_happens_to_the_agent(disk: Disk) -> None:
    """F11: an attempt that was given out is never given out again, also when nothing of it was written here."""
    random_ = random.Random(5)
    jobs = disk.restart()
    epoch, last = 1, -1
    for _ in range(300):
        happening = random_.random()
        if happening < 0.1:
            jobs = disk.restart()
        elif happening < 0.15:
            epoch += random_.randrange(1, 3)
        version = jobs.begin("job", random_.randrange(3), epoch)
        assert version.epoch == epoch
        assert version.generation > last
        last = version.generation


def test_an_attempt_is_above_those_that_are_stored(disk: Disk) -> None:
    jobs = disk.restart()
    assert disk.store is not None
    stored = ContainerVersion(CheckpointContainerId("job", 7), make_generation(2, 500))
    disk.store.put_manifest(stored, b"data", crc32c(b"data"))
    assert jobs.begin("job", 0, 2).generation == make_generation(2, 501)
    assert jobs.begin("job", 0, 2).generation == make_generation(2, 502)
    assert jobs.begin("job", 0, 3).generation == make_generation(3, 1)


def test_step_zero_is_a_step(disk: Disk) -> None:
    """F14"""
    assert disk.restart().begin("job", 0, 1).container.step == 0


def test_jobs_and_memories_are_bounded(disk: Disk) -> None:
    jobs = disk.restart()
    jobs.join("job", 1, PAIR, 1)
    jobs.learn("job", (node(number) for number in range(2, MAX_REMEMBERED + 100)))
    assert len(jobs.everyone("job")) == MAX_REMEMBERED + 2
    for number in range(MAX_JOBS - 1):
        jobs.check(f"job-{number}", 1)
    with pytest.raises(StoreError, match=f"at most {MAX_JOBS} jobs"):
        jobs.check("one-more", 1)


def test_a_full_disk_keeps_no_node_from_being_met(disk: Disk) -> None:
    """Where others are is worth knowing also when it cannot be stored: else nobody could be asked for copies."""
    jobs = disk.restart()
    jobs.join("job", 1, PAIR, 1)
    loaded = ContainerVersion(CheckpointContainerId("job", 3), make_generation(1, 1))
    directory = disk.root / "jobs"
    directory.rename(disk.root / "elsewhere")
    jobs.learn("job", [node(2, incarnation=2, port=99)], first_hand=True)
    jobs.note_retrieved(loaded)
    (disk.root / "elsewhere").rename(directory)
    assert jobs.everyone("job") == (ME, node(2, incarnation=2, port=99))
    assert jobs.retrieved("job") == (loaded, 1)
    jobs.check("job", 2)
    again = disk.restart()
    assert again.everyone("job") == (ME, node(2, incarnation=2, port=99)), "stored with the next change"
    assert again.retrieved("job") == (loaded, 1)


def test_what_could_not_be_persisted_is_not_answered(disk: Disk) -> None:
    jobs = disk.restart()
    jobs.join("job", 1, PAIR, 1)
    directory = disk.root / "jobs"
    directory.rename(disk.root / "elsewhere")
    with pytest.raises(StoreError, match="cannot write what is known of job job"):
        jobs.check("job", 2)
    (disk.root / "elsewhere").rename(directory)
    assert jobs.epoch("job") == 1
    jobs.check("job", 1)
