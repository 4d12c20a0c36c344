"""Other agents: one channel per address, a Hello before it is used, a deadline on every call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import Message

from replicator.agent.counters import Counters
from replicator.agent.jobs import EpochAnswer, Jobs
from replicator.config import AgentConfig
from replicator.ids import NodeAddress

ReplyT = TypeVar("ReplyT", bound=Message)


class PeerDirectory:
    """All other agents that this one talks to. Used in the event loop only."""

    def __init__(self, config: AgentConfig, address: NodeAddress, jobs: Jobs, counters: Counters) -> None:
        raise NotImplementedError

    async def ask_epoch(self, job: str, address: str, expected: NodeAddress | None, deadline_s: float) -> EpochAnswer:
        """For `Jobs.open_job`: what the agent at `address` knows of the job. An `EpochAsker`.

        Raises:
            PeerUnavailableError: nobody answers there, or somebody else than `expected` (by node id).
            DeadlineExceededError: no answer in time.
        """
        raise NotImplementedError

    def resolve(self, job: str, node_id: str) -> NodeAddress:
        """Where the node was last known to be: a member, a remembered node, or one met through its address.

        Raises:
            PeerUnavailableError: nobody told this agent of the node.
        """
        raise NotImplementedError

    def known(self) -> tuple[NodeAddress | str, ...]:
        """Every other node of every job, and configured addresses whose node is not known yet."""
        raise NotImplementedError

    async def unary(
        self,
        node: NodeAddress | str,
        method: str,
        request: Message,
        reply_type: type[ReplyT],
        *,
        awaited: str,
        deadline_s: float | None = None,
    ) -> ReplyT:
        """One call, after a Hello where that is due.

        Args:
            node: a node, which must answer by its node id, or a mere address, where whoever is there will do.
            method: "<Service>/<Method>" of package replicator.v1, for instance "AdminService/Status".
            awaited: what the reply is, for the error message.
            deadline_s: for the call, Hello included; default `config.rpc_deadline_s`.

        Raises:
            PeerUnavailableError: nobody, or somebody else, answers there.
            DeadlineExceededError: no answer in time; says what was awaited, from whom, for how long.
            ReplicatorError: what the peer raised.
        """
        raise NotImplementedError

    def stream(
        self,
        node: NodeAddress | str,
        method: str,
        request: Message,
        reply_type: type[ReplyT],
        *,
        awaited: str,
        idle_s: float,
    ) -> AsyncIterator[ReplyT]:
        """A server-streaming call, each message of which must come within `idle_s`. Raises like `unary`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close all channels."""
        raise NotImplementedError
