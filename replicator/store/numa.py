"""Which memory is near to a process, on machines whose memory has several nodes. On others nothing is ever called.

Policies that are set through a mapping of a tmpfs file belong to the file: whoever has its pages made gets them there.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

SYSFS = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED = 1
_WORD_BITS = 64
_libc = ctypes.CDLL(None, use_errno=True)


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a kernel list like `0-3,8`. Raises ValueError."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def nodes(sysfs: Path | None = None) -> dict[int, frozenset[int]]:
    """The processors of every node that has memory; empty when the kernel does not say."""
    top = sysfs or SYSFS
    try:
        return {
            node: parse_list((top / f"node{node}" / "cpulist").read_text())
            for node in sorted(parse_list((top / "has_memory").read_text()))
        }
    except (OSError, ValueError):
        return {}


def node_of(pid: int, sysfs: Path | None = None) -> int | None:
    """The node on whose processors a process runs, when there are several nodes and it can be told.

    That is the one that it is bound to, else the one on which its main thread was last.
    """
    found = nodes(sysfs)
    if len(found) < 2:
        return None
    try:
        bound = os.sched_getaffinity(pid)
        for node, processors in found.items():
            if bound <= processors:
                return node
        # The name of a program, in parentheses, may have spaces in it.
        processor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[36])
    except (OSError, ValueError, IndexError):
        return None
    return next((node for node, processors in found.items() if processor in processors), None)


def prefer(address: int, length: int, node: int) -> int:
    """Have new pages of mapped memory on a node while it has some, else anywhere; 0 or the error number.

    `address` is at the beginning of a page.
    """
    if _MBIND is None:
        return 0
    words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel takes one bit less than it is told.
    failed = _libc.syscall(
        ctypes.c_long(_MBIND),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_long(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(len(words) * _WORD_BITS + 1),
        ctypes.c_uint(0),
    )
    return ctypes.get_errno() if failed else 0
