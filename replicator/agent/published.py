"""`agent.json`: what a running agent publishes about itself in its root, and the unix socket that it names."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from replicator.config import split_address
from replicator.errors import StoreRootError
from replicator.rpc_options import UNIX_PATH_MAX
from replicator.small_json import parse_json
from replicator.store.paths import write_atomic

RECORD = "agent.json"
# What agent.json was when the agent ended.
LAST = "agent.last.json"
SOCKET = "agent.sock"
_DIRECTORY_PREFIX = "replicator-socket-"


@dataclass(frozen=True, slots=True)
class Published:
    """The content of agent.json. It exists exactly while an agent serves (and after one that was killed)."""

    pid: int
    node_id: str
    incarnation: int
    socket: str
    grpc_address: str
    bulk_address: str
    version: str
    started_unix_ms: int


def publish(root: Path, record: Published) -> None:
    """Write agent.json in one rename.

    Raises:
        StoreRootError: it cannot be written.
    """
    text = json.dumps(dataclasses.asdict(record), indent=1) + "\n"
    try:
        write_atomic(root / RECORD, text.encode())
    except OSError as error:
        raise StoreRootError(f"cannot write {root / RECORD}: {error.strerror}; make room there") from None


def withdraw(root: Path, socket: str) -> None:
    """Remove agent.json, so that nobody comes any more. The caller holds the root's agent lock."""
    with contextlib.suppress(OSError):
        (root / RECORD).replace(root / LAST)
    _remove_socket(socket)


def last_address(root: Path, node_id: str) -> tuple[str, int]:
    """(host, gRPC port) of the agent that served this root before, as it was or was killed; ("", 0) when unknown.

    The caller holds the root's agent lock, and has not called `socket_path` yet.
    """
    for name in (RECORD, LAST):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((root / name).read_text())
            if record["node_id"] == node_id:
                return split_address(record["grpc_address"])
    return "", 0


def socket_path(root: Path) -> str:
    """Where to listen: `<root>/agent.sock`, or a private directory with a short name when that is too long.

    What an agent that was killed left of either is removed. The caller holds the root's agent lock.

    Raises:
        StoreRootError: there is no place whose path is short enough.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        _remove_socket(str(parse_json((root / RECORD).read_bytes())["socket"]))
    with contextlib.suppress(OSError):
        (root / RECORD).unlink()
    path = str(root.absolute() / SOCKET)
    if len(os.fsencode(path)) <= UNIX_PATH_MAX:
        _remove_socket(path)
        return path
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        # "xxxxxxxx" stands for what mkdtemp appends.
        if len(os.fsencode(f"{parent}/{_DIRECTORY_PREFIX}xxxxxxxx/{SOCKET}")) <= UNIX_PATH_MAX:
            with contextlib.suppress(OSError):
                return os.path.join(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=parent), SOCKET)
    raise StoreRootError(
        f"the path of the unix socket {path} is longer than {UNIX_PATH_MAX} bytes, and no directory for it can be made "
        f"in {tempfile.gettempdir()} either; give a root with a shorter path"
    )


def _remove_socket(path: str) -> None:
    """Remove a socket that is ours, and the private directory that was made for it."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    directory = os.path.dirname(path)
    if os.path.basename(directory).startswith(_DIRECTORY_PREFIX):
        with contextlib.suppress(OSError):
            Path(directory).rmdir()
