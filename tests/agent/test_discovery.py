"""A peer given by a name that stands for many nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from replicator.agent.discovery import Discovery


class Dns:
    """A name service whose answers the test sets; None: it does not answer, empty: no such name."""

    def __init__(self, **hosts: Sequence[str] | None) -> None:
        self.hosts: dict[str, Sequence[str] | None] = dict(hosts)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        known = self.hosts[host]
        if known is None:
            await asyncio.Event().wait()
        if not known:
            raise OSError("Name or service not known")
        assert known is not None
        return known


async def test_a_headless_service_is_all_its_nodes() -> None:
    dns = Dns(service=["10.0.0.2", "10.0.0.1", "fd00::1"])
    discovery = Discovery(["service:7070", "10.0.0.1:7070", "10.0.0.9:7"], dns.resolve)
    assert discovery.addresses == ("service:7070", "10.0.0.1:7070", "10.0.0.9:7"), "before it was looked up"
    await discovery.refresh(1.0)
    assert discovery.addresses == ("10.0.0.1:7070", "10.0.0.2:7070", "[fd00::1]:7070", "10.0.0.9:7")


async def test_a_name_of_one_node_stays_a_name() -> None:
    discovery = Discovery(["node:7070"], Dns(node=["10.0.0.1"]).resolve)
    await discovery.refresh(1.0)
    assert discovery.addresses == ("node:7070",)


async def test_dns_that_is_late_silent_or_changes(caplog: pytest.LogCaptureFixture) -> None:
    """F34: not ready at start; nodes that move are found at their new address; an outage forgets nothing."""
    dns = Dns(service=[])
    discovery = Discovery(["service:1"], dns.resolve)
    with caplog.at_level(logging.WARNING):
        await discovery.refresh(0.05)
        await discovery.refresh(0.05)
    assert len(caplog.records) == 1, "said once, not at every try"
    assert discovery.addresses == ("service:1",)
    dns.hosts["service"] = ["10.0.0.1", "10.0.0.2"]
    await discovery.refresh(0.05)
    dns.hosts["service"] = None
    await discovery.refresh(0.05)
    assert discovery.addresses == ("10.0.0.1:1", "10.0.0.2:1")
    dns.hosts["service"] = ["10.0.0.2", "10.0.0.3"]
    await discovery.refresh(0.05)
    assert discovery.addresses == ("10.0.0.2:1", "10.0.0.3:1")


async def test_nothing_runs_without_names() -> None:
    await asyncio.wait_for(Discovery(["10.0.0.1:1", "[::1]:2"]).run(60.0, 1.0), 1.0)


async def test_the_machines_own_resolver() -> None:
    discovery = Discovery(["localhost:7"])
    await discovery.refresh(5.0)
    assert set(discovery.addresses) <= {"localhost:7", "127.0.0.1:7", "[::1]:7"}
    await Discovery(["no-such-host.invalid:7"]).refresh(5.0)
