"""Many small objects of one container, read at once: one open, one lock and one read each, and nothing mapped."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from replicator.ids import ContainerVersion
from replicator.store.paths import StorePaths, quote_name
from replicator.store.trailer import ObjectInfo


def read_many(paths: StorePaths, version: ContainerVersion, infos: Sequence[ObjectInfo]) -> list[bytes | None]:
    """The payloads of sealed objects of this node, in order; None for one that is not there (any more).

    Nothing is verified: whoever receives the bytes does that. Each object's shared lock is held while it is read,
    so that its memory is not written again meanwhile; one that is being recycled counts as gone.
    """
    try:
        directory = os.open(paths.objects_of(version), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return [None] * len(infos)
    try:
        return [_read(directory, quote_name(info.object.name), info.size) for info in infos]
    finally:
        os.close(directory)


def _read(directory: int, name: str, size: int) -> bytes | None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # It may have been recycled between open and lock.
        if not os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=directory, follow_symlinks=False)):
            return None
        payload = os.pread(fd, size, 0)
        return payload if len(payload) == size else None
    except OSError:
        return None
    finally:
        os.close(fd)
