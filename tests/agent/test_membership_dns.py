"""Members by a headless service: real agents, the system's resolver, and a DNS server of the test's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from agent_harness import AgentProcess, wait_until
from cluster import call
from dnslib import QTYPE, RR, A, DNSRecord
from dnslib.server import BaseResolver, DNSServer

from replicator.v1 import admin_pb2

SERVER = "127.0.73.53"
PORT = 17917


class Zone(BaseResolver):  # type: ignore[misc]
    """One name, with the addresses that the test sets."""

    def __init__(self) -> None:
        self.hosts: list[str] = []

    def resolve(self, request: DNSRecord, handler: object) -> DNSRecord:
        reply = request.reply()
        if request.q.qtype == QTYPE.A:
            for host in self.hosts:
                reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(host), ttl=0))
        return reply


def with_resolver(file: Path) -> list[str]:
    """For a process about to start: a mount namespace of its own, in which /etc/resolv.conf is `file`."""
    script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(file)]


@pytest.fixture
def zone() -> Iterator[tuple[Zone, Callable[[], None]]]:
    """A zone, and what starts to serve it."""
    if os.geteuid() != 0:
        pytest.skip("only root may listen on port 53 and mount")
    made, servers = Zone(), []

    def serve() -> None:
        server = DNSServer(made, address=SERVER, port=53)
        server.start_thread()
        servers.append(server)

    yield made, serve
    for server in servers:
        server.stop()
        server.server.server_close()


def test_agents_find_each_other_by_a_service_that_comes_up_late_and_follow_a_pod_that_moves(
    shm_root: Path, zone: tuple[Zone, Callable[[], None]]
) -> None:
    """F34, F19, F33: DNS is not ready at the start; the node is told by its id wherever it is."""
    served, serve = zone
    resolv = shm_root / "resolv.conf"
    resolv.write_text(f"nameserver {SERVER}\noptions timeout:1 attempts:1\n")
    running: list[AgentProcess] = []

    def start(node_id: str, host: str) -> AgentProcess:
        agent = AgentProcess(
            shm_root / node_id,
            *("--node-id", node_id, "--bind", host, "--port", str(PORT), "--deadline-s", "3"),
            *("--membership", "dns", "--dns-name", f"agents.replicator.test:{PORT}"),
            prefix=with_resolver(resolv),
        )
        running.append(agent)
        return agent.wait_ready()

    def status(host: str) -> admin_pb2.StatusReply:
        with grpc.insecure_channel(f"{host}:{PORT}") as channel:
            return call(channel, "AdminService/Status", admin_pb2.StatusRequest(), admin_pb2.StatusReply)

    def sees(host: str, node_id: str, where: str) -> bool:
        return any(
            (peer.node.identity.node_id, peer.node.grpc_address, peer.state) == (node_id, f"{where}:{PORT}", "alive")
            for peer in status(host).peers
        )

    try:
        start("n0", "127.0.73.11")
        wait_until(lambda: "cannot be looked up" in status("127.0.73.11").membership.problem, "n0 misses DNS")
        served.hosts = ["127.0.73.11", "127.0.73.12"]
        serve()
        moving = start("n1", "127.0.73.12")
        wait_until(lambda: sees("127.0.73.11", "n1", "127.0.73.12"), "n0 sees n1")
        wait_until(lambda: sees("127.0.73.12", "n0", "127.0.73.11"), "n1 sees n0")
        assert status("127.0.73.11").membership.problem == ""
        moving.kill()
        served.hosts = ["127.0.73.11", "127.0.73.13"]
        start("n1", "127.0.73.13")
        wait_until(lambda: sees("127.0.73.11", "n1", "127.0.73.13"), "n0 sees n1 where it is now")
        assert [peer.node.identity.node_id for peer in status("127.0.73.11").peers] == ["n1"]
    finally:
        for agent in running:
            agent.close()
