"""Which network interface carries an address, for the log: a wrong one is slow for months without an error (F33)."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

from replicator.config import split_address
from replicator.errors import ConfigError

_SIOCGIFADDR = 0x8915
_SYS = Path("/sys/class/net")


def interface_of(address: str) -> str:
    """The interface of this machine that has the host of `host:port`, with its speed: "eth0 (100000 Mbit/s)".

    "unknown" where it cannot be told, for instance for an advertised address that only a router knows.
    """
    with contextlib.suppress(OSError, ConfigError):
        host = socket.gethostbyname(split_address(address)[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == host:
                    return name + _speed_of(name)
    return "unknown"


def _address_of(probe: socket.socket, name: str) -> str:
    with contextlib.suppress(OSError):
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        return socket.inet_ntoa(found[20:24])
    return ""


def _speed_of(name: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        speed = int((_SYS / name / "speed").read_text())
        if speed > 0:
            return f" ({speed} Mbit/s)"
    return ""
