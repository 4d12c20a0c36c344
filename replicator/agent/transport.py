"""How an agent reaches other agents, and how they get bytes from it: sockets, or what stands for them in a simulation.

Everything above this line (Hello, deadlines, retries, which lane, what is verified) is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import grpc.aio

from replicator.config import AgentConfig
from replicator.rpc_options import channel_credentials, channel_options
from replicator.transfer.bulk_lane import BulkLane
from replicator.transfer.bulk_server import BulkServer
from replicator.transfer.lane import Lane, ServedObject
from replicator.transfer.serve_limit import ServeLimit

OpenTicket = Callable[[str], ServedObject]
"""Opens the object of a ticket. Raises TicketError, ObjectNotFoundError, CorruptObjectError."""


class BulkEndpoint(Protocol):
    """Serves the bulk lane until it is stopped."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port where it listens."""

    def stop(self) -> None:
        """End. May take a moment; called in a thread."""


class Transport(Protocol):
    """The connections of one agent. Used in the event loop."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """A new channel to `host:port`. Nothing is sent yet."""

    def bulk_lane(self) -> Lane:
        """Brings objects from other agents' bulk endpoints."""

    def serve_bulk(self, open_ticket: OpenTicket, limit: ServeLimit) -> BulkEndpoint:
        """Serve objects to others from now on. Raises ConfigError when the port cannot be bound."""


class SocketTransport:
    """gRPC channels and bulk connections as the configuration says."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._credentials = channel_credentials(config) if config.tls else None

    def channel(self, address: str) -> grpc.aio.Channel:
        """See `Transport.channel`."""
        if self._credentials is not None:
            return grpc.aio.secure_channel(address, self._credentials, options=channel_options())
        return grpc.aio.insecure_channel(address, options=channel_options())

    def bulk_lane(self) -> Lane:
        """See `Transport.bulk_lane`."""
        return BulkLane(
            connections=self._config.connections_per_peer,
            connect_timeout_s=self._config.connect_deadline_s,
            congestion=self._config.congestion,
        )

    def serve_bulk(self, open_ticket: OpenTicket, limit: ServeLimit) -> BulkEndpoint:
        """See `Transport.serve_bulk`."""
        server = BulkServer(
            self._config.bind,
            self._config.bulk_port,
            open_ticket,
            congestion=self._config.congestion,
            serve_limit=limit,
        )
        server.start()
        return server
