"""Nodes of one machine in network namespaces of their own, with real packets that can be dropped, delayed and cut off.

    node 0: eth0 10.77.0.1 --+
    node 1: eth0 10.77.0.2 --+-- bridge in a namespace of its own
    ...

Nothing of it is seen by the machine's own network. Root is needed, `ip`, `tc` and `nsenter`; `nft` for dropped packets.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

_PROGRAMS = ("ip", "tc", "nft", "nsenter")


@cache
def why_not() -> str:
    """Why namespaces cannot be had here; empty when they can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.getuid() != 0:
        return "network namespaces need root"
    name = f"rplprobe{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"
    try:
        _run("ip", "netns", "exec", name, "nft", "add", "table", "inet", "probe")
        _run("ip", "-n", name, "link", "add", "sw", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"this kernel lacks something: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", name)
    return ""


class Network:
    """Of `count` nodes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tag = f"rpl{os.getpid()}"
        self._made: list[str] = []

    def build(self) -> None:
        """Make it. `close` removes also what was made of one that failed."""
        switch = self._make("sw")
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for index in range(self._count):
            space = self._make(str(index))
            port = f"port{index}"
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", space, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            # bbr is slow on short, lossy or limited links like these.
            self.inside(index, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
            self.inside(index, "nft", "add", "table", "inet", "faults")
            self.inside(index, "nft", "add chain inet faults in { type filter hook input priority 0; }")

    def _make(self, suffix: str) -> str:
        name = f"{self._tag}-{suffix}"
        _run("ip", "netns", "add", name)
        self._made.append(name)
        return name

    def close(self) -> None:
        for name in self._made:
            _run("ip", "netns", "del", name)
        self._made.clear()

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def prefix(self, index: int) -> tuple[str, ...]:
        """What runs a command on a node, with the pid of who starts it."""
        return ("nsenter", f"--net=/run/netns/{self._tag}-{index}")

    def inside(self, index: int, *command: str) -> None:
        _run(*self.prefix(index), *command)

    # -- faults

    def drop(self, sender: int, receiver: int) -> None:
        """Nothing that one node sends reaches the other; what goes the other way does."""
        rule = f"ip saddr {self.address(sender)} drop"
        self.inside(receiver, "nft", f"add rule inet faults in {rule}")

    def cut(self, one: int, other: int) -> None:
        """Nothing goes either way."""
        self.drop(one, other)
        self.drop(other, one)

    def isolate(self, index: int) -> None:
        """Nothing goes to the node or from it."""
        for other in range(self._count):
            if other != index:
                self.cut(index, other)

    def link(self, index: int, state: str) -> None:
        """Its cable: `down` or `up`."""
        _run("ip", "-n", f"{self._tag}-sw", "link", "set", f"port{index}", state)

    def limit(self, index: int, bits_per_s: int) -> None:
        """What the node sends, no faster than that."""
        shape = ("tbf", "rate", f"{bits_per_s}bit", "burst", "32k", "latency", "400ms")
        _run("tc", "-n", f"{self._tag}-{index}", "qdisc", "replace", "dev", "eth0", "root", *shape)

    def unlimit(self, index: int) -> None:
        _run("tc", "-n", f"{self._tag}-{index}", "qdisc", "del", "dev", "eth0", "root")

    def heal(self) -> None:
        """All packets get through again."""
        for index in range(self._count):
            self.inside(index, "nft", "flush", "chain", "inet", "faults", "in")
            self.link(index, "up")


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    made = Network(count)
    try:
        made.build()
        yield made
    finally:
        made.close()


def _run(*command: str) -> Any:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
