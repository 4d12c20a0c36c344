"""Every setting of an agent: one field of `AgentConfig` each, and the waits that derive from them."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass, field

from replicator.config.checks import check
from replicator.config.values import BuddyMap
from replicator.ids import Labels

PLACEMENTS = ("group", "pairwise", "ring", "explicit")


def default_root() -> str:
    """The store's root when none is given: one per user, on the machine's shared-memory tmpfs."""
    return f"/dev/shm/replicator-{os.getuid()}"


@dataclass(frozen=True)
class AgentConfig:
    """All settings of one agent. Sizes in bytes, times in seconds."""

    root: str = field(default_factory=default_root, metadata={"help": "directory of the store, on a tmpfs"})
    node_id: str = field(default_factory=socket.gethostname, metadata={"help": "lasting logical name of this node"})
    bind: str = field(default="127.0.0.1", metadata={"help": "address to listen on for peers"})
    port: int = field(default=0, metadata={"help": "gRPC port for peers; 0 takes a free one and publishes it"})
    bulk_port: int = field(default=0, metadata={"help": "TCP port of the bulk lane; 0 takes a free one"})
    advertise: str = field(default="", metadata={"help": "host that peers should use; empty: the bind address"})
    insecure: bool = field(default=False, metadata={"help": "allow a non-loopback bind without TLS"})
    tls_cert: str = field(default="", metadata={"help": "PEM file of this agent's certificate"})
    tls_key: str = field(default="", metadata={"help": "PEM file of its private key"})
    tls_ca: str = field(default="", metadata={"help": "PEM file of the authority that peers' certificates must have"})
    membership: str = field(
        default="static",
        metadata={
            "help": "where agents learn of each other beside the jobs' ranks: static, dns, etcd or torchrun",
            "choices": ("static", "dns", "etcd", "torchrun"),
        },
    )
    peers: tuple[str, ...] = field(default=(), metadata={"help": "host:port of other agents (static membership)"})
    dns_name: str = field(
        default="", metadata={"help": "host:port that resolves to all agents, a headless service (dns membership)"}
    )
    etcd_endpoints: tuple[str, ...] = field(default=(), metadata={"help": "host:port of etcd (etcd membership)"})
    etcd_prefix: str = field(default="/replicator", metadata={"help": "where agents enter themselves in etcd"})
    etcd_ca: str = field(default="", metadata={"help": "PEM file of etcd's authority; empty: no TLS towards etcd"})
    etcd_cert: str = field(default="", metadata={"help": "PEM file of the certificate shown to etcd"})
    etcd_key: str = field(default="", metadata={"help": "PEM file of its private key"})
    replicas: int = field(
        default=1, metadata={"help": "copies beside the owner's, when the job does not say", "alike": True}
    )
    labels: Labels = field(
        default=(),
        metadata={"help": "failure domains of this node, outermost first, like zone=a,rack=r7", "kind": "labels"},
    )
    domain_levels: tuple[str, ...] = field(
        default=(), metadata={"help": "the levels in their order, outermost first; none: as in labels", "kind": "names"}
    )
    placement: str = field(
        default="",
        metadata={"help": "where copies go, when the job does not say; empty: group", "choices": PLACEMENTS},
    )
    placement_map: BuddyMap = field(
        default=(),
        metadata={"help": 'with placement = explicit: buddies of every node, like {"n0": ["n1"]}', "kind": "map"},
    )
    mount_size: int = field(
        default=0,
        metadata={
            "help": "mount a tmpfs of this size, with huge pages, at the root; 0: use what is there",
            "size": True,
        },
    )
    budget_bytes: int = field(
        default=0,
        metadata={"help": "bytes the store may take; 0: 90% of what the mount and the cgroup leave", "size": True},
    )
    prefault_bytes: int = field(
        default=0,
        metadata={
            "help": "memory to touch ahead of pulls while idle; auto: as much as the largest container; 0: none",
            "size": True,
            "auto": True,
        },
    )
    prefault_segment_bytes: int = field(
        default=256 << 20,
        metadata={"help": "of it, size of what is for objects of unknown size", "size": True},
    )
    prefault_max_pressure: float = field(
        default=20.0,
        metadata={
            "help": "percent of time in which processes wait for a CPU, above which no memory is touched ahead",
            "unit": "PERCENT",
        },
    )
    backpressure: str = field(
        default="skip",
        metadata={
            "help": "of a job whose saves come faster than their copies: skip saves, or block until there are copies",
            "choices": ("skip", "block"),
        },
    )
    keep_last: int = field(
        default=2, metadata={"help": "protected containers of a job to keep, at least 1", "alike": True}
    )
    keep_every: int = field(
        default=0,
        metadata={"help": "keep protected containers whose step is a multiple of this, too; 0: none", "alike": True},
    )
    lane: str = field(default="auto", metadata={"help": "auto, bulk or grpc", "choices": ("auto", "bulk", "grpc")})
    connections_per_peer: int = field(default=2, metadata={"help": "bulk-lane connections to one peer"})
    deadline_s: float = field(
        default=30.0,
        metadata={"help": "no progress for this long is a failure; other timeouts derive from it", "alike": True},
    )
    congestion: str = field(
        default="", metadata={"help": "TCP congestion control of bulk sockets; empty: the system's"}
    )
    serve_limit_bytes_per_s: int = field(
        default=0,
        metadata={"help": "bytes per second of objects served to all peers together; 0: no limit", "size": True},
    )
    scrub_bytes_per_s: int = field(
        default=64 << 20,
        metadata={"help": "bytes per second of held objects verified in the background; 0: none", "size": True},
    )
    scrub_max_pressure: float = field(
        default=20.0,
        metadata={
            "help": "percent of time in which processes wait for a CPU, above which the scrubber pauses",
            "unit": "PERCENT",
        },
    )
    heal_limit_bytes_per_s: int = field(
        default=1 << 30,
        metadata={
            "help": "bytes per second of copies that replace lost ones, served to all peers; 0: no limit of their own",
            "size": True,
        },
    )
    drain_grace_s: float = field(
        default=0.0, metadata={"help": "on SIGTERM, move what only this node provides to others for at most this long"}
    )
    nice: int = field(default=0, metadata={"help": "niceness of the agent, -20..19; 0: as it was started"})
    cpu_affinity: str = field(default="", metadata={"help": "CPUs of the agent, like 0-3,8; empty: all it may use"})
    socket_mode: str = field(default="0600", metadata={"help": "permission bits of the unix socket, octal"})
    idle_exit_s: float = field(
        default=0.0, metadata={"help": "end when no trainer was attached for this long; 0: never"}
    )
    log_level: str = field(
        default="info",
        metadata={"help": "debug, info, warning or error", "choices": ("debug", "info", "warning", "error")},
    )
    log_format: str = field(default="text", metadata={"help": "text or json", "choices": ("text", "json")})

    @property
    def alike(self) -> dict[str, str]:
        """The settings that all agents of a job must have in common, as text."""
        return {
            item.name: str(getattr(self, item.name)) for item in dataclasses.fields(self) if item.metadata.get("alike")
        }

    @property
    def unlabelled(self) -> tuple[str, ...]:
        """Levels of `domain_levels` for which this node has no label."""
        known = {level for level, _ in self.labels}
        return tuple(level for level in self.domain_levels if level not in known)

    @property
    def node_labels(self) -> Labels:
        """`labels` in the order of `domain_levels`."""
        if not self.domain_levels:
            return self.labels
        return tuple(sorted(self.labels, key=lambda pair: self.domain_levels.index(pair[0])))

    @property
    def host(self) -> str:
        """Under which peers reach this agent."""
        return self.advertise or self.bind

    # Derived waits: each is shorter than the one that contains it.
    @property
    def rpc_deadline_s(self) -> float:
        """For one unary call to a peer."""
        return self.deadline_s / 6

    @property
    def lookup_deadline_s(self) -> float:
        """For all answers of a lookup."""
        return self.deadline_s / 3

    @property
    def connect_deadline_s(self) -> float:
        """For a TCP connection to a peer."""
        return self.deadline_s / 10

    @property
    def health_interval_s(self) -> float:
        """Between two questions to a peer whether it is alive."""
        return self.deadline_s / 6

    @property
    def dead_after_s(self) -> float:
        """For which a suspect peer stays silent before it is dead: `deadline_s` at most after its last answer."""
        return self.deadline_s * 2 / 3

    @property
    def resolve_interval_s(self) -> float:
        """Between two lookups of a name, and the most between two attempts to reach a source of members."""
        return self.deadline_s / 3

    @property
    def tls(self) -> bool:
        return bool(self.tls_cert)

    def __post_init__(self) -> None:
        check(self)
