"""Which settings are impossible, or contradict each other."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from typing import TYPE_CHECKING

from replicator.config.values import AUTO_BYTES, HOST, is_ip, parse_cpus, split_address
from replicator.errors import ConfigError, InvalidIdError
from replicator.ids import validate_labels, validate_node_id

if TYPE_CHECKING:
    from replicator.config.agent import AgentConfig

MIN_SERVE_LIMIT = 1 << 20
# Each is a thread and a socket on both sides, for every other node.
MAX_CONNECTIONS_PER_PEER = 64


def check(config: AgentConfig) -> None:
    """Raise ConfigError for the first setting that cannot be; it names the setting first."""
    for check_some in (
        _check_names,
        _check_placement,
        _check_memory,
        _check_times,
        _check_choices,
        _check_network,
        _check_membership,
        _check_pace,
    ):
        check_some(config)


def _check_names(config: AgentConfig) -> None:
    try:
        validate_node_id(config.node_id)
    except InvalidIdError as error:
        raise ConfigError(f"node_id: {error}") from None
    if not config.root or "\0" in config.root:
        raise ConfigError("root: expected a directory, found an empty path")
    for name in ("port", "bulk_port"):
        if not 0 <= getattr(config, name) <= 65535:
            raise ConfigError(f"{name}: expected 0..65535, found {getattr(config, name)}")


def _check_placement(config: AgentConfig) -> None:
    _at_least("replicas", config.replicas, 0)
    try:
        validate_labels(config.labels)
    except InvalidIdError as error:
        raise ConfigError(str(error)) from None
    try:
        validate_labels(tuple((level, level) for level in config.domain_levels))
    except InvalidIdError as error:
        raise ConfigError(f"domain_levels: of {', '.join(config.domain_levels)}: {error}"[:300]) from None
    unknown = [level for level, _ in config.labels if config.domain_levels and level not in config.domain_levels]
    if unknown:
        raise ConfigError(
            f"labels: expected levels of domain_levels ({', '.join(config.domain_levels)}), found {unknown[0]}"
        )
    if bool(config.placement_map) != (config.placement == "explicit"):
        raise ConfigError(
            f"placement_map: expected one exactly with placement = 'explicit', found placement = "
            f"{config.placement or 'group'!r} {'with' if config.placement_map else 'without'} one"
        )
    for node_id, chosen in config.placement_map:
        if node_id in chosen:
            raise ConfigError(
                f"placement_map: expected other nodes as buddies of {node_id}, found {node_id} itself; it would be "
                "the only one to keep a copy"
            )


def _check_memory(config: AgentConfig) -> None:
    _at_least("keep_last", config.keep_last, 1)
    _at_least("keep_every", config.keep_every, 0)
    if config.mount_size:
        _at_least("mount_size", config.mount_size, 1 << 20)
    if config.budget_bytes and config.budget_bytes < 1 << 20:
        raise ConfigError(f"budget_bytes: expected 0 or at least {1 << 20}, found {config.budget_bytes}")
    if config.prefault_bytes != AUTO_BYTES:
        _at_least("prefault_bytes", config.prefault_bytes, 0)
    _at_least("prefault_segment_bytes", config.prefault_segment_bytes, 1 << 20)
    if not 0 <= config.prefault_max_pressure <= 100:
        raise ConfigError(f"prefault_max_pressure: expected 0..100 percent, found {config.prefault_max_pressure}")
    if config.scrub_bytes_per_s:
        _at_least("scrub_bytes_per_s", config.scrub_bytes_per_s, 1 << 20)
    if not 0 <= config.scrub_max_pressure <= 100:
        raise ConfigError(f"scrub_max_pressure: expected 0..100 percent, found {config.scrub_max_pressure}")


def _check_times(config: AgentConfig) -> None:
    if not 1 <= config.connections_per_peer <= MAX_CONNECTIONS_PER_PEER:
        raise ConfigError(
            f"connections_per_peer: expected 1..{MAX_CONNECTIONS_PER_PEER}, found {config.connections_per_peer}"
        )
    _at_least("idle_exit_s", config.idle_exit_s, 0)
    if not 0.1 <= config.deadline_s <= 86400:
        raise ConfigError(f"deadline_s: expected 0.1..86400 seconds, found {config.deadline_s}")


def _check_choices(config: AgentConfig) -> None:
    for item in dataclasses.fields(config):
        choices = item.metadata.get("choices")
        if choices and getattr(config, item.name) not in (*choices, item.default):
            raise ConfigError(
                f"{item.name}: expected one of {', '.join(choices)}, found {getattr(config, item.name)!r}"
            )


def _check_network(config: AgentConfig) -> None:
    if len({bool(config.tls_cert), bool(config.tls_key), bool(config.tls_ca)}) != 1:
        raise ConfigError("tls_cert, tls_key and tls_ca must be given together or not at all")
    if config.tls and config.lane == "bulk":
        raise ConfigError("lane = bulk is plain TCP and TLS was asked for; use lane = grpc or auto")
    if not HOST.fullmatch(config.bind) and not is_ip(config.bind):
        raise ConfigError(f"bind: expected an address to listen on, like 127.0.0.1, found {config.bind!r}")
    if not config.tls and not config.insecure and not _is_loopback(config.bind):
        raise ConfigError(
            f"bind = {config.bind!r} is not a loopback address and there is no TLS: anybody who reaches the port "
            "could read checkpoints. Give tls_cert, tls_key and tls_ca, or accept the risk with insecure = true"
        )
    if config.advertise and not HOST.fullmatch(config.advertise) and not is_ip(config.advertise):
        raise ConfigError(
            f"advertise: expected a host name or address without a port, found {config.advertise!r}; "
            "the port is the one that the agent listens on"
        )
    if config.advertise == "" and _is_unspecified(config.bind):
        raise ConfigError(
            f"bind = {config.bind!r} listens everywhere; say with advertise which address peers should use"
        )


def _check_pace(config: AgentConfig) -> None:
    if config.serve_limit_bytes_per_s and config.serve_limit_bytes_per_s < MIN_SERVE_LIMIT:
        raise ConfigError(
            f"serve_limit_bytes_per_s: expected 0 or at least {MIN_SERVE_LIMIT}, found "
            f"{config.serve_limit_bytes_per_s}; slower transfers would look like stalled ones"
        )
    if config.heal_limit_bytes_per_s and config.heal_limit_bytes_per_s < MIN_SERVE_LIMIT:
        raise ConfigError(
            f"heal_limit_bytes_per_s: expected 0 or at least {MIN_SERVE_LIMIT}, found "
            f"{config.heal_limit_bytes_per_s}; slower transfers would look like stalled ones"
        )
    _at_least("drain_grace_s", config.drain_grace_s, 0)
    if not -20 <= config.nice <= 19:
        raise ConfigError(f"nice: expected -20..19, found {config.nice}")
    if config.cpu_affinity:
        parse_cpus(config.cpu_affinity)
    if not re.fullmatch("0?[0-7]{1,3}", config.socket_mode):
        raise ConfigError(f"socket_mode: expected octal digits like 0600, found {config.socket_mode!r}")
    if int(config.socket_mode, 8) & 0o600 != 0o600:
        raise ConfigError(
            f"socket_mode: expected the owner to read and write (0600 and more), found {config.socket_mode!r}; "
            "trainers of this user could not connect"
        )


def _check_membership(config: AgentConfig) -> None:
    needed = {"dns": "dns_name", "etcd": "etcd_endpoints"}
    of_etcd = (("etcd", name) for name in ("etcd_ca", "etcd_cert", "etcd_key"))
    for source, name in (("static", "peers"), *needed.items(), *of_etcd):
        if getattr(config, name) and config.membership != source:
            raise ConfigError(
                f"{name}: expected none with membership = {config.membership}, found {getattr(config, name)!r}; "
                f"take it out, or set membership = {source}"
            )
    name = needed.get(config.membership, "")
    if name and not getattr(config, name):
        raise ConfigError(f"membership = {config.membership} needs {name}, and found none")
    for name in ("peers", "dns_name", "etcd_endpoints"):
        value = getattr(config, name)
        for address in (value,) if isinstance(value, str) and value else value:
            try:
                split_address(address)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
    if not re.fullmatch(r"(?:/[A-Za-z0-9._-]+)+/?", config.etcd_prefix):
        raise ConfigError(f"etcd_prefix: expected a path like /replicator, found {config.etcd_prefix!r}")
    if bool(config.etcd_cert) != bool(config.etcd_key) or (config.etcd_cert and not config.etcd_ca):
        raise ConfigError("etcd_cert and etcd_key must be given together, and with etcd_ca")


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{name}: expected {least} or more, found {value}")


def _is_unspecified(host: str) -> bool:
    return is_ip(host) and ipaddress.ip_address(host).is_unspecified


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
