"""The gRPC servers of an agent: what they bind, who gets in, what they say of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import Cluster
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from replicator import rpc_options
from replicator.agent.servers import LOCAL_SERVICES, PEER_SERVICES, Server
from replicator.config import AgentConfig
from replicator.errors import ConfigError, StoreRootError
from replicator.v1 import admin_pb2, data_pb2, peer_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server(PEER_SERVICES)
    yield made
    await made.stop(0)


async def health_of(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return int(reply.status)


async def test_port_zero_is_published_as_bound_and_health_follows_the_agent(server: Server) -> None:
    """F35: nobody probes for a free port and hopes that it stays free."""
    address = server.listen_tcp(AgentConfig(node_id="n1"))
    assert address.startswith("127.0.0.1:")
    assert not address.endswith(":0")
    await server.start()
    async with grpc.aio.insecure_channel(address, options=rpc_options.channel_options()) as channel:
        for service in ("", *PEER_SERVICES):
            assert await health_of(channel, service) == NOT_SERVING
        await server.set_serving()
        for service in ("", *PEER_SERVICES):
            assert await health_of(channel, service) == SERVING
        await server.set_stopping()
        assert await health_of(channel) == NOT_SERVING


async def test_advertised_host_goes_with_the_bound_port(server: Server) -> None:
    """F33: peers use the address that was said, not the one that a host name resolves to."""
    address = server.listen_tcp(AgentConfig(node_id="n1", advertise="node-1.example"))
    assert address.startswith("node-1.example:")
    assert int(address.rpartition(":")[2]) > 0


async def test_taken_port_is_one_clear_error(server: Server) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} for peers: Address already in use"):
            server.listen_tcp(AgentConfig(node_id="n1", port=port))


async def test_two_agents_never_share_a_port(server: Server) -> None:
    """With SO_REUSEPORT a second agent would silently take half of the first one's connections."""
    port = int(server.listen_tcp(AgentConfig(node_id="n1")).rpartition(":")[2])
    with pytest.raises(ConfigError, match="in use"):
        Server(PEER_SERVICES).listen_tcp(AgentConfig(node_id="n2", port=port))


async def test_foreign_bind_address_is_one_clear_error(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0 for peers: Cannot assign requested address"):
        server.listen_tcp(AgentConfig(node_id="n1", bind="192.0.2.1", insecure=True))


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
async def test_unix_socket_has_the_configured_permissions(shm_root: Path, mode: int) -> None:
    path = shm_root / "agent.sock"
    server = Server(LOCAL_SERVICES)
    before = os.umask(0o022)
    try:
        server.listen_unix(str(path), mode)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{path}", options=rpc_options.channel_options()) as channel:
        assert await health_of(channel, "replicator.v1.LocalService") == NOT_SERVING
    await server.stop(0)


async def test_unix_socket_in_a_missing_directory_is_one_clear_error(shm_root: Path) -> None:
    with pytest.raises(StoreRootError, match="cannot listen on the unix socket"):
        Server(LOCAL_SERVICES).listen_unix(str(shm_root / "missing" / "agent.sock"), 0o600)


async def test_reflection_lists_the_services(server: Server) -> None:
    address = server.listen_tcp(AgentConfig(node_id="n1"))
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        reply = await call.read()
    names = {service.name for service in reply.list_services_response.service}
    assert {*PEER_SERVICES, "grpc.health.v1.Health"} <= names


def test_keepalive_of_clients_is_tolerated_by_servers() -> None:
    """F30: pings closer together than the server's limit end the connection with too_many_pings."""
    clients, servers = dict(rpc_options.channel_options()), dict(rpc_options.server_options())
    assert clients["grpc.keepalive_time_ms"] > servers["grpc.http2.min_ping_interval_without_data_ms"]
    assert servers["grpc.keepalive_permit_without_calls"] == clients["grpc.keepalive_permit_without_calls"] == 1
    assert servers["grpc.http2.max_pings_without_data"] == clients["grpc.http2.max_pings_without_data"] == 0


async def test_idle_connection_with_keepalive_stays_up() -> None:
    """F30, ten times as fast: the control, a server with gRPC's own limits, sends its client away."""
    fast = {"grpc.keepalive_time_ms": 1000, "grpc.http2.min_ping_interval_without_data_ms": 500}

    def options(chosen: rpc_options.Options) -> list[tuple[str, int | str]]:
        return [(name, fast.get(name, value)) for name, value in chosen]

    stock = [item for item in rpc_options.server_options() if "ping" not in item[0] and "keepalive" not in item[0]]
    calls = []
    async with contextlib.AsyncExitStack() as stack:
        for chosen in (options(rpc_options.server_options()), stock):
            server = grpc.aio.server(options=chosen)
            health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options(rpc_options.channel_options()))
            await stack.enter_async_context(channel)
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await call.read()).status == SERVING
            calls.append(call)
        ours, control = calls
        async with asyncio.timeout(30):
            assert await control.code() == grpc.StatusCode.UNAVAILABLE
        assert "ping" in (await control.details()).lower()
        assert not ours.done()


def test_message_limits_are_grpc_defaults() -> None:
    """F28: nothing may depend on messages above 4 MiB."""
    for options in (rpc_options.channel_options(), rpc_options.server_options()):
        assert not [name for name, _ in options if "message_length" in name]


def tls_config(folder: Path, leaf: str = "node") -> AgentConfig:
    return AgentConfig(
        node_id="n1",
        tls_ca=str(folder / "ca.pem"),
        tls_cert=str(folder / f"{leaf}.pem"),
        tls_key=str(folder / f"{leaf}.key"),
    )


async def test_tls_lets_in_only_certificates_of_the_authority(server: Server, certificates: Path) -> None:
    config = tls_config(certificates)
    address = server.listen_tcp(config)
    await server.start()
    await server.set_serving()
    async with grpc.aio.secure_channel(address, rpc_options.channel_credentials(config)) as channel:
        assert await health_of(channel) == SERVING
    stranger = rpc_options.channel_credentials(tls_config(certificates, "other"))
    anonymous = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
    for credentials in (stranger, anonymous):
        async with grpc.aio.secure_channel(address, credentials) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_of(channel)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await health_of(channel)


@pytest.mark.parametrize("name", ["tls_ca", "tls_cert", "tls_key"])
def test_unusable_tls_files_are_named(certificates: Path, tmp_path: Path, name: str) -> None:
    config = tls_config(certificates)
    with pytest.raises(ConfigError, match=f"{name}: cannot read"):
        rpc_options.server_credentials(dataclasses.replace(config, **{name: str(tmp_path / "missing")}))
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ConfigError, match=f"{name}: .* is not a PEM file"):
        rpc_options.channel_credentials(dataclasses.replace(config, **{name: str(tmp_path / "text")}))


def _methods() -> list[Any]:
    services = [
        module.DESCRIPTOR.services_by_name[name]
        for module, name in ((peer_pb2, "PeerService"), (data_pb2, "DataService"), (admin_pb2, "AdminService"))
    ]
    return [method for service in services for method in service.methods]


def _send(channel: grpc.Channel, method: Any, path: str, data: bytes) -> None:
    if method.client_streaming:
        channel.stream_unary(path)(iter([data]), timeout=10)
    elif method.server_streaming:
        list(channel.unary_stream(path)(data, timeout=10))
    else:
        channel.unary_unary(path)(data, timeout=10)


def test_bytes_that_are_no_message_are_refused_without_a_trace(three: Cluster) -> None:
    """F38: by every method that others reach, one that takes a stream among them; the log is not theirs to fill."""
    node = three.nodes[0]
    assert node.agent is not None
    before = len(node.agent.output)
    with grpc.insecure_channel(node.address.grpc_address) as channel:
        for method in _methods():
            path = f"/{method.containing_service.full_name}/{method.name}"
            with pytest.raises(grpc.RpcError) as caught:
                _send(channel, method, path, b"\xff" * 9)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, path
            assert f"the request of {path} cannot be decoded" in caught.value.details(), path
    assert node.status().version
    assert not [line for line in node.agent.output[before:] if "Traceback" in line or "DecodeError" in line]
