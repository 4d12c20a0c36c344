"""An agent that dies after it reserved and before it said so: what its trainer never heard of is free again."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from job_support import nodes, wait_until

from replicator.client.launch import find_agent
from replicator.client.local_agent import LocalAgent
from replicator.client.segments import Segments
from replicator.ids import CheckpointContainerId, ContainerVersion
from replicator.store.segment import create_segment
from replicator.v1 import admin_pb2, admin_pb2_grpc

MIB = 1 << 20


def reserved(root: Path) -> int:
    """Bytes."""
    record = find_agent(root)
    assert record is not None
    with grpc.insecure_channel(f"unix:{record.socket}") as channel:
        reply = admin_pb2_grpc.AdminServiceStub(channel).Status(admin_pb2.StatusRequest(), timeout=10)
    return int(reply.reserved_bytes)


@pytest.mark.parametrize("with_agent", [True, False])
def test_what_a_trainer_never_heard_of_is_freed_and_what_it_writes_is_not(shm_root: Path, with_agent: bool) -> None:
    """F24, and the tenth promise: of three segments one is being written, one is given up, and one nobody knows."""
    with nodes(shm_root, 1) as (node,):
        agent = LocalAgent(node.root, deadline_s=5.0, auto_start=False)
        version = ContainerVersion(CheckpointContainerId("job", 1), 1 << 32)
        epoch, _ = agent.open_job("job", [agent.node], 5.0)
        agent.join_job("job", epoch, [agent.node], 1)
        segments = Segments(agent)
        if not with_agent:
            node.kill()
            wait_until(lambda: not agent.connected, 20)
        written = segments.create(version.object("written"), 2 * MIB, epoch)
        written.write(b"1" * MIB)
        given_up = segments.create(version.object("given-up"), 3 * MIB, epoch)
        if with_agent:
            node.kill()
            wait_until(lambda: not agent.connected, 20)
        given_up.abandon()
        # As the agent leaves it that is killed right after it made one.
        create_segment(agent.paths, agent.client_id, 5 * MIB)
        node.start()
        agent.wait_connected(20)
        held = written._writer.mapped.capacity
        wait_until(lambda: reserved(node.root) == held, 10)
        written.write(b"2" * MIB)
        written.seal()
        assert reserved(node.root) == 0
        agent.close()
