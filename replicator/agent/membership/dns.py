"""`membership = dns`: whoever a name resolves to now, as with a headless service of Kubernetes."""

from __future__ import annotations

from replicator.agent.membership.names import Names, NameSource, Resolver
from replicator.config import AgentConfig


class DnsSource(NameSource):
    """The name stands for the nodes behind it, be they none yet, and is itself never asked."""

    kind = "dns"

    def __init__(self, config: AgentConfig, resolve: Resolver | None = None) -> None:
        super().__init__(config, Names([config.dns_name], resolve, stand_in=True))
