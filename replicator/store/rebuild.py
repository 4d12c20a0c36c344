"""From the files of a store to its index, after any crash. Payloads are not read: a valid trailer is a seal."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from replicator.errors import CorruptObjectError, StoreRootError
from replicator.faultpoints import reach
from replicator.ids import MAX_ATTEMPT, ContainerVersion, split_generation
from replicator.store.client_lock import is_client_alive
from replicator.store.index import Index
from replicator.store.paths import TEMPORARY, SegmentName, StorePaths, object_of_file, walk_versions
from replicator.store.pool import SegmentPool
from replicator.store.quarantine import move_away
from replicator.store.records import JobState, Records
from replicator.store.trailer import ObjectInfo, read_trailer

logger = logging.getLogger("replicator.store")

# Attempts that may have been given out beyond those of which something is here.
_ATTEMPTS_SKIPPED = 4096


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


def rebuild(
    paths: StorePaths, index: Index, pool: SegmentPool, records: Records, jobs: dict[str, JobState]
) -> RebuildReport:
    """Fill an empty index and pool, and `jobs`. What is damaged or does not belong there goes to quarantine."""
    removed = _remove_temporaries(paths)
    manifests = 0
    bad = _index_objects(paths, index)
    for found in records.manifests():
        if isinstance(found, Path):
            bad.append(found)
            continue
        index.set_manifest(found.version, found.data)
        manifests += 1
        if found.is_protected:
            index.set_protected(found.version)
    bad += _take_segments(paths, pool)
    for state in records.jobs():
        if isinstance(state, Path):
            bad.append(state)
        else:
            jobs[state.job] = state
    quarantined = 0
    for path in bad:
        logger.error("%s is damaged or does not belong there; it is put in quarantine", path)
        quarantined += move_away(paths, path)
        if path.parent == paths.jobs:
            _restore_job(path.stem, index, records, jobs)
    for top in (paths.objects, paths.manifests):
        _remove_empty_below(top)
    for client_id in paths.client_ids():
        if not is_client_alive(paths, client_id):
            paths.client(client_id).unlink(missing_ok=True)
    return RebuildReport(index.object_count, manifests, quarantined, removed)


def _index_objects(paths: StorePaths, index: Index) -> list[Path]:
    """Returns what is no object."""
    bad = []
    for version, directory in walk_versions(paths.objects):
        if version is None:
            bad.append(directory)
            continue
        for path in sorted(directory.iterdir()):
            try:
                index.add(*_read(version, path))
                reach("restart.rebuilding")
            except (CorruptObjectError, OSError):
                bad.append(path)
    return bad


def _read(version: ContainerVersion, path: Path) -> tuple[ObjectInfo, int]:
    """The object in a file and the bytes it takes. Raises CorruptObjectError, OSError."""
    one = object_of_file(version, path.name)
    if one is None:
        raise CorruptObjectError(f"{path.name} is not the name of an object")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        info, capacity = read_trailer(fd), os.fstat(fd).st_size
    finally:
        os.close(fd)
    if info.object != one:
        raise CorruptObjectError(f"expected {one}, found {info.object}")
    return info, capacity


def _take_segments(paths: StorePaths, pool: SegmentPool) -> list[Path]:
    """Returns what is no segment."""
    bad = []
    for path in sorted(paths.segments.iterdir()):
        try:
            name = SegmentName.parse(path.name)
            if not stat.S_ISREG(path.lstat().st_mode):
                raise StoreRootError(f"{path} is not a file")
            pool.adopt_file(name)
        except FileNotFoundError:
            continue  # its trainer sealed it, or gave it up, just now
        except StoreRootError:
            bad.append(path)
    return bad


def _restore_job(job: str, index: Index, records: Records, jobs: dict[str, JobState]) -> None:
    """Of a job whose file was damaged, the epoch is at least that of its newest container here."""
    newest = max((version.generation for version in index.versions(job)), default=0)
    if not newest:
        return
    epoch, attempt = split_generation(newest)
    state = JobState(job, epoch, (), 1, attempt=min(attempt + _ATTEMPTS_SKIPPED, MAX_ATTEMPT))
    records.put_job(state)
    jobs[job] = state
    logger.error("the epoch of job %s is taken to be %d, that of its newest container here", job, epoch)


def _remove_temporaries(paths: StorePaths) -> int:
    removed = 0
    for top, _, names in os.walk(paths.root):
        for name in names:
            if name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(top, name))
                    removed += 1
    return removed


def _remove_empty_below(top: Path) -> None:
    for name, _, _ in os.walk(top, topdown=False):
        directory = Path(name)
        if directory != top:
            with contextlib.suppress(OSError):
                directory.rmdir()
