"""Where everything of a store lies under its root, and opening a root.

Ids arrive here as validated types and leave as paths; no other module builds a path of the store. All
directories have mode 0700, all files 0600.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from replicator.errors import InvalidIdError, StoreRootError
from replicator.ids import (
    CheckpointContainerId,
    ContainerVersion,
    ObjectVersion,
    parse_step_name,
    validate_job,
    validate_object_name,
)
from replicator.small_json import parse_json
from replicator.store.mounts import filesystem_of

FORMAT_VERSION = 1
CLIENT_ID = re.compile(r"(?:agent-)?[0-9a-f]{1,64}")
TEMPORARY = ".tmp-"
_WRITES = 3
_DIRECTORIES = ("segments", "objects", "manifests", "jobs", "clients", "quarantine", "unfinished")
_GENERATION = re.compile(r"[0-9a-f]{16}")


def quote_name(name: str) -> str:
    """The file name of an object name: one file name also for names with several parts."""
    return name.replace("%", "%25").replace("/", "%2F")


def unquote_name(text: str) -> str:
    return text.replace("%2F", "/").replace("%25", "%")


@dataclass(frozen=True, slots=True)
class StorePaths:
    """The layout of one store.

    Attributes:
        huge_pages: how its file system gives huge pages, `always` or `within_size`; empty: it gives none.
        warning: a sentence about a root that works, but not well; else empty.
    """

    root: Path
    store_id: str
    filesystem: str
    huge_pages: str
    warning: str

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def manifests(self) -> Path:
        return self.root / "manifests"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def clients(self) -> Path:
        return self.root / "clients"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def unfinished(self) -> Path:
        """Marks of saves that are being made."""
        return self.root / "unfinished"

    @property
    def agent_lock(self) -> Path:
        return self.root / "agent.lock"

    @property
    def ballast(self) -> Path:
        """Room that is kept back for small records."""
        return self.root / "ballast"

    @property
    def scrub(self) -> Path:
        """Where the scrubber is."""
        return self.root / "scrub.json"

    def segment(self, name: str) -> Path:
        return self.segments / SegmentName.parse(name).text

    def objects_of(self, version: ContainerVersion) -> Path:
        return _directory(self.root, "objects", version)

    def object(self, one: ObjectVersion) -> Path:
        return self.objects_of(one.version) / quote_name(one.name)

    def manifest_of(self, version: ContainerVersion) -> Path:
        """The directory of a version's manifest and mark."""
        return _directory(self.root, "manifests", version)

    def job(self, job: str) -> Path:
        return self.jobs / f"{validate_job(job)}.json"

    def client(self, client_id: str) -> Path:
        return self.clients / check_client_id(client_id)

    def client_ids(self) -> list[str]:
        """Of all lock files, of living and dead clients."""
        return sorted(entry.name for entry in os.scandir(self.clients) if CLIENT_ID.fullmatch(entry.name))


@dataclass(frozen=True, slots=True)
class SegmentName:
    """File name in segments/: `w.` being written, or `f.` free, then the client that writes it, and a serial."""

    free: bool
    client_id: str
    serial: str

    @classmethod
    def parse(cls, text: str) -> SegmentName:
        """Raises StoreRootError for a name that is not one."""
        state, _, rest = text.partition(".")
        client_id, _, serial = rest.partition(".")
        if state not in ("w", "f") or not CLIENT_ID.fullmatch(client_id) or not _GENERATION.fullmatch(serial):
            raise StoreRootError(f"expected a segment name like w.<client>.<16 hex digits>, found {text[:200]!r}")
        return cls(state == "f", client_id, serial)

    @classmethod
    def new(cls, client_id: str, free: bool = False) -> SegmentName:
        return cls(free, check_client_id(client_id), secrets.token_hex(8))

    @property
    def text(self) -> str:
        return f"{'f' if self.free else 'w'}.{self.client_id}.{self.serial}"


def check_client_id(client_id: str) -> str:
    """Raises StoreRootError for what is not a client id."""
    if not CLIENT_ID.fullmatch(client_id):
        raise StoreRootError(f"expected a client id of hex digits, found {client_id[:80]!r}")
    return client_id


@functools.lru_cache(maxsize=1024)
def _directory(root: Path, top: str, version: ContainerVersion) -> Path:
    """Asked for again with every object of the version."""
    return root / top / version.container.job / version.container.step_name / f"{version.generation:016x}"


def walk_versions(top: Path) -> Iterator[tuple[ContainerVersion | None, Path]]:
    """All (version, directory) under objects/ or manifests/; (None, path) for what does not belong there."""
    for job in sorted(top.iterdir()):
        if not _is_directory(job) or not _is_valid(validate_job, job.name):
            yield None, job
            continue
        for step in sorted(job.iterdir()):
            if not _is_directory(step) or not _is_valid(parse_step_name, step.name):
                yield None, step
                continue
            for generation in sorted(step.iterdir()):
                yield _version_of(job.name, step.name, generation), generation


def _is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _is_valid(validate: Callable[[str], object], name: str) -> bool:
    try:
        validate(name)
    except InvalidIdError:
        return False
    return True


def _version_of(job: str, step: str, generation: Path) -> ContainerVersion | None:
    if not _is_directory(generation) or not _GENERATION.fullmatch(generation.name):
        return None
    container = CheckpointContainerId(job, parse_step_name(step))
    return ContainerVersion(container, int(generation.name, 16)) if container.step_name == step else None


def object_of_file(version: ContainerVersion, file_name: str) -> ObjectVersion | None:
    """The object that a file in a version's directory must be; None when its name cannot be one."""
    try:
        name = validate_object_name(unquote_name(file_name))
    except ValueError:
        return None
    return ObjectVersion(version, name) if quote_name(name) == file_name else None


def open_root(root: str | Path, create: bool) -> StorePaths:
    """Check (with `create`: also make) the directory of a store.

    A root that is not on a tmpfs is allowed, with a warning in the result.

    Raises:
        StoreRootError: missing, not a directory, not writable, or of another format.
    """
    path = Path(root).absolute()
    marker = path / "store.json"
    try:
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_dir():
            what = "it is not a directory" if path.exists() else "it does not exist"
            raise StoreRootError(f"cannot use {path} as a store: {what}; start the agent with --root on a tmpfs")
        if create:
            for name in _DIRECTORIES:
                (path / name).mkdir(mode=0o700, exist_ok=True)
            if not marker.exists():
                write_atomic(marker, json.dumps({"format": FORMAT_VERSION, "store_id": secrets.token_hex(16)}).encode())
        text = marker.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            raise StoreRootError(
                f"{path} is not a store: it has no store.json; start replicator-agent there first"
            ) from None
        raise StoreRootError(
            f"cannot use {path} as a store: {error.strerror}; give a directory that this user may write, with --root"
        ) from None
    filesystem, huge_pages = filesystem_of(path)
    return StorePaths(path, _store_id(marker, text), filesystem, huge_pages, _warning(path, filesystem))


def _store_id(marker: Path, text: bytes) -> str:
    try:
        found = parse_json(text)
        version, store_id = found["format"], found["store_id"]
    except (ValueError, KeyError, TypeError):
        raise StoreRootError(f"{marker} is damaged; move its directory away or choose another root") from None
    if version != FORMAT_VERSION or not isinstance(store_id, str):
        raise StoreRootError(
            f"{marker} has format {version!r}, this version reads {FORMAT_VERSION}; choose another root, or the "
            "version of Replicator that made it"
        )
    return store_id


def _warning(path: Path, filesystem: str) -> str:
    warnings = []
    if filesystem not in ("tmpfs", "ramfs", "hugetlbfs"):
        warnings.append(
            f"{path} is on {filesystem}, not on a tmpfs: checkpoints are written to a disk, slowly; "
            "choose a root under /dev/shm, or mount a tmpfs for it"
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        warnings.append(
            f"{path} has the mode {mode:04o}: other users may remove or replace what is in it; chmod 700 {path}"
        )
    return ". ".join(warnings)


def read_small(path: Path) -> bytes:
    """What `write_atomic` wrote. Raises OSError, also for what is no file (and might be waited for without end)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        return stream.read()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file so that a reader, also after a crash, finds the old content or the new.

    An agent that starts removes temporary files, and may meet that of a trainer: then it is made again.
    """
    for left in reversed(range(_WRITES)):
        temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as stream:
                stream.write(data)
            temporary.rename(path)
            return
        except FileNotFoundError:
            if not left:
                raise
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
