"""From the files of a store to its index, after any crash. Payloads are not read: a valid trailer is a seal."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from replicator.errors import CorruptObjectError, StoreRootError
from replicator.store.client_lock import is_client_alive
from replicator.store.index import Index
from replicator.store.paths import TEMPORARY, SegmentName, StorePaths, object_of_file, walk_versions
from replicator.store.pool import SegmentPool
from replicator.store.records import Records
from replicator.store.trailer import read_trailer


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a restart found: counts of each kind."""

    objects: int
    manifests: int
    quarantined: int
    removed: int

    def __str__(self) -> str:
        return (
            f"{self.objects} objects, {self.manifests} manifests, {self.quarantined} damaged files put in quarantine, "
            f"{self.removed} leftovers removed"
        )


def rebuild(paths: StorePaths, index: Index, pool: SegmentPool, records: Records) -> RebuildReport:
    """Fill an empty index and pool."""
    removed = _remove_temporaries(paths)
    quarantined = 0
    objects = 0
    for version, directory in walk_versions(paths.objects):
        if version is None:
            quarantined += move_away(paths, directory)
            continue
        for path in sorted(directory.iterdir()):
            one = object_of_file(version, path.name)
            try:
                if one is None:
                    raise CorruptObjectError(f"{path.name} is not the name of an object")
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    info, capacity = read_trailer(fd), os.fstat(fd).st_size
                finally:
                    os.close(fd)
                if info.object != one:
                    raise CorruptObjectError(f"expected {one}, found {info.object}")
            except (CorruptObjectError, OSError):
                quarantined += move_away(paths, path)
                continue
            index.add(info, capacity)
            objects += 1
    manifests = 0
    for version, data, is_protected in records.manifests():
        if data is None:
            quarantined += move_away(paths, paths.manifest_of(version))
            continue
        index.set_manifest(version, data)
        manifests += 1
        if is_protected:
            index.set_protected(version)
    for path in sorted(paths.segments.iterdir()):
        try:
            pool.adopt_file(SegmentName.parse(path.name))
        except StoreRootError:
            quarantined += move_away(paths, path)
    for client_id in paths.client_ids():
        if not is_client_alive(paths, client_id):
            paths.client(client_id).unlink(missing_ok=True)
    return RebuildReport(objects, manifests, quarantined, removed)


def _remove_temporaries(paths: StorePaths) -> int:
    removed = 0
    for top, _, names in os.walk(paths.root):
        for name in names:
            if name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(top, name))
                    removed += 1
    return removed


def move_away(paths: StorePaths, path: Path) -> int:
    """Put a damaged file or directory into quarantine/; the number of files moved (0 or 1)."""
    with contextlib.suppress(OSError):
        path.rename(paths.quarantine / f"{path.name[:80]}.{secrets.token_hex(8)}")
        return 1
    return 0
