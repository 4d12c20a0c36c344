"""What happens to this process's handles when it forks (F32).

A forked child gets copies of channels, threads' locks and file mappings that belong to its parent. It must
neither use them nor run their destructors: a lock that another thread held at the fork is never released in
the child, and unmapping an address range there may hit somebody else's mapping. So in the child every handle
is dead (its methods raise), and one reference to each of its parts is leaked on purpose: they live until the child
ends.

gRPC has fork handlers of its own, which stop and restart its threads around every fork and, with a stream open,
crash or hang the process (seen with grpcio 1.85). They are read from the environment when gRPC is first used in the
process, so importing this module switches them off there, unless the user has said otherwise.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Iterable
from typing import Protocol

from replicator.errors import ForkedClientError


class Forkable(Protocol):
    """A handle that takes part."""

    def fork_parts(self) -> Iterable[object]:
        """Everything whose destructor must not run in a forked child. Called in the child; takes no lock."""
        ...


logger = logging.getLogger("replicator.client")

GRPC_FORK_SETTING = "GRPC_ENABLE_FORK_SUPPORT"
os.environ.setdefault(GRPC_FORK_SETTING, "0")

_handles: weakref.WeakSet[Forkable] = weakref.WeakSet()


def register(handle: Forkable) -> None:
    """Keep the parts of `handle` alive in any child that this process forks from now on."""
    if not _handles and os.environ.get(GRPC_FORK_SETTING, "").lower() not in ("", "0", "false", "no"):
        logger.warning(
            "%s is set: gRPC's own handlers may crash or hang this process when it forks (data loaders do) while it is "
            "attached to the agent; unset it",
            GRPC_FORK_SETTING,
        )
    _handles.add(handle)


def check_owner(pid: int, what: str) -> None:
    """Raise ForkedClientError when this process is not `pid`, the one that made `what`."""
    if os.getpid() != pid:
        raise ForkedClientError(
            f"{what} belongs to process {pid} and was used in process {os.getpid()}, forked from it; "
            "call replicator.init() in the process that needs it"
        )


def _leak(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _after_fork_in_child() -> None:
    for handle in list(_handles):
        _leak(handle)
        for part in handle.fork_parts():
            _leak(part)


os.register_at_fork(after_in_child=_after_fork_in_child)
