"""gRPC options that both ends of a connection must agree on, and what TLS needs: for agents, trainers and the admin.

Keepalive is set here for clients and servers together: a server that tolerates fewer pings than its clients
send answers with GOAWAY `too_many_pings` (F30). Message limits stay at gRPC's defaults of 4 MiB (F28).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from replicator.config import AgentConfig
from replicator.errors import ConfigError

if TYPE_CHECKING:
    import grpc

Options = list[tuple[str, int | str]]

KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
# What a server accepts is stricter than what clients send, so that a late timer never counts as a strike.
MIN_PING_INTERVAL_MS = KEEPALIVE_TIME_MS // 2
MAX_CONCURRENT_RPCS = 1024
UNIX_PATH_MAX = 107

_KEEPALIVE: Options = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options() -> Options:
    """Of every channel. A dead peer is noticed within KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS, idle or not.

    Names are resolved again on every reconnect (F34), proxies from the environment are not used, and
    a channel never shares a connection (nor its reconnect back-off) with another one.
    """
    return [
        *_KEEPALIVE,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name the least time that one connection attempt is given.
        ("grpc.min_reconnect_backoff_ms", 3_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ]


def server_options() -> Options:
    """Of every server. A port that somebody else listens on is an error, not shared with them."""
    return [
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.so_reuseport", 0),
    ]


def server_credentials(config: AgentConfig) -> grpc.ServerCredentials:
    """Mutual TLS from `config`: peers must show a certificate of the same authority.

    Raises:
        ConfigError: a file cannot be read.
    """
    import grpc

    ca, cert, key = _pem_files(config)
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


def channel_credentials(config: AgentConfig) -> grpc.ChannelCredentials:
    """The client's side of `server_credentials`: this agent's own certificate, shown to peers.

    Raises:
        ConfigError: a file cannot be read.
    """
    import grpc

    ca, cert, key = _pem_files(config)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _pem_files(config: AgentConfig) -> tuple[bytes, bytes, bytes]:
    contents = []
    for name in ("tls_ca", "tls_cert", "tls_key"):
        path = Path(getattr(config, name))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: cannot read {path}: {error.strerror}; give a readable PEM file") from None
        if b"-----BEGIN " not in data:
            raise ConfigError(f"{name}: {path} is not a PEM file (no '-----BEGIN' line)")
        contents.append(data)
    return contents[0], contents[1], contents[2]
