"""What there is to recover, for who only looks: no session, no epoch, no other rank takes part, and nothing changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from replicator.client.connection import Connection
from replicator.client.launch import find_agent
from replicator.client.plan import Plan, plan_from_pb
from replicator.client.session import open_session
from replicator.config import load_config
from replicator.errors import AgentUnavailableError
from replicator.ids import CheckpointContainerId, ContainerVersion
from replicator.v1 import admin_pb2, local_pb2, types_pb2
from replicator.wire import version_from_pb

ReplyT = TypeVar("ReplyT", bound=Message)


@dataclass(frozen=True, slots=True)
class Recoverable:
    """A checkpoint that could be loaded now. `size_bytes` is that of all of its objects."""

    version: ContainerVersion
    is_protected: bool
    objects: int
    size_bytes: int


def recoverable(job: str = "") -> list[Recoverable]:
    """The checkpoints of a job (of all jobs, when empty) that could be loaded, sorted by job and step.

    Of a step that was saved more than once, the newest one.

    Raises:
        AgentUnavailableError, DeadlineExceededError: this node's agent does not answer.
    """
    with _agent() as agent:
        request = admin_pb2.ListContainersRequest(job=job, deadline_ms=int(agent.lookup_s * 1000))
        reply = agent.ask("AdminService/ListContainers", request, admin_pb2.ListContainersReply, "the checkpoints")
    found: dict[CheckpointContainerId, Recoverable] = {}
    for report in reply.containers:
        if report.committed and report.recoverable:
            version = version_from_pb(report.container)
            known = found.get(version.container)
            if known is None or known.version < version:
                one = Recoverable(version, report.is_protected, report.objects, report.size_bytes)
                found[version.container] = one
    return [found[container] for container in sorted(found)]


def look(container: CheckpointContainerId) -> Plan:
    """What loading this checkpoint would read. A plan that found nothing is a plan too; its `reason` says why.

    Raises:
        AgentUnavailableError, DeadlineExceededError: this node's agent does not answer.
    """
    with _agent() as agent:
        request = local_pb2.LookupRequest(
            job=container.job, deadline_ms=int(agent.lookup_s * 1000), has_step=True, step=container.step
        )
        return plan_from_pb(agent.ask("LocalService/Lookup", request, types_pb2.Plan, f"the objects of {container}"))


@dataclass(frozen=True, slots=True)
class _Asked:
    connection: Connection
    deadline_s: float

    @property
    def lookup_s(self) -> float:
        """For all answers of other nodes."""
        return self.deadline_s / 3

    def ask(self, method: str, request: Message, reply_type: type[ReplyT], awaited: str) -> ReplyT:
        return self.connection.call(method, request, reply_type, self.lookup_s + self.deadline_s / 6, awaited)


@contextmanager
def _agent() -> Iterator[_Asked]:
    """The agent of the open session, else the one that runs on this node."""
    session = open_session()
    if session is not None:
        session.agent.wait_connected(session.deadline_s)
        yield _Asked(session.agent.connection(), session.deadline_s)
        return
    config = load_config({})
    socket_path = os.environ.get("REPLICATOR_SOCKET", "")
    root = Path(socket_path).parent if socket_path else Path(config.root)
    record = find_agent(root)
    if record is None:
        raise AgentUnavailableError(f"no agent runs in {root}; start replicator-agent --root {root}")
    connection = Connection(record)
    try:
        yield _Asked(connection, config.deadline_s)
    finally:
        connection.close()
