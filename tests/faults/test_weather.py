"""Agents that reach each other through a proxy: late bytes, stalls, and connections that break in the middle."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from fault_course import check_recovery, save
from fault_model import History
from fault_nodes import Cluster, cluster
from fault_proxy import Proxy, Weather, proxied

MIB = 1 << 20


def free_ports(count: int) -> list[int]:
    """Of nobody now. Somebody else may take one before it is used, which the agent's start would tell."""
    with contextlib.ExitStack() as sockets:
        made = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in made:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in made]


@pytest.fixture
def behind_proxies() -> Iterator[tuple[Cluster, list[Proxy]]]:
    """Three nodes, each of which is reached by the others at 127.0.1.x, through a proxy."""
    ports = [free_ports(2) for _ in range(3)]

    def flags(index: int) -> list[str]:
        grpc, bulk = ports[index]
        return ["--advertise", f"127.0.1.{index + 1}", "--port", str(grpc), "--bulk-port", str(bulk)]

    with contextlib.ExitStack() as stack:
        made = stack.enter_context(cluster(3, deadline_s=6.0, flags=flags))
        proxies = [
            stack.enter_context(proxied(f"127.0.1.{index + 1}", "127.0.0.1", ports[index], Weather()))
            for index in range(3)
        ]
        made.start()
        yield made, proxies


def test_late_lost_and_broken(behind_proxies: tuple[Cluster, list[Proxy]]) -> None:
    """F16, F45, F47: with 50 ms each way; then with stalls; then with connections that break every 6 MiB, where a
    copy goes on at the block where it stopped. Saves do not wait for any of it, and every byte is right."""
    made, proxies = behind_proxies
    history = History(made.job)
    for weather in (Weather(delay_s=0.05), Weather(stall_s=0.3, stall_chance=0.05)):
        for proxy in proxies:
            proxy.weather = weather
        save(made, history)
    for proxy in proxies:
        proxy.weather = Weather(cut_after=6 * MIB)
    save(made, history, large=13 * MIB)
    # No connection lives long enough for its share of an object: what came before counts, or it would never end.
    assert sum(proxy.cuts for proxy in proxies) >= 3
    for proxy in proxies:
        proxy.weather = Weather()
    assert check_recovery(made, history, lost_memory=False) == history.saves[-1].version
