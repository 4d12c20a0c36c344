"""Sealing: one rename gives a finished segment its final name. Used by the agent, and by a trainer without one."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from replicator.errors import CorruptObjectError, ObjectExistsError, SegmentError, StoreError
from replicator.faultpoints import reach
from replicator.store.mounts import room_for
from replicator.store.paths import StorePaths
from replicator.store.trailer import ObjectInfo, read_trailer

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def publish(paths: StorePaths, segment: str, info: ObjectInfo) -> Path:
    """Rename a segment, which holds the object and its trailer, to the object's name; its path.

    When the same object with the same content is there already, the segment is removed instead.

    Raises:
        ObjectExistsError: the name is taken by other content.
        StoreFullError: no room for the directory of the object.
        CorruptObjectError: the segment's trailer is not that of `info`.
        SegmentError: there is no such segment.
    """
    source = paths.segment(segment)
    target = paths.object(info.object)
    found = trailer_of(source)
    if found is None:
        if _is_there(target, info):
            return target
        raise SegmentError(f"segment {segment} does not exist; it was given back, or its client was taken for dead")
    if not found.same_content(info) or found.owner_node_id != info.owner_node_id:
        raise CorruptObjectError(
            f"the trailer in segment {segment} is of {found.object}, expected {info.object} as announced"
        )
    # A container that is dropped at this moment takes its directory away between mkdir and rename.
    for _ in range(100):
        try:
            with room_for(f"the name of {info.object}", paths.root):
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                reach("seal.before_rename")
                rename_new(source, target)
            reach("seal.after_rename")
            return target
        except FileExistsError:
            if not _is_there(target, info):
                raise ObjectExistsError(
                    f"{info.object} is sealed already, with other content; sealed objects are immutable: save the step "
                    "again, which makes a new generation"
                ) from None
            source.unlink(missing_ok=True)
            return target
        except FileNotFoundError:
            if not source.exists():
                raise SegmentError(f"segment {segment} was removed while it was sealed") from None
    raise StoreError(f"cannot seal {info.object}: {target.parent} is removed again and again")


def _is_there(target: Path, info: ObjectInfo) -> bool:
    try:
        found = trailer_of(target)
    except CorruptObjectError:
        return False
    return found is not None and found.same_content(info)


def trailer_of(path: str | Path) -> ObjectInfo | None:
    """What the file says of itself; None where there is none. Raises CorruptObjectError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return read_trailer(fd)
    finally:
        os.close(fd)


def rename_new(source: str | Path, target: str | Path) -> None:
    """Rename in one step, and fail with FileExistsError when `target` exists (renameat2(2))."""
    if _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(source), None, str(target))
    # A file system without it. A crash between the two leaves both names, which `Store.rebuild` mends.
    os.link(source, target)
    os.unlink(source)
