"""Opening and joining a job over several real agents."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_harness import AgentProcess, TrainerProcess, running_agent, trainer


class Node:
    """An agent and one trainer of it."""

    def __init__(self, stack: contextlib.ExitStack, root: Path, name: str, *flags: str) -> None:
        self.name = name
        self.agent: AgentProcess = stack.enter_context(
            running_agent(root / name, "--node-id", name, "--deadline-s", "6", *flags)
        )
        self.rank: TrainerProcess = stack.enter_context(trainer(root / name))
        self.rank.attach(self.agent)

    @property
    def member(self) -> dict[str, Any]:
        record = self.agent.record
        return {
            "identity": {"node_id": self.name, "incarnation": record["incarnation"]},
            "grpc_address": record["grpc_address"],
        }

    def open(self, members: Sequence[dict[str, Any]], job: str = "job") -> int:
        request = {"job": job, "members": members, "deadline_ms": 2000}
        return int(self.rank.do("call", method="OpenJob", request=request)["epoch"])

    def join(self, epoch: int, members: Sequence[dict[str, Any]], job: str = "job") -> dict[str, Any]:
        request = {"job": job, "epoch": epoch, "members": members, "replicas": 1}
        return self.rank.ask("call", method="JoinJob", request=request)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    root = Path(tmp_path_factory.mktemp("jobs"))
    with contextlib.ExitStack() as stack:
        yield Node(stack, root, "n1"), Node(stack, root, "n2")


def test_epoch_is_above_all_that_any_member_knows(nodes: tuple[Node, Node]) -> None:
    """F11: the node of rank 0 may be new, and know nothing."""
    first, second = nodes
    both = [first.member, second.member]
    assert second.join(7, both)["ok"] == {"buddy_node_ids": ["n1"]}
    assert first.open(both) == 8
    assert first.join(8, both)["ok"] == {"buddy_node_ids": ["n2"]}
    assert second.join(8, both)["ok"] == {"buddy_node_ids": ["n1"]}
    assert second.join(7, both)["error"] == "StaleEpochError"
    assert second.open(both) == 9
    assert first.open(both) == 10


def test_a_new_coordinator_asks_members_that_only_others_remember(nodes: tuple[Node, Node]) -> None:
    first, second = nodes
    second.join(3, [first.member, second.member], job="other")
    assert first.open([first.member, second.member], job="other") == 4


def test_dead_and_mute_members_do_not_keep_the_job_from_starting(nodes: tuple[Node, Node]) -> None:
    """F15: each is waited for at most as long as the caller said."""
    first, second = nodes
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        members = [first.member, second.member]
        for name, closed in (("n3", mute), ("n4", dead)):
            port = closed.getsockname()[1]
            members.append({"identity": {"node_id": name, "incarnation": 1}, "grpc_address": f"127.0.0.1:{port}"})
        second.join(5, [second.member], job="lossy")
        began = time.monotonic()
        assert first.open(members, job="lossy") == 6
        assert time.monotonic() - began < 5


def test_member_that_answers_as_somebody_else_is_not_believed(nodes: tuple[Node, Node]) -> None:
    """F19: the address of a dead node may be another's now."""
    first, second = nodes
    second.join(5, [second.member], job="moved")
    stranger = {**second.member, "identity": {"node_id": "n9", "incarnation": 1}}
    assert first.open([first.member, stranger], job="moved") == 1


def test_members_may_come_from_the_agents_configuration(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    first, _ = nodes
    with contextlib.ExitStack() as stack:
        third = Node(stack, tmp_path, "n3", "--peers", first.member["grpc_address"])
        first.join(4, [first.member], job="static")
        assert third.open([], job="static") == 5
        assert third.join(5, [], job="static")["ok"] == {"buddy_node_ids": ["n1"]}


def test_configured_member_that_does_not_answer_is_named(tmp_path: Path) -> None:
    """Members that some nodes know and others do not would give each node other buddies."""
    with contextlib.ExitStack() as stack, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{dead.getsockname()[1]}"
        node = Node(stack, tmp_path, "n1", "--peers", address)
        answer = node.join(1, [])
        assert answer["error"] in ("PeerUnavailableError", "DeadlineExceededError"), answer
        assert address in answer["message"]


def test_agent_that_came_back_elsewhere_keeps_the_members(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first, second = Node(stack, tmp_path, "n1"), Node(stack, tmp_path, "n2")
        both = [first.member, second.member]
        for node in (first, second):
            node.join(1, both)
        first.agent.kill()
        first.agent = stack.enter_context(running_agent(tmp_path / "n1", "--node-id", "n1", "--deadline-s", "6"))
        first.rank.do("attach", socket=first.agent.socket)
        assert first.join(1, both)["ok"] == {"buddy_node_ids": ["n2"]}
        assert first.open([]) == 2
