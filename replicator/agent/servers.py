"""A gRPC server of the agent: one for trainers on the unix socket, one for peers on TCP; with health and reflection."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from replicator.agent.decoding import DecodeGuard
from replicator.agent.rpc import require_meant_for
from replicator.config import AgentConfig
from replicator.errors import ConfigError, StoreRootError
from replicator.ids import NodeIdentity
from replicator.rpc_options import MAX_CONCURRENT_RPCS, server_credentials, server_options

LOCAL_SERVICES = ("replicator.v1.LocalService", "replicator.v1.AdminService")
PEER_SERVICES = ("replicator.v1.PeerService", "replicator.v1.DataService", "replicator.v1.AdminService")
_HEALTH = "grpc.health.v1.Health"


class _HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """The health protocol as it is; a call that names the process it is meant for gets an answer from that one only."""

    def __init__(self) -> None:
        super().__init__()
        self.identity: NodeIdentity | None = None

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if self.identity is not None:
            await require_meant_for(context, self.identity)
        return await super().Check(request, context)


class Server:
    """One listening gRPC server. Its health is NOT_SERVING until `set_serving`.

    Args:
        server: where calls come from, instead of a new gRPC server.

    Attributes:
        grpc: to register services on, before `start`.
    """

    def __init__(self, services: Sequence[str], server: grpc.aio.Server | None = None) -> None:
        self.grpc = server or grpc.aio.server(
            options=server_options(), maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS, interceptors=(DecodeGuard(),)
        )
        self._names = ("", *services)
        self._health = _HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((*services, _HEALTH, reflection.SERVICE_NAME), self.grpc)

    def listen_tcp(self, config: AgentConfig, wish: int = 0) -> str:
        """Bind the port for peers; returns the address that they should use.

        Args:
            wish: the port to take, when it is free and `config` asks for none.

        Raises:
            ConfigError: the address or port cannot be bound, or a TLS file cannot be used.
        """
        port = 0
        if wish and not config.port:
            with contextlib.suppress(RuntimeError):
                port = self._bind(config, wish)
        try:
            port = port or self._bind(config, config.port)
        except RuntimeError as error:
            raise ConfigError(_why_not_bound(config, str(error))) from None
        return _join(config.host, port)

    def _bind(self, config: AgentConfig, port: int) -> int:
        target = _join(config.bind, port)
        if config.tls:
            return int(self.grpc.add_secure_port(target, server_credentials(config)))
        return int(self.grpc.add_insecure_port(target))

    def listen_unix(self, path: str, mode: int) -> None:
        """Bind the unix socket with exactly these permission bits, from its first moment on.

        Raises:
            StoreRootError: it cannot be bound.
        """
        before = os.umask(0o777 & ~mode)
        try:
            self.grpc.add_insecure_port(f"unix:{path}")
            Path(path).chmod(mode)
        except (RuntimeError, OSError) as error:
            raise StoreRootError(f"cannot listen on the unix socket {path}: {error}") from None
        finally:
            os.umask(before)

    async def start(self, identity: NodeIdentity | None = None) -> None:
        """Accept connections; health still says NOT_SERVING, and refuses questions for another process."""
        self._health.identity = identity
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.start()

    async def set_serving(self) -> None:
        """Health says SERVING for the whole server and each service."""
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def set_stopping(self) -> None:
        """Health says NOT_SERVING for good."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, and cancel what has not ended within `grace_s`. May be called again, with less."""
        await self.grpc.stop(grace_s)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _why_not_bound(config: AgentConfig, error: str) -> str:
    """gRPC does not say why; trying again with a plain socket does."""
    reason = error
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.bind, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as found:
        reason = found.strerror or str(found)
    return (
        f"cannot listen on {_join(config.bind, config.port)} for peers: {reason}; choose another bind address or port "
        "(port 0 takes a free one)"
    )
