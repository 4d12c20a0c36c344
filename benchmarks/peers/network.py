"""A network of its own for a pair of processes, so that both sides of a comparison use one congestion control.

The product sets the congestion control of its sockets; other products take the system's. Where that is one that
is slow over loopback, a pair is started in a new network namespace whose default is the product's, or `reno`, which
every namespace may choose and which without losses is as fast.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_SIOCSIFADDR = 0x8916
_SIOCBRADDBR = 0x89A0
_IFF_UP = 0x1
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_INTERFACE = b"peer0"
_ADDRESS = "10.255.255.1"


def enter_own_network(congestion: str, needs_interface: bool = False) -> str:
    """Move this process to a new network namespace; the congestion control it then has.

    It has loopback, and with `needs_interface` a second interface that leads nowhere, for programs that refuse to run
    without one (and that listen on all). Where a namespace is not allowed, or not needed, the process stays where it
    is. Must be called by a process with one thread.
    """
    current = _CONGESTION.read_text().strip()
    if congestion in ("", current) and not needs_interface:
        return current
    flags = _CLONE_NEWNET | (0 if os.geteuid() == 0 else _CLONE_NEWUSER)
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        return current
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _set_up(control, b"lo")
        if needs_interface:
            fcntl.ioctl(control, _SIOCBRADDBR, _INTERFACE + b"\0")
            address = struct.pack("16sHH4s8x", _INTERFACE, socket.AF_INET, 0, socket.inet_aton(_ADDRESS))
            fcntl.ioctl(control, _SIOCSIFADDR, address)
            _set_up(control, _INTERFACE)
    for wanted in (congestion or current, "reno"):
        try:
            _CONGESTION.write_text(wanted)
            break
        except OSError:
            continue
    return _CONGESTION.read_text().strip()


def _set_up(control: socket.socket, interface: bytes) -> None:
    request = struct.pack("16sh22x", interface, 0)
    flags = struct.unpack("16sh22x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", interface, flags | _IFF_UP))
