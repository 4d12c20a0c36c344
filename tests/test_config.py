"""The agent's configuration: origins and their order, wrong keys, wrong values, unsafe binds."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.config import AUTO_BYTES, AgentConfig, load_config, parse_cpus, parse_size, split_address
from replicator.errors import ConfigError

FIELDS = [item.name for item in dataclasses.fields(AgentConfig)]
SAMPLES: dict[str, Any] = {
    "root": "/dev/shm/elsewhere",
    "node_id": "rack-7.host-3",
    "bind": "127.0.0.2",
    "port": 7070,
    "bulk_port": 7071,
    "advertise": "10.0.0.7",
    "insecure": True,
    "membership": "static",
    "peers": ("10.0.0.1:7070", "[fd00::1]:7070"),
    "replicas": 2,
    "heal_limit_bytes_per_s": 1 << 27,
    "drain_grace_s": 12.5,
    "labels": (("zone", "eu-1a"), ("rack", "r7")),
    "domain_levels": ("rack", "zone"),
    "placement": "explicit",
    "placement_map": (("n0", ("n1", "n,2")), ("n1", ("n0",))),
    "mount_size": 1 << 34,
    "budget_bytes": 1 << 30,
    "prefault_bytes": 1 << 32,
    "prefault_segment_bytes": 1 << 30,
    "prefault_max_pressure": 50.0,
    "backpressure": "block",
    "keep_last": 3,
    "keep_every": 1000,
    "lane": "grpc",
    "connections_per_peer": 4,
    "deadline_s": 12.5,
    "congestion": "bbr",
    "serve_limit_bytes_per_s": 1 << 28,
    "scrub_bytes_per_s": 1 << 27,
    "scrub_max_pressure": 60.0,
    "nice": 5,
    "cpu_affinity": "0-3,8",
    "socket_mode": "0660",
    "idle_exit_s": 60.0,
    "log_level": "debug",
    "log_format": "json",
}
DNS = {"membership": "dns", "dns_name": "agents.svc:7070"}
ETCD = {
    "membership": "etcd",
    "etcd_endpoints": ("10.0.0.8:2379", "etcd.example:2379"),
    "etcd_prefix": "/training/replicator",
    "etcd_ca": "/a.pem",
    "etcd_cert": "/c.pem",
    "etcd_key": "/k.pem",
}
TLS = {"tls_cert": "/c.pem", "tls_key": "/k.pem", "tls_ca": "/a.pem"}


def text_of(value: Any) -> str:
    if value == SAMPLES["labels"]:
        return "zone=eu-1a, rack=r7,slice="
    if value == SAMPLES["placement_map"]:
        return '{"n1": ["n0"], "n0": ["n1", "n,2"]}'
    return ",".join(value) if isinstance(value, tuple) else str(value)


def toml_of(values: dict[str, Any]) -> str:
    def literal(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple) and isinstance(value[0], tuple):
            return "{" + ", ".join(f"{key} = {literal(one)}" for key, one in value) + "}"
        if isinstance(value, tuple):
            return "[" + ", ".join(f'"{item}"' for item in value) + "]"
        return f'"{value}"' if isinstance(value, str) else repr(value)

    return "\n".join(f"{name} = {literal(value)}" for name, value in values.items())


def test_the_samples_cover_every_setting() -> None:
    assert set(SAMPLES) | set(TLS) | set(DNS) | set(ETCD) == set(FIELDS)


@pytest.mark.parametrize("samples", [SAMPLES, DNS, ETCD], ids=["most", "dns", "etcd"])
def test_file_environment_and_flags_agree(tmp_path: Path, samples: dict[str, Any]) -> None:
    """The same settings by each of the three ways give the same configuration."""
    file = tmp_path / "agent.toml"
    file.write_text(toml_of(samples))
    expected = AgentConfig(**samples)
    assert load_config(environ={}, file=file) == expected
    assert load_config(environ={"REPLICATOR_AGENT_CONFIG": str(file)}) == expected
    assert load_config(environ={f"REPLICATOR_{k.upper()}": text_of(v) for k, v in samples.items()}) == expected
    assert load_config(flags={k: text_of(v) for k, v in samples.items()}, environ={}) == expected
    assert load_config(flags={**samples, **tables_of(samples)}, environ={}) == expected


def tables_of(values: dict[str, Any]) -> dict[str, Any]:
    """As a TOML file gives them."""
    if "labels" not in values:
        return {}
    buddies = {node: list(chosen) for node, chosen in values["placement_map"]}
    return {"labels": dict(values["labels"]), "placement_map": buddies}


def test_labels_are_in_the_order_of_the_levels() -> None:
    labels = "zone=a,rack=7"
    assert load_config({"labels": labels}, {}).node_labels == (("zone", "a"), ("rack", "7"))
    assert load_config({"labels": labels, "domain_levels": "rack,zone"}, {}).node_labels == (
        ("rack", "7"),
        ("zone", "a"),
    )


def test_later_origin_wins(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('port = 1\nbulk_port = 1\nnode_id = "file"')
    environ = {"REPLICATOR_PORT": "2", "REPLICATOR_BULK_PORT": "2"}
    config = load_config({"port": 3, "root": None}, environ, file)
    assert (config.port, config.bulk_port, config.node_id) == (3, 2, "file")


def test_unknown_keys_are_errors_that_name_the_origin_and_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("keep_lst = 3")
    with pytest.raises(ConfigError, match=r"agent\.toml: unknown setting 'keep_lst'; did you mean keep_last\?"):
        load_config(environ={}, file=file)
    with pytest.raises(ConfigError, match="environment variable REPLICATOR_PROT: unknown setting 'prot'"):
        load_config(environ={"REPLICATOR_PROT": "1"})
    with pytest.raises(ConfigError, match="command line: unknown setting 'zzz'; known are root, node_id"):
        load_config(flags={"zzz": 1}, environ={})


def test_the_trainers_variables_are_not_the_agents() -> None:
    load_config(environ={"REPLICATOR_JOB": "j", "REPLICATOR_SOCKET": "/s", "HOME": "/"})


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe", b"port = 1\nport = 2", b"[agent]\nport = 1"])
def test_wrong_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "agent.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"agent\.toml"):
        load_config(environ={}, file=file)


def test_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read the configuration file {path}"):
            load_config(environ={}, file=path)


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        ('port = "http"', "port expects a number"),
        ("port = 70000", "port: expected 0..65535"),
        ("port = -1", "port: expected 0..65535"),
        ("port = 1.5", "port expects a whole number"),
        ("port = true", "port expects a number"),
        ("port = inf", "port expects a"),
        ("port = nan", "port expects a"),
        ("port = []", "port expects a number"),
        ("deadline_s = inf", "deadline_s expects a finite number"),
        ("deadline_s = nan", "deadline_s expects a"),
        ("deadline_s = 0", r"deadline_s: expected 0\.1\.\.86400"),
        ("idle_exit_s = inf", "idle_exit_s expects a finite number"),
        ("idle_exit_s = -1", "idle_exit_s: expected 0 or more"),
        ("insecure = 1", "insecure expects true or false"),
        ('insecure = "maybe"', "insecure expects true or false"),
        ("node_id = 5", "node_id expects text"),
        ('node_id = "../x"', "node_id: node id contains '/'"),
        ('node_id = ""', "node_id: node id is empty"),
        ('root = ""', "root: expected a directory"),
        ('peers = ["10.0.0.1"]', r"peers: expected an address like 10\.0\.0\.1:7070, found '10\.0\.0\.1'"),
        ("peers = [1]", "peers expects a list of addresses"),
        ('membership = "zookeeper"', "membership: expected one of static, dns, etcd, torchrun, found 'zookeeper'"),
        ('membership = "dns"', "membership = dns needs dns_name"),
        ('membership = "etcd"', "membership = etcd needs etcd_endpoints"),
        ('membership = "dns"\ndns_name = "agents.svc"', r"dns_name: expected an address like 10\.0\.0\.1:7070"),
        ('membership = "etcd"\netcd_endpoints = ["http://e:2379"]', "etcd_endpoints: expected an address like"),
        ('membership = "torchrun"\npeers = ["h:1"]', "peers: expected none with membership = torchrun"),
        ('dns_name = "agents.svc:1"', "dns_name: expected none with membership = static"),
        ('etcd_prefix = "replicator"', "etcd_prefix: expected a path like /replicator"),
        ('etcd_ca = "/c.pem"', "etcd_ca: expected none with membership = static, found '/c.pem'"),
        ('etcd_key = "/c.pem"', "etcd_key: expected none with membership = static"),
        (
            'membership = "etcd"\netcd_endpoints = ["h:1"]\netcd_cert = "/c.pem"',
            "etcd_cert and etcd_key must be given together",
        ),
        ("peers = 1", "peers expects a list of addresses"),
        ("replicas = -1", "replicas: expected 0 or more"),
        ('labels = "zone"', "labels expects a table, or text like zone=a,rack=r7, found 'zone'"),
        ("labels = {zone = 1}", "labels expects a table"),
        ('labels = "zone=a b"', "labels: expected levels and values of letters"),
        ('labels = "zone=a,zone=b"', "labels: expected at most 16 levels, each once"),
        (
            'labels = "zone=a"\ndomain_levels = ["rack"]',
            r"labels: expected levels of domain_levels \(rack\), found zone",
        ),
        ("domain_levels = 1", "domain_levels expects a list of names"),
        ('domain_levels = "a b"', "domain_levels: of a b: labels: expected levels and values of letters"),
        ('domain_levels = "zone,zone"', "domain_levels: of zone, zone: labels: expected at most 16 levels, each once"),
        ('socket_mode = "0"', "socket_mode: expected the owner to read and write"),
        ('placement = "star"', "placement: expected one of group, pairwise, ring, explicit, found 'star'"),
        ('placement = "explicit"', "placement_map: expected one exactly with placement = 'explicit', found"),
        ('placement_map = {n0 = ["n1"]}', "found placement = 'group' with one"),
        ('placement_map = "{"', r'placement_map expects a table or JSON object like {"n0": .* found \'{\''),
        (
            'placement = "explicit"\nplacement_map = {n0 = ["n1", "n0"]}',
            "placement_map: expected other nodes as buddies of n0, found n0 itself",
        ),
        ("placement_map = {n0 = 1}", "placement_map expects a table"),
        ('placement_map = {n0 = ["a/b"]}', "placement_map: node id contains '/'"),
        ("keep_last = 0", "keep_last: expected 1 or more"),
        ("connections_per_peer = 0", r"connections_per_peer: expected 1\.\.64, found 0"),
        ("budget_bytes = -1", "budget_bytes: expected 0 or at least 1048576, found -1"),
        ('budget_bytes = "-1G"', "budget_bytes expects a size like 512Mi or 2G"),
        ('budget_bytes = "inf"', "budget_bytes expects a size like 512Mi or 2G"),
        ('lane = "pigeon"', "lane: expected one of auto, bulk, grpc, found 'pigeon'"),
        ('log_level = "loud"', "log_level: expected one of"),
        ('socket_mode = "rw"', "socket_mode: expected octal digits"),
        ('socket_mode = "-7"', "socket_mode: expected octal digits"),
        ('socket_mode = "10000"', "socket_mode: expected octal digits"),
        ('tls_cert = "/c.pem"', "must be given together or not at all"),
        ('bind = ""', "bind: expected an address"),
    ],
)
def test_wrong_values_are_one_clear_line(tmp_path: Path, toml: str, reason: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(environ={}, file=file)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{file}: ")


def test_a_value_that_cannot_be_is_told_with_where_it_came_from(tmp_path: Path) -> None:
    """Of the ways that gave it, the one that won."""
    file = tmp_path / "agent.toml"
    file.write_text("port = 70000\nbudget_bytes = 2000000")
    with pytest.raises(ConfigError, match=r"^environment variable REPLICATOR_PORT: port: expected 0\.\.65535"):
        load_config(environ={"REPLICATOR_PORT": "70001"}, file=file)
    with pytest.raises(ConfigError, match=r"^command line: port: expected"):
        load_config(flags={"port": "70002"}, environ={"REPLICATOR_PORT": "1"}, file=file)
    with pytest.raises(ConfigError, match=r"^command line: budget_bytes expects a size like 512Mi or 2G, found '12Q'$"):
        load_config(flags={"budget_bytes": "12Q", "port": "1"}, environ={}, file=file)
    with pytest.raises(ConfigError, match=r"^command line: bind = '10\.0\.0\.1' is not a loopback address"):
        load_config(flags={"bind": "10.0.0.1", "port": "1"}, environ={}, file=file)


@pytest.mark.parametrize("bind", ["0.0.0.0", "10.0.0.1", "::", "fd00::1", "example.org", "0", "::ffff:10.0.0.1"])
def test_non_loopback_bind_without_tls_is_refused(bind: str) -> None:
    """F39."""
    with pytest.raises(ConfigError, match=r"insecure = true"):
        AgentConfig(bind=bind, advertise="10.0.0.1")
    assert AgentConfig(bind=bind, advertise="10.0.0.1", insecure=True).bind == bind
    assert AgentConfig(bind=bind, advertise="10.0.0.1", **TLS).tls


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_bind_needs_nothing(bind: str) -> None:
    assert AgentConfig(bind=bind).bind == bind


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "0:0:0:0:0:0:0:0"])
def test_listening_everywhere_needs_an_address_to_tell_peers(bind: str) -> None:
    """F33."""
    with pytest.raises(ConfigError, match="say with advertise which address peers should use"):
        AgentConfig(bind=bind, insecure=True)


@pytest.mark.parametrize("advertise", ["10.0.0.1:7070", "a b", "http://x"])
def test_advertise_is_a_host_without_port(advertise: str) -> None:
    with pytest.raises(ConfigError, match="advertise: expected a host name or address without a port"):
        AgentConfig(advertise=advertise)


def test_bulk_lane_and_tls_contradict() -> None:
    with pytest.raises(ConfigError, match="use lane = grpc or auto"):
        AgentConfig(lane="bulk", **TLS)


@given(st.floats(0.1, 86400))
def test_derived_waits_are_ordered(deadline: float) -> None:
    """F18: an inner wait ends before the one that contains it."""
    config = AgentConfig(deadline_s=deadline)
    assert (
        0 < config.connect_deadline_s < config.rpc_deadline_s < config.lookup_deadline_s < config.deadline_s == deadline
    )
    # Asked, not answered in time, silent from then on: dead within the deadline of the last answer.
    dead_s = config.health_interval_s + config.rpc_deadline_s + config.dead_after_s
    assert dead_s <= deadline * (1 + 1e-9)
    assert config.lookup_deadline_s < config.dead_after_s


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1500", 1500),
        ("64Mi", 64 << 20),
        ("64MiB", 64 << 20),
        ("2G", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("2gib", 2 << 30),
        (" 1.5 Ki ", 1536),
        ("5B", 5),
        ("1T", 10**12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@given(st.integers(0, 2**63), st.sampled_from([("", 1), ("K", 1000), ("Ki", 1024), ("GiB", 1 << 30)]))
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number}{unit[0]}") == number * unit[1]


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError:
        return
    assert size >= 0


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1GG", "inf", "nan", "1e999", "1 2", "BB", "1BB", "IB"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        parse_size(text)


@given(
    st.sampled_from(["h", "10.0.0.1", "a-b.example.org", "example.org.", "h" * 63, "fd00::1", "::1"]),
    st.integers(1, 65535),
)
def test_address_round_trip(host: str, port: int) -> None:
    text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert split_address(text) == (host, port)


@given(st.text(max_size=12))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        host, port = split_address(text)
    except ConfigError:
        return
    assert host
    assert 0 < port < 65536
    assert text in (f"{host}:{text.rpartition(':')[2]}", f"[{host}]:{text.rpartition(':')[2]}")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":1",
            "h",
            "h:",
            "h:0",
            "h:65536",
            "h:-1",
            "h:²",
            "h:\uff11",
            "h :1",
            "h\0:1",
            "fd00::1:80",
            "[h:1",
            "[]:1",
        ),
        *(".:1", "a..b:1", ".a:1", "a..:1", "h" * 64 + ":1"),
    ],
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected an address like 10\.0\.0\.1:7070"):
        split_address(text)


@pytest.mark.parametrize("host", ["a..b", "h" * 64])
def test_a_name_that_no_resolver_takes_is_refused_at_the_start(host: str) -> None:
    """An agent that took it would end as soon as it looked it up."""
    with pytest.raises(ConfigError, match="peers"):
        AgentConfig(root="/dev/shm/r", node_id="n", peers=(f"{host}:7070",))
    with pytest.raises(ConfigError, match="advertise"):
        AgentConfig(root="/dev/shm/r", node_id="n", advertise=host)


def test_defaults_are_valid_and_safe() -> None:
    config = load_config(environ={})
    assert config.bind == "127.0.0.1"
    assert not config.insecure
    assert config.root.startswith("/dev/shm/replicator-")
    assert math.isfinite(config.deadline_s)


def test_lists_of_cpus() -> None:
    assert parse_cpus("0") == {0}
    assert parse_cpus("0-3, 8") == {0, 1, 2, 3, 8}
    for wrong in ("-1", "3-0", "0,,1", "a", "0-", "1 2-x", "123456"):
        with pytest.raises(ConfigError, match="cpu_affinity"):
            AgentConfig(cpu_affinity=wrong)
    for wrong_nice in (-21, 20):
        with pytest.raises(ConfigError, match="nice"):
            AgentConfig(nice=wrong_nice)


def test_a_limit_that_would_look_like_a_stall_is_refused() -> None:
    assert load_config(flags={"serve_limit_bytes_per_s": "1Gi"}, environ={}).serve_limit_bytes_per_s == 1 << 30
    for wrong in (-1, 1, (1 << 20) - 1):
        with pytest.raises(ConfigError, match="serve_limit_bytes_per_s"):
            AgentConfig(serve_limit_bytes_per_s=wrong)


def test_memory_ahead_of_need() -> None:
    for flags in ({"prefault_bytes": "auto"}, {"prefault_bytes": AUTO_BYTES}):
        assert load_config(flags=flags, environ={}).prefault_bytes == AUTO_BYTES
    for name, wrong in (("prefault_bytes", -2), ("prefault_segment_bytes", 0), ("prefault_max_pressure", 101.0)):
        with pytest.raises(ConfigError, match=name):
            AgentConfig(**{name: wrong})
    with pytest.raises(ConfigError, match="size like"):
        load_config(flags={"budget_bytes": "auto"}, environ={})
