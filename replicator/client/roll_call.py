"""What every rank says of itself when a job starts, and what rank 0 concludes from all of them. No I/O but `here`."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replicator.config import split_address
from replicator.errors import ConfigError
from replicator.ids import AgreedPlacement, Labels, NodeAddress, NodeIdentity


@dataclass(frozen=True, slots=True)
class Presence:
    """One rank: its job, its node's agent, and the machine it runs on."""

    rank: int
    job: str
    replicas: int
    root: str
    node_id: str
    incarnation: int
    grpc_address: str
    host: str  # for people
    network: str  # two processes of the same one reach each other's loopback addresses
    labels: Labels = ()
    placement: AgreedPlacement | None = None  # that this rank wants

    @property
    def node(self) -> NodeAddress:
        return NodeAddress(NodeIdentity(self.node_id, self.incarnation), self.grpc_address, self.labels)

    def to_json(self) -> bytes:
        placement = None if self.placement is None else self.placement.to_json()
        return json.dumps({**dataclasses.asdict(self), "placement": placement}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Presence:
        found = json.loads(data)
        found["labels"] = tuple((level, value) for level, value in found["labels"])
        found["placement"] = None if found["placement"] is None else AgreedPlacement.from_json(found["placement"])
        return cls(**found)


def here() -> tuple[str, str]:
    """(host name, network): the second is the kernel's boot id and this process's network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:
        return socket.gethostname(), socket.gethostname()
    return socket.gethostname(), f"{boot}/{namespace}"


def members(presences: Sequence[Presence]) -> tuple[NodeAddress, ...]:
    """The nodes of the job, sorted by name.

    Raises:
        ConfigError: ranks disagree on the job, its replicas or its placement, two agents have one name, or agents on
            different machines advertise loopback addresses.
    """
    first = presences[0]
    nodes: dict[str, Presence] = {}
    for one in presences:
        if one.job != first.job:
            raise ConfigError(
                f"rank {first.rank} belongs to job {first.job!r} and rank {one.rank} to {one.job!r}; set "
                "REPLICATOR_JOB (or the job argument) to the same name on all ranks"
            )
        if one.replicas != first.replicas:
            raise ConfigError(
                f"rank {first.rank} wants {first.replicas} replicas and rank {one.rank} wants {one.replicas}; "
                "give all ranks the same number"
            )
        if one.placement != first.placement:
            wanted = [who.placement.strategy if who.placement else "none of its own" for who in (first, one)]
            raise ConfigError(
                f"rank {first.rank} wants the placement {wanted[0]} and rank {one.rank} {wanted[1]}"
                f"{', with another map' if wanted[0] == wanted[1] else ''}; give all ranks the same"
            )
        known = nodes.setdefault(one.node_id, one)
        if known.node != one.node:
            raise ConfigError(
                f"two agents call themselves {one.node_id!r}: {known.grpc_address} (rank {known.rank} on {known.host}, "
                f"root {known.root}) and {one.grpc_address} (rank {one.rank} on {one.host}, root {one.root}); "
                "give each its own name with REPLICATOR_NODE_ID"
            )
    _check_reach(list(nodes.values()))
    return tuple(nodes[node_id].node for node_id in sorted(nodes))


def _check_reach(nodes: Sequence[Presence]) -> None:
    for one in nodes:
        if not _is_loopback(one.grpc_address):
            continue
        for other in nodes:
            if other.network != one.network:
                raise ConfigError(
                    f"the agent of {one.host} (node {one.node_id}) is reached at {one.grpc_address} only, a loopback "
                    f"address, and rank {other.rank} runs on {other.host}; start the agents with --bind (or "
                    "REPLICATOR_BIND) on an address that the other nodes reach, or with --advertise"
                )


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
