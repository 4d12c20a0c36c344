"""The session of the process that started this one, through its environment.

`torch.distributed.checkpoint` saves in the background in a process that it spawns, and gives that nothing but a
checkpoint id. Were the process to call `init`, it would be a new incarnation of the job, and the trainer refused.
"""

from __future__ import annotations

import base64
import binascii
import os
import zlib

from replicator.errors import UnsupportedError

VARIABLE = "REPLICATOR_PARENT_SESSION"
# A process cannot be started with a variable of 128 KiB or more.
MAX_CHARS = 96 << 10


def announce(spec: bytes) -> None:
    """Processes that this one starts from now on may take part in its session."""
    os.environ[VARIABLE] = _text(spec)


def withdraw(spec: bytes) -> None:
    """The session is closed."""
    if os.environ.get(VARIABLE) == _text(spec):
        del os.environ[VARIABLE]


def inherited() -> bytes | None:
    """What the process that started this one announced; None when it did not.

    Raises:
        UnsupportedError: there is a session, and it has too many nodes to be told in this way.
    """
    pid, _, packed = os.environ.get(VARIABLE, "").partition(":")
    if not pid.isdigit() or int(pid) != os.getppid():
        return None
    if not packed:
        raise UnsupportedError(
            "the process that started this one has a session of a job with very many nodes, which this one cannot take "
            "over; give the storage writer to the save, dcp.async_save(storage_writer=ReplicatedStorageWriter(session))"
        )
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True))
    except (binascii.Error, zlib.error):
        return None


def _text(spec: bytes) -> str:
    packed = base64.b64encode(zlib.compress(spec)).decode()
    return f"{os.getpid()}:{packed if len(packed) <= MAX_CHARS else ''}"
