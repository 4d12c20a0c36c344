"""The watch over other nodes, with a clock and answers of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from replicator.agent import health
from replicator.agent.counters import Counters
from replicator.agent.health import HealthMonitor, NodeHealth, NodeState
from replicator.config import AgentConfig
from replicator.errors import DeadlineExceededError, ReplicatorError
from replicator.ids import NodeAddress, NodeIdentity

DEADLINE_S = 12.0
CONFIG = AgentConfig(node_id="me", deadline_s=DEADLINE_S)


def node(node_id: str, incarnation: int = 1, address: str = "10.0.0.1:1") -> NodeAddress:
    return NodeAddress(NodeIdentity(node_id, incarnation), address)


class World:
    """What the monitor sees: nodes, a clock, and what each node answers."""

    def __init__(self, *nodes: NodeAddress | str) -> None:
        self.nodes: list[NodeAddress | str] = list(nodes)
        self.on_replaced: list[Callable[[NodeAddress, NodeAddress], None]] = []
        self.answers: dict[str, NodeAddress | ReplicatorError] = {}
        self.now = 1000.0
        self.asked: list[tuple[str, float]] = []
        self.events: list[tuple[str, str, str]] = []
        self.monitor = HealthMonitor(
            CONFIG,
            self,
            Counters(),
            ask=self.ask,
            clock=lambda: self.now,
            unix=lambda: self.now + 1e9,  # type: ignore[arg-type]
        )
        self.monitor.on_change.append(self.changed)

    def known(self) -> tuple[NodeAddress | str, ...]:
        return tuple(self.nodes)

    async def ask(self, target: NodeAddress | str, limit_s: float) -> NodeAddress:
        key = target if isinstance(target, str) else target.node_id
        self.asked.append((key, self.now))
        answer = self.answers.get(key, target)
        if isinstance(answer, ReplicatorError):
            self.now += limit_s
            raise answer
        assert isinstance(answer, NodeAddress)
        return answer

    def changed(self, old: NodeHealth | None, new: NodeHealth) -> None:
        self.events.append((str(new.node.identity), old.state.value if old else "-", new.state.value))

    async def pass_time(self, seconds: float) -> None:
        """Let the monitor ask whoever is due, as `run` does."""
        end = self.now + seconds
        while self.now < end:
            self.monitor.refresh()
            pause = self.monitor.begin_due()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            if tasks:
                await asyncio.gather(*tasks)
            else:
                self.now += pause


async def test_a_node_is_in_the_view_once_it_was_asked() -> None:
    world = World(node("n1"))
    assert world.monitor.view() == {}
    assert world.monitor.state("n1") is None
    await world.pass_time(2)
    assert world.monitor.view()["n1"].state is NodeState.ALIVE
    assert world.monitor.state("n1") is NodeState.ALIVE
    assert world.events == [(str(node("n1").identity), "-", "alive")]


async def test_a_mute_node_turns_suspect_then_dead_in_the_configured_time_and_comes_back() -> None:
    """F19: with the reason, and since when."""
    world = World(node("n1"), node("n2"))
    await world.pass_time(5)
    fell_silent = world.now
    world.answers["n1"] = DeadlineExceededError.of("its health", "node n1", 2.0)
    await world.pass_time(5)
    suspect = world.monitor.view()["n1"]
    assert suspect.state is NodeState.SUSPECT
    assert "its health" in suspect.reason
    assert 0 <= suspect.since_unix_s - 1e9 - fell_silent <= (1 + 0.25) * DEADLINE_S / 6 + DEADLINE_S / 6
    while world.monitor.view()["n1"].state is not NodeState.DEAD:
        await world.pass_time(0.1)
        assert world.now - fell_silent <= 1.2 * DEADLINE_S
    dead = world.monitor.view()["n1"]
    assert dead.since_unix_s - suspect.since_unix_s >= DEADLINE_S * 2 / 3
    assert "its health" in dead.reason
    assert world.monitor.view()["n2"].state is NodeState.ALIVE
    del world.answers["n1"]
    await world.pass_time(3 * DEADLINE_S)
    back = world.monitor.view()["n1"]
    assert (back.state, back.reason) == (NodeState.ALIVE, "it answers")
    assert back.since_unix_s > dead.since_unix_s
    states = [(old, new) for who, old, new in world.events if who.startswith("n1#")]
    assert states == [("-", "alive"), ("alive", "suspect"), ("suspect", "dead"), ("dead", "alive")]


async def test_another_incarnation_makes_the_old_one_dead_and_is_alive_itself() -> None:
    """F19, F45: two events, so that who keeps state of the old one can drop it."""
    world = World(node("n1", 1))
    await world.pass_time(2)
    world.answers["n1"] = node("n1", 2)
    await world.pass_time(DEADLINE_S)
    old, new = (str(node("n1", number).identity) for number in (1, 2))
    assert world.events[1:] == [(old, "alive", "dead"), (new, "-", "alive")]
    assert world.monitor.view()["n1"].node.identity.incarnation == 2


async def test_a_replacement_that_another_call_noticed_is_told_at_once() -> None:
    """F19: no question has to be asked for it."""
    world = World(node("n1", 1))
    await world.pass_time(2)
    asked = len(world.asked)
    for callback in world.on_replaced:
        callback(node("n1", 1), node("n1", 2, "10.0.0.9:9"))
    assert world.monitor.view()["n1"].node == node("n1", 2, "10.0.0.9:9")
    assert [new for _, _, new in world.events] == ["alive", "dead", "alive"]
    assert len(world.asked) == asked


async def test_silence_of_the_old_incarnation_says_nothing_about_the_new_one() -> None:
    """The question was asked before the replacement, and its deadline ends after it."""
    world = World(node("n1", 1))
    await world.pass_time(2)
    monitor = world.monitor

    async def replaced_meanwhile(target: NodeAddress | str, limit_s: float) -> NodeAddress:
        for callback in world.on_replaced:
            callback(node("n1", 1), node("n1", 2))
        raise DeadlineExceededError.of("its health", "node n1", limit_s)

    monitor._ask = replaced_meanwhile
    world.now += DEADLINE_S
    await world.pass_time(0.1)
    assert monitor.view()["n1"].state is NodeState.ALIVE


async def test_an_agent_that_was_stopped_itself_calls_nobody_dead_for_it() -> None:
    """The first questions after a long stop count, and not the time."""
    world = World(node("n1"))
    await world.pass_time(2)

    async def stopped(target: NodeAddress | str, limit_s: float) -> NodeAddress:
        world.now += 100 * DEADLINE_S
        raise DeadlineExceededError.of("its health", "node n1", limit_s)

    world.monitor._ask = stopped
    world.now += DEADLINE_S
    await world.pass_time(1)
    assert world.monitor.view()["n1"].state is NodeState.ALIVE


async def test_a_node_that_moved_is_asked_where_it_is_now_and_one_that_is_forgotten_is_not() -> None:
    """F34: the id stays, the address is looked up for every question."""
    world = World(node("n1"), node("n2"))
    await world.pass_time(3)
    world.nodes = [node("n1", 1, "10.9.9.9:9")]
    await world.pass_time(DEADLINE_S)
    assert world.monitor.view() == {"n1": world.monitor.view()["n1"]}
    assert world.monitor.view()["n1"].node.grpc_address == "10.9.9.9:9"


async def test_an_address_is_no_node_until_somebody_answered_there() -> None:
    world = World("10.0.0.7:7")
    world.answers["10.0.0.7:7"] = node("n7", 1, "10.0.0.7:7")
    await world.pass_time(2)
    assert world.monitor.view() == {}
    world.nodes = [node("n7", 1, "10.0.0.7:7")]
    await world.pass_time(2)
    assert world.monitor.view()["n7"].state is NodeState.ALIVE


async def test_questions_at_once_and_per_second_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool has a bound, and a thousand nodes do not make a thousand questions per interval."""
    monkeypatch.setattr(health, "MAX_ASKED", 3)
    monkeypatch.setattr(health, "MAX_PER_S", 2.0)
    world = World(*(node(f"n{number}") for number in range(40)))
    open_now = most = 0

    async def slow(target: NodeAddress | str, limit_s: float) -> NodeAddress:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        world.asked.append(("", world.now))
        assert isinstance(target, NodeAddress)
        return target

    world.monitor._ask = slow
    world.monitor.refresh()
    began = world.now
    world.now += 30  # all are due
    await world.pass_time(200)
    assert most == 3
    assert len(world.asked) / (world.now - began) < 2.5
    assert len(world.monitor.view()) == 40


async def test_closing_gives_up_questions_under_way() -> None:
    world = World(node("n1"))
    began = asyncio.Event()

    async def never(target: NodeAddress | str, limit_s: float) -> NodeAddress:
        began.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    world.monitor._ask = never
    world.monitor._clock = asyncio.get_running_loop().time
    running = asyncio.create_task(world.monitor.run())
    await asyncio.wait_for(began.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(asyncio.all_tasks()) == 1
