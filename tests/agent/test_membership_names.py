"""A peer given by a name that stands for many nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from replicator.agent.membership.dns import DnsSource
from replicator.agent.membership.names import Names
from replicator.agent.membership.static import StaticSource
from replicator.agent.membership.torchrun import TorchrunSource
from replicator.config import AgentConfig


class Dns:
    """A name service whose answers the test sets; empty: no such name. It answers once `silent` is set."""

    def __init__(self, **hosts: Sequence[str]) -> None:
        self.hosts = dict(hosts)
        self.silent: asyncio.Event | None = None
        self.asked = 0
        self.questions: asyncio.Queue[str] = asyncio.Queue()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        self.questions.put_nowait(host)
        if self.silent is not None:
            await self.silent.wait()
        if not self.hosts[host]:
            raise OSError("Name or service not known")
        return self.hosts[host]


async def test_a_headless_service_is_all_its_nodes() -> None:
    dns = Dns(service=["10.0.0.2", "10.0.0.1", "fd00::1"])
    names = Names(["service:7070", "10.0.0.1:7070", "10.0.0.9:7"], dns.resolve)
    assert names.addresses == ("service:7070", "10.0.0.1:7070", "10.0.0.9:7"), "before it was looked up"
    await names.refresh(1.0)
    assert names.addresses == ("10.0.0.1:7070", "10.0.0.2:7070", "[fd00::1]:7070", "10.0.0.9:7")


async def test_a_name_of_one_node_stays_a_name() -> None:
    names = Names(["node:7070"], Dns(node=["10.0.0.1"]).resolve)
    await names.refresh(1.0)
    assert names.addresses == ("node:7070",)


async def test_a_service_is_the_nodes_behind_it_and_never_a_node_itself() -> None:
    """The `dns` source: no node yet, then one, then two."""
    dns = Dns(service=[])
    names = Names(["service:7"], dns.resolve, stand_in=True)
    await names.refresh(1.0)
    assert names.addresses == ()
    for hosts in (["10.0.0.1"], ["10.0.0.1", "10.0.0.2"]):
        dns.hosts["service"] = hosts
        await names.refresh(1.0)
        assert names.addresses == tuple(f"{host}:7" for host in hosts)


async def test_dns_that_is_late_or_changes() -> None:
    """F34: not ready at start; nodes that move are found at their new address; an outage forgets nothing."""
    dns = Dns(service=[])
    names = Names(["service:1"], dns.resolve)
    await names.refresh(0.05)
    assert names.addresses == ("service:1",)
    assert "Name or service not known" in names.problems["service:1"]
    dns.hosts["service"] = ["10.0.0.1", "10.0.0.2"]
    await names.refresh(0.05)
    assert names.problems == {}
    dns.hosts["service"] = []
    await names.refresh(0.05)
    assert names.addresses == ("10.0.0.1:1", "10.0.0.2:1")
    dns.hosts["service"] = ["10.0.0.2", "10.0.0.3"]
    await names.refresh(0.05)
    assert names.addresses == ("10.0.0.2:1", "10.0.0.3:1")


async def test_a_lookup_that_hangs_is_asked_once_and_waited_for_again() -> None:
    """Every pool has a bound: a resolver's thread cannot be stopped, so a second one is not started."""
    dns = Dns(service=["10.0.0.1", "10.0.0.2"])
    dns.silent = asyncio.Event()
    names = Names(["service:1"], dns.resolve)
    for _ in range(3):
        await names.refresh(0.02)
        assert "no answer within 0.0 s" in names.problems["service:1"]
    assert dns.asked == 1
    dns.silent.set()
    await names.refresh(1.0)
    assert names.addresses == ("10.0.0.1:1", "10.0.0.2:1")
    assert (dns.asked, names.problems) == (1, {})


def source_of(dns: Dns, deadline_s: float) -> DnsSource:
    config = AgentConfig(node_id="me", membership="dns", dns_name="service:7", deadline_s=deadline_s)
    return DnsSource(config, dns.resolve)


async def test_a_source_retries_until_dns_is_ready_and_looks_again_when_a_connection_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F34: with an hour between two lookups, only the retry and the lost connection can be why it knows."""
    dns = Dns(service=[])
    source = source_of(dns, 10_000.0)
    changed: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    source.on_change.append(lambda: changed.put_nowait(source.addresses))
    with caplog.at_level(logging.INFO):
        running = asyncio.create_task(source.run())
        try:
            for _ in range(3):
                await asyncio.wait_for(dns.questions.get(), 5)
            assert "service:7 cannot be looked up" in source.status.problem
            assert source.status.problem_since_unix_s > 0
            dns.hosts["service"] = ["10.0.0.1"]
            assert await asyncio.wait_for(changed.get(), 5) == ("10.0.0.1:7",)
            assert (source.status.problem, source.status.addresses) == ("", 1)
            dns.hosts["service"] = ["10.0.0.2"]
            source.poke()
            assert await asyncio.wait_for(changed.get(), 5) == ("10.0.0.2:7",)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    told = [record.message for record in caplog.records if "by dns" in record.message]
    assert len(told) == 2, "said once when it began and once when it was over, not at every try"


async def test_nothing_runs_without_names() -> None:
    config = AgentConfig(node_id="me", peers=("10.0.0.1:1", "[::1]:2"))
    await asyncio.wait_for(StaticSource(config).run(), 1.0)
    await asyncio.wait_for(TorchrunSource().run(), 1.0)
    assert TorchrunSource().addresses == ()


async def test_the_machines_own_resolver() -> None:
    names = Names(["localhost:7"])
    await names.refresh(5.0)
    assert set(names.addresses) <= {"localhost:7", "127.0.0.1:7", "[::1]:7"}
    await Names(["no-such-host.invalid:7"]).refresh(5.0)
