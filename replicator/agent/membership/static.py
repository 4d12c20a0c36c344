"""`membership = static`: the configured `peers`, and nobody else. A name among them is looked up like any."""

from __future__ import annotations

from replicator.agent.membership.names import Names, NameSource, Resolver
from replicator.config import AgentConfig


class StaticSource(NameSource):
    """A name that is one node stays a name: gRPC looks it up by itself, and a certificate may be issued to it."""

    kind = "static"

    def __init__(self, config: AgentConfig, resolve: Resolver | None = None) -> None:
        super().__init__(config, Names(config.peers, resolve))
