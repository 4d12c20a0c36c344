"""One agent's parts, put together: who owns what, and in which order it starts and ends.

core = build_core(config, address, store, jobs, counters)      # in the event loop, after the gRPC port is bound
add_peer_services(server, core)                                # PeerService and DataService of the TCP server
await core.start()                                             # after the server started
...
await core.close()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicator.agent.commit import Committer
from replicator.agent.counters import Counters
from replicator.agent.lookup import Lookup
from replicator.agent.peers import PeerDirectory
from replicator.agent.puller import Puller
from replicator.agent.replicate import Replicator
from replicator.agent.retention import Retention
from replicator.config import AgentConfig
from replicator.ids import NodeAddress, NodeIdentity

if TYPE_CHECKING:
    import grpc

    from replicator.agent.jobs import Jobs
    from replicator.store import Store
    from replicator.transfer.bulk_server import BulkServer
    from replicator.transfer.tickets import TicketOffice


@dataclass
class AgentCore:
    """All parts of one agent. `bulk` is None where no bulk lane is served (lane = grpc, or TLS)."""

    config: AgentConfig
    identity: NodeIdentity
    address: NodeAddress
    store: Store
    jobs: Jobs
    counters: Counters
    tickets: TicketOffice
    bulk: BulkServer | None
    peers: PeerDirectory
    retention: Retention
    puller: Puller
    replicator: Replicator
    committer: Committer
    lookup: Lookup

    @property
    def bulk_address(self) -> str:
        """`host:port` at which peers reach the bulk lane; empty when it is not served."""
        raise NotImplementedError

    async def start(self) -> None:
        """Take up again what was unfinished when the last agent of this store ended. Does not wait for peers."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop serving data, give up what is under way, close all channels. Idempotent; waits for no peer."""
        raise NotImplementedError


def build_core(config: AgentConfig, address: NodeAddress, store: Store, jobs: Jobs, counters: Counters) -> AgentCore:
    """All parts, with the bulk server listening. Call it in the event loop, once the gRPC port is bound.

    Args:
        address: this agent's identity and the address under which peers reach its gRPC port.

    Raises:
        StoreRootError, ConfigError: the bulk port cannot be bound.
    """
    raise NotImplementedError


def add_peer_services(server: grpc.aio.Server, core: AgentCore) -> None:
    """Register PeerService and DataService on the server that peers reach."""
    raise NotImplementedError
