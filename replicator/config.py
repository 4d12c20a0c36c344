"""The agent's configuration: a TOML file, then the environment, then flags; the later wins.

Every setting is one field of `AgentConfig`. In the file it is a key of the same name, in the environment
`REPLICATOR_<NAME>`, on the command line `--<name>` with dashes. Unknown keys are errors, and all
timeouts derive from the one knob `deadline_s`.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import json
import math
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from replicator.errors import ConfigError, InvalidIdError
from replicator.ids import Labels, validate_labels, validate_node_id

ENV_PREFIX = "REPLICATOR_"
# No settings of the agent: read by the trainer's library (replicator.client) or, the last, by `faultpoints`.
CLIENT_ENV = frozenset(
    {
        "REPLICATOR_JOB",
        "REPLICATOR_AGENT_CONFIG",
        "REPLICATOR_SOCKET",
        "REPLICATOR_FAULTPOINT",
        "REPLICATOR_PARENT_SESSION",
    }
)
PLACEMENTS = ("group", "pairwise", "ring", "explicit")
BuddyMap = tuple[tuple[str, tuple[str, ...]], ...]
"""Nodes and their buddies, sorted by node."""
AUTO_BYTES = -1
"""Of a size that may be `auto`."""
MIN_SERVE_LIMIT = 1 << 20
_SIZE_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_ADDRESS = re.compile(rf"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>{_HOST.pattern})):(?P<port>[0-9]{{1,5}})")
_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?P<unit>[KMGT]I?)?B?")


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
        try:
            validate_node_id(self.node_id)
        except InvalidIdError as error:
            raise ConfigError(f"node_id: {error}") from None
        if not self.root or "\0" in self.root:
            raise ConfigError("root: expected a directory, found an empty path")
        for name in ("port", "bulk_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name}: expected 0..65535, found {getattr(self, name)}")
        _at_least("replicas", self.replicas, 0)
        try:
            validate_labels(self.labels)
        except InvalidIdError as error:
            raise ConfigError(str(error)) from None
        unknown = [level for level, _ in self.labels if self.domain_levels and level not in self.domain_levels]
        if unknown:
            raise ConfigError(
                f"labels: expected levels of domain_levels ({', '.join(self.domain_levels)}), found {unknown[0]}"
            )
        if bool(self.placement_map) != (self.placement == "explicit"):
            raise ConfigError(
                f"placement_map: expected one exactly with placement = 'explicit', found placement = "
                f"{self.placement or 'group'!r} {'with' if self.placement_map else 'without'} one"
            )
        for node_id, chosen in self.placement_map:
            if node_id in chosen:
                raise ConfigError(
                    f"placement_map: expected other nodes as buddies of {node_id}, found {node_id} itself; it would be "
                    "the only one to keep a copy"
                )
        _at_least("keep_last", self.keep_last, 1)
        _at_least("keep_every", self.keep_every, 0)
        if self.mount_size:
            _at_least("mount_size", self.mount_size, 1 << 20)
        if self.budget_bytes and self.budget_bytes < 1 << 20:
            raise ConfigError(f"budget_bytes: expected 0 or at least {1 << 20}, found {self.budget_bytes}")
        if self.prefault_bytes != AUTO_BYTES:
            _at_least("prefault_bytes", self.prefault_bytes, 0)
        _at_least("prefault_segment_bytes", self.prefault_segment_bytes, 1 << 20)
        if not 0 <= self.prefault_max_pressure <= 100:
            raise ConfigError(f"prefault_max_pressure: expected 0..100 percent, found {self.prefault_max_pressure}")
        if self.scrub_bytes_per_s:
            _at_least("scrub_bytes_per_s", self.scrub_bytes_per_s, 1 << 20)
        if not 0 <= self.scrub_max_pressure <= 100:
            raise ConfigError(f"scrub_max_pressure: expected 0..100 percent, found {self.scrub_max_pressure}")
        _at_least("connections_per_peer", self.connections_per_peer, 1)
        _at_least("idle_exit_s", self.idle_exit_s, 0)
        if not 0.1 <= self.deadline_s <= 86400:
            raise ConfigError(f"deadline_s: expected 0.1..86400 seconds, found {self.deadline_s}")
        for item in dataclasses.fields(self):
            choices = item.metadata.get("choices")
            if choices and getattr(self, item.name) not in (*choices, item.default):
                raise ConfigError(
                    f"{item.name}: expected one of {', '.join(choices)}, found {getattr(self, item.name)!r}"
                )
        if len({bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)}) != 1:
            raise ConfigError("tls_cert, tls_key and tls_ca must be given together or not at all")
        if self.tls and self.lane == "bulk":
            raise ConfigError("lane = bulk is plain TCP and TLS was asked for; use lane = grpc or auto")
        if not _HOST.fullmatch(self.bind) and not _is_ip(self.bind):
            raise ConfigError(f"bind: expected an address to listen on, like 127.0.0.1, found {self.bind!r}")
        if not self.tls and not self.insecure and not _is_loopback(self.bind):
            raise ConfigError(
                f"bind = {self.bind!r} is not a loopback address and there is no TLS: anybody who reaches the port "
                "could read checkpoints. Give tls_cert, tls_key and tls_ca, or accept the risk with insecure = true"
            )
        if self.advertise and not _HOST.fullmatch(self.advertise) and not _is_ip(self.advertise):
            raise ConfigError(
                f"advertise: expected a host name or address without a port, found {self.advertise!r}; "
                "the port is the one that the agent listens on"
            )
        if self.advertise == "" and _is_unspecified(self.bind):
            raise ConfigError(
                f"bind = {self.bind!r} listens everywhere; say with advertise which address peers should use"
            )
        _check_membership(self)
        if self.serve_limit_bytes_per_s and self.serve_limit_bytes_per_s < MIN_SERVE_LIMIT:
            raise ConfigError(
                f"serve_limit_bytes_per_s: expected 0 or at least {MIN_SERVE_LIMIT}, found "
                f"{self.serve_limit_bytes_per_s}; slower transfers would look like stalled ones"
            )
        if self.heal_limit_bytes_per_s and self.heal_limit_bytes_per_s < MIN_SERVE_LIMIT:
            raise ConfigError(
                f"heal_limit_bytes_per_s: expected 0 or at least {MIN_SERVE_LIMIT}, found "
                f"{self.heal_limit_bytes_per_s}; slower transfers would look like stalled ones"
            )
        _at_least("drain_grace_s", self.drain_grace_s, 0)
        if not -20 <= self.nice <= 19:
            raise ConfigError(f"nice: expected -20..19, found {self.nice}")
        if self.cpu_affinity:
            parse_cpus(self.cpu_affinity)
        if not re.fullmatch("0?[0-7]{1,3}", self.socket_mode):
            raise ConfigError(f"socket_mode: expected octal digits like 0600, found {self.socket_mode!r}")


def _check_membership(config: AgentConfig) -> None:
    needed = {"dns": "dns_name", "etcd": "etcd_endpoints"}
    for source, name in (("static", "peers"), *needed.items()):
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
    return _is_ip(host) and ipaddress.ip_address(host).is_unspecified


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`; ConfigError for anything else."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= 65535 or (match["v6"] and not _is_ip(match["v6"])):
        raise ConfigError(f"expected an address like 10.0.0.1:7070, found {text[:300]!r}")
    return match["v6"] or match["host"], int(match["port"])


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def parse_size(text: str) -> int:
    """Bytes of `1500`, `64Mi`, `2G`, `2GB` or `2GiB`; ConfigError for anything else."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise ConfigError(f"expected a size like 512Mi or 2G, found {text[:80]!r}")
    number, unit = match["number"], _SIZE_UNITS[match["unit"] or ""]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def parse_cpus(text: str) -> frozenset[int]:
    """CPU numbers of a list like `0-3,8`; ConfigError for anything else."""
    cpus: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"cpu_affinity: expected CPU numbers and ranges like 0-3,8, found {text[:80]!r}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> AgentConfig:
    """Merge file, environment and flags into one AgentConfig.

    Args:
        flags: field name -> value or text; None values are left out.
        environ: REPLICATOR_* variables are read from it; default os.environ.
        file: a TOML file; default the value of REPLICATOR_AGENT_CONFIG, else none.

    Raises:
        ConfigError: unknown key, wrong type, or values that contradict each other; names the key and its origin.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get("REPLICATOR_AGENT_CONFIG") or None
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def take(raw: Mapping[str, Any], origin: str) -> None:
        values.update(_convert(raw, origin))
        origins.update(dict.fromkeys(raw, origin))

    if file is not None:
        take(_from_file(Path(file)), str(file))
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and name not in CLIENT_ENV:
            take({name[len(ENV_PREFIX) :].lower(): text}, f"environment variable {name}")
    take({k: v for k, v in (flags or {}).items() if v is not None}, "command line")
    try:
        return AgentConfig(**values)
    except ConfigError as error:
        # The first setting that it names is the one to look at; a default has no origin.
        named = next((word for word in re.findall(r"\w+", str(error)) if word in origins), None)
        if named is None:
            raise
        raise ConfigError(f"{origins[named]}: {error}") from None


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return table


def _convert(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    known = {item.name: item for item in dataclasses.fields(AgentConfig)}
    types = get_type_hints(AgentConfig)
    result: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"{origin}: unknown setting {key!r}{hint}")
        if value == "auto" and known[key].metadata.get("auto"):
            result[key] = AUTO_BYTES
            continue
        kind = known[key].metadata.get("kind")
        if isinstance(kind, str) and kind in _TABLES:
            result[key] = _TABLES[kind](key, value, origin)
            continue
        result[key] = _coerce(key, value, types[key], known[key].metadata, origin)
    return result


def _labels(key: str, value: Any, origin: str) -> Labels:
    """Of a table, or of text like zone=a,rack=r7. What has no value is left out: a launcher may not know it."""
    if isinstance(value, str):
        pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
        found = [(level.strip(), text.strip()) for level, _, text in pairs]
        wrong = any(not sign for _, sign, _ in pairs)
    else:
        wrong = not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values())
        found = [] if wrong else list(value.items())
    if wrong:
        raise ConfigError(f"{origin}: {key} expects a table, or text like zone=a,rack=r7, found {value!r}")
    return tuple((level, text) for level, text in found if text)


def _map(key: str, value: Any, origin: str) -> BuddyMap:
    """Of a table, or of a JSON object."""
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else {}
        except json.JSONDecodeError:
            value = None
    rows = list(value.items()) if isinstance(value, Mapping) else [("", None)]
    for node_id, chosen in rows:
        if not isinstance(chosen, list) or not all(isinstance(one, str) for one in chosen):
            raise ConfigError(
                f'{origin}: {key} expects a table or JSON object like {{"n0": ["n1"]}}, found {given!r}'[:300]
            )
        for one in (node_id, *chosen):
            try:
                validate_node_id(one)
            except InvalidIdError as error:
                raise ConfigError(f"{origin}: {key}: {error}") from None
    return tuple((node_id, tuple(chosen)) for node_id, chosen in sorted(rows))


_TABLES: Mapping[str, Callable[[str, Any, str], Any]] = {"labels": _labels, "map": _map}


def _coerce(key: str, value: Any, kind: Any, metadata: Mapping[str, Any], origin: str) -> Any:
    def wrong(expected: str) -> ConfigError:
        return ConfigError(f"{origin}: {key} expects {expected}, found {value!r}")

    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"):
            return True
        if isinstance(value, str) and value.lower() in ("false", "0", "no", "off"):
            return False
        raise wrong("true or false")
    if metadata.get("size") and isinstance(value, str):
        try:
            return parse_size(value)
        except ConfigError:
            raise wrong("a size like 512Mi or 2G") from None
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise wrong("a number")
        try:
            number = kind(value)
        except ValueError:
            raise wrong("a number") from None
        except OverflowError:
            raise wrong("a finite number") from None
        if not math.isfinite(number):
            raise wrong("a finite number")
        if kind is int and isinstance(value, float) and number != value:
            raise wrong("a whole number")
        return number
    if kind is str:
        if not isinstance(value, str):
            raise wrong("text")
        return value
    items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise wrong(f"a list of {metadata.get('kind', 'addresses')}")
    return tuple(item for item in items if item)
