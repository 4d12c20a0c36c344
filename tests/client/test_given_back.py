"""Memory that a trainer reserved and did not use counts for nothing, whoever made it."""

from __future__ import annotations

from pathlib import Path

from job_support import nodes, wait_until

import replicator
from replicator.client.launch import find_agent
from replicator.ids import CheckpointContainerId
from replicator.v1 import admin_pb2


def _reserved(session: replicator.Session) -> int:
    status = session.agent.connection()._channel.unary_unary(
        "/replicator.v1.AdminService/Status",
        request_serializer=admin_pb2.StatusRequest.SerializeToString,
        response_deserializer=admin_pb2.StatusReply.FromString,
    )(admin_pb2.StatusRequest(), timeout=10)
    return int(status.reserved_bytes)


def test_a_segment_made_without_an_agent_and_given_up_with_the_next_one(shm_root: Path) -> None:
    """F24: the next agent finds it at its start, and counts it against the budget until it is given back."""
    with (
        nodes(shm_root, 1) as (node,),
        replicator.init("job", root=node.root, auto_start=False, deadline_s=5) as session,
    ):
        version = session.begin(CheckpointContainerId("job", 1))
        node.kill()
        wait_until(lambda: not session.agent.connected, 20)
        sink = session.create(version.object("a"), 5_000_000)
        node.start()
        wait_until(lambda: session.agent.connected and find_agent(node.root) is not None, 20)
        assert _reserved(session) >= 5_000_000
        sink.abandon()
        wait_until(lambda: _reserved(session) == 0, 10)
