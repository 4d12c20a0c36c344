"""Who is asked, in which order, and how long again: no source is waited for that need not be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from transfer_support import BLOCK, Peer, flip_bit, some_bytes

from replicator.errors import DeadlineExceededError, PeerUnavailableError, ReplicatorError, TransferError
from replicator.transfer.lane import Lane, Source
from replicator.transfer.pull import PullSource, pull
from replicator.transfer.turns import Asked, Patience, PullPolicy, ask_in_turn

POLICY = PullPolicy(backoff_s=0.01, patience_s=0.3)


class Nodes:
    """Nodes that fail as often as it is said, and then answer; `asked` has each question."""

    def __init__(self, patience: Patience | None = None, **failures: list[ReplicatorError]) -> None:
        self.patience = patience or Patience(POLICY)
        self.failures = failures
        self.asked: list[str] = []
        self.what = "bytes"

    async def answer(self, source: PullSource) -> str:
        self.asked.append(source.node_id)
        left = self.failures.get(source.node_id, [])
        if left:
            raise left[0] if len(left) == 1 and type(left[0]) is not PeerUnavailableError else left.pop(0)
        return source.node_id

    async def ask(self, *node_ids: str) -> Asked[str]:
        return await ask_in_turn([PullSource(one, _never) for one in node_ids], self.answer, self.patience, self.what)


async def _never() -> Source:
    raise AssertionError


def refusals(count: int) -> list[ReplicatorError]:
    return [PeerUnavailableError("refused") for _ in range(count)]


async def test_the_only_holder_is_asked_again_until_it_answers() -> None:
    nodes = Nodes(a=refusals(3))
    asked = await nodes.ask("a")
    assert asked.result == "a"
    assert [node_id for node_id, _ in asked.failures] == ["a"], "one reason a node, however often it refused"
    assert nodes.asked == ["a"] * 4


async def test_nobody_waits_for_one_that_refuses_while_another_answers() -> None:
    nodes = Nodes(Patience(PullPolicy(backoff_s=60, patience_s=60)), a=refusals(1))
    asked = await asyncio.wait_for(nodes.ask("a", "b"), 5)
    assert asked.result == "b"
    assert nodes.asked == ["a", "b"]


async def test_those_that_refused_are_asked_again_and_nobody_else() -> None:
    nodes = Nodes(a=refusals(2), b=[TransferError("it broke")])
    asked = await nodes.ask("a", "b")
    assert asked.result == "a"
    assert nodes.asked == ["a", "b", "a", "a"]
    assert [node_id for node_id, _ in asked.failures] == ["b", "a"], "the last reason last"


async def test_all_that_belongs_together_has_one_patience() -> None:
    """Not number of objects times it; and a node that answered has all of it again."""
    loop = asyncio.get_running_loop()
    patience = Patience(POLICY)
    gone = Nodes(patience, a=refusals(100_000))
    began = loop.time()
    assert (await gone.ask("a")).result is None
    assert POLICY.patience_s <= loop.time() - began < POLICY.patience_s + 1
    gone.asked.clear()
    for _ in range(100):
        asked = await gone.ask("a")
        assert [type(error) for _, error in asked.failures] == [PeerUnavailableError]
    assert gone.asked == ["a"] * 100
    assert (await Nodes(patience).ask("a")).result == "a"
    assert (await Nodes(patience, a=refusals(3)).ask("a")).result == "a"


async def test_who_describes_and_sends_nothing_is_not_waited_for_again_with_each_object() -> None:
    """As where the port for the bytes is closed."""
    loop = asyncio.get_running_loop()
    nodes = Nodes(a=refusals(100_000))
    describing = Nodes(nodes.patience)
    describing.what = "a description"
    began = loop.time()
    for _ in range(20):
        assert (await describing.ask("a")).result == "a"
        assert (await nodes.ask("a")).result is None
    assert loop.time() - began < POLICY.patience_s + 1


async def test_who_was_silent_for_a_deadline_is_not_awaited_for_anything_else() -> None:
    """Until it has been heard of again."""
    nodes = Nodes(a=[DeadlineExceededError("waited 3.0 s")])
    for _ in range(100):
        asked = await nodes.ask("a", "b")
        assert asked.result == "b"
        assert [str(error) for _, error in asked.failures] == ["waited 3.0 s"]
    assert nodes.asked.count("a") == 1
    nodes.patience.answered("a", "bytes")
    nodes.failures.clear()
    assert (await nodes.ask("a", "b")).result == "a"


async def test_without_patience_each_one_is_asked_once() -> None:
    nodes = Nodes(Patience(PullPolicy()), a=refusals(1), b=refusals(1))
    assert (await nodes.ask("a", "b")).result is None
    assert nodes.asked == ["a", "b"]


@pytest.mark.parametrize("lane", ["bulk", "grpc"])
async def test_a_pull_goes_on_at_a_source_that_refused_but_for_its_bad_block(
    lanes: dict[str, Lane], make_peer: Callable[[str], Awaitable[Peer]], lane: str
) -> None:
    """F01: the block is not asked from it again, however often the source is."""
    peer = await make_peer("node-a")
    data = some_bytes(3 * BLOCK)
    info = peer.add("object", data)
    flip_bit(peer.path(info), BLOCK)
    opened = 0

    async def open_it() -> Source:
        nonlocal opened
        opened += 1
        if opened < 3:
            raise PeerUnavailableError("nobody answers")
        return peer.source(info.object)

    policy = PullPolicy(lane=lane, backoff_s=0.01, patience_s=5)
    bad: list[int] = []
    with pytest.raises(ReplicatorError, match="its blocks 1 do not match"):
        await pull(
            info,
            [PullSource("node-a", open_it)],
            memoryview(bytearray(len(data))),
            lanes=lanes,
            policy=policy,
            on_bad_block=lambda node_id, block: bad.append(block),
        )
    assert bad == [1]
    assert opened == 3
