"""Where an agent learns of others, beside what the ranks of a job tell it: one file per source.

A source gives addresses and nothing more. Who is there says so itself, in a Hello: node id and incarnation.
"""

from __future__ import annotations

from replicator.agent.membership.dns import DnsSource
from replicator.agent.membership.source import Source, SourceStatus
from replicator.agent.membership.static import StaticSource
from replicator.agent.membership.torchrun import TorchrunSource
from replicator.config import AgentConfig
from replicator.ids import NodeAddress

__all__ = ["Source", "SourceStatus", "build_source"]


def build_source(config: AgentConfig, address: NodeAddress) -> Source:
    """The source that the configuration names.

    Args:
        address: of this agent, for sources where each one enters itself.

    Raises:
        ConfigError: a package that the source needs is not installed, or a file cannot be read.
    """
    if config.membership == "etcd":
        from replicator.agent.membership.etcd import EtcdSource

        return EtcdSource(config, address)
    if config.membership == "dns":
        return DnsSource(config)
    return TorchrunSource() if config.membership == "torchrun" else StaticSource(config)
