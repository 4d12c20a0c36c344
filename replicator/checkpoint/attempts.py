"""Saves that are written file by file, by all ranks of a session, and committed by one of them.

For storage interfaces that know files and no save: who writes into the directory of a step takes part in the attempt
that is open for it, and one act of rank 0 commits everything that any rank has sealed in it (F07).
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import BinaryIO, cast

from replicator.checkpoint.committing import WaitFor, commit, entry_of, give_up, replicate, wait_for_commit
from replicator.checkpoint.object_file import WrittenObject
from replicator.client.outstanding import CommitFutures
from replicator.client.session import Session
from replicator.decide.types import ManifestEntry
from replicator.errors import ConfigError, ObjectExistsError, ReplicatorError
from replicator.ids import CheckpointContainerId, ContainerVersion, validate_object_name
from replicator.store.trailer import ObjectInfo

MAX_ATTEMPTS = 64
"""Attempts that are open in one process; the oldest ones are forgotten."""
MAX_SIZES = 65536
# `commit` and `protected` wait for transfers of any size; each object has a deadline of its own at the agents.
_WAIT_DEADLINES = 20
# What an object is taken to have before one of its name was written. It grows.
_FIRST_BYTES = 1 << 20


class _Saver:
    """Who saves: a thread, which does one save after another. Gone when the thread is."""


_this_thread = threading.local()


class _Sizes:
    """What objects had last time, by name: the next ones take their memory at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of: dict[str, int] = {}

    def get(self, name: str) -> int:
        with self._lock:
            return self._of.get(name, _FIRST_BYTES)

    def put(self, name: str, size: int) -> None:
        with self._lock:
            self._of.pop(name, None)
            self._of[name] = size
            if len(self._of) > MAX_SIZES:
                del self._of[next(iter(self._of))]


class Attempt:
    """One save of one container. Thread-safe.

    Attributes:
        by_name: a rank began to write without saying that this is a new save.
        drafts: contents that are no objects yet, by name; for the caller.
    """

    def __init__(
        self, session: Session, container: CheckpointContainerId, after: int, by_name: bool, sizes: _Sizes
    ) -> None:
        self.session = session
        self.container = container
        self.by_name = by_name
        self._after = after
        self._sizes = sizes
        # A file that is forgotten may be taken from it at any garbage collection.
        self._lock = threading.RLock()
        self._version: ContainerVersion | None = None
        self._names: set[str] = set()
        self._open: dict[str, weakref.ref[WrittenObject]] = {}
        self.drafts: dict[str, bytes] = {}

    @property
    def version(self) -> ContainerVersion:
        """The generation: rank 0 has begun it, the others find it where rank 0 left it.

        Raises:
            ReplicatorError: rank 0 has not begun this save.
        """
        with self._lock:
            if self._version is None:
                found = self.session.follow(self.container, None)
                if found.generation <= self._after:
                    raise ReplicatorError(
                        f"expected rank 0 to have begun a new save of {self.container}, found its last one, {found}; "
                        "all ranks save together, and rank 0 among them"
                    )
                self._version = found
            return self._version

    @property
    def generation(self) -> int:
        """-1 as long as this rank does not know it."""
        version = self._version
        return -1 if version is None else version.generation

    def is_committed(self) -> bool:
        """Whether this node has heard of the commit: then the attempt is over."""
        version = self._version
        return version is not None and self.session.agent.paths.manifest_of(version).exists()

    def has_predecessor(self) -> bool:
        """Whether this node knows of an earlier commit of the same step."""
        manifests = self.session.agent.paths.manifest_of(ContainerVersion(self.container, 0)).parent
        return manifests.is_dir() and any(manifests.iterdir())

    def has(self, name: str) -> bool:
        """Whether this rank has a file of that name in it."""
        with self._lock:
            return name in self._names or name in self.drafts

    def begin(self, saver: _Saver) -> None:
        """Rank 0. Raises the errors of `Session.begin`."""
        self._version = self.session.begin(self.container, saver=saver)

    def create(self, name: str) -> BinaryIO:
        """A file to write; it is an object of this save once it is closed.

        Raises:
            ObjectExistsError: the save has an object of that name, or it is being written.
            StoreFullError, StaleEpochError: as of `Session.create`.
        """
        one = self.version.object(validate_object_name(name))
        with self._lock:
            if name in self._names:
                raise ObjectExistsError(f"{one} was written already in this save; begin a new one with makedirs()")
            self._names.add(name)
        try:
            sink = self.session.create(one, self._sizes.get(name))
        except BaseException:
            self._forget(name)
            raise
        file = WrittenObject(sink, self._sealed, lambda: self._forget(name))
        with self._lock:
            self._open[name] = weakref.ref(file)
        return cast(BinaryIO, file)

    def remove(self, name: str) -> bool:
        """Leave a file, or a draft, out of this save; whether there was one."""
        with self._lock:
            if self.drafts.pop(name, None) is not None:
                return True
            if name not in self._names:
                return False
            writing = self._open.get(name)
        file = None if writing is None else writing()
        if file is not None:
            file.discard()
        else:
            # It stays what it is, and is no part of the checkpoint.
            self._tell(name, None)
        return True

    def commit(self, world_size: int, resumable: bool) -> CommitFutures:
        """Rank 0: all that the ranks have sealed is the checkpoint.

        Raises:
            ConfigError: another rank than 0, or a file is still being written here.
            ReplicatorError: as of `LocalAgent.commit`. Then the save has failed, and what was written of it goes.
        """
        version = self.version
        if self.session.ranks.rank != 0:
            raise ConfigError(f"{version} is committed by rank 0, and this is rank {self.session.ranks.rank}")
        try:
            with self._lock:
                unfinished = sorted(self._open)
            if unfinished:
                raise ConfigError(f"{version} cannot be committed while {unfinished[0]!r} is being written")
            entries: dict[str, ManifestEntry] = {}
            for told in self.session.ranks.collect(_objects_key(version), self.session.deadline_s):
                name, *rest = json.loads(told)
                if not rest:
                    entries.pop(name, None)
                elif name in entries:
                    raise ConfigError(f"two ranks wrote {name!r} of {version}; each needs a name of its own")
                else:
                    entries[name] = ManifestEntry(name, *rest)
            return commit(self.session, version, entries.values(), world_size, resumable)
        except BaseException:
            give_up(self.session, version)
            raise

    def _forget(self, name: str) -> None:
        with self._lock:
            self._names.discard(name)
            self._open.pop(name, None)

    def _sealed(self, info: ObjectInfo) -> None:
        """Tell rank 0, and have it copied. Trouble with copies is no trouble of the save (F40)."""
        entry = entry_of(info)
        self._tell(entry.name, entry)
        self._sizes.put(entry.name, entry.size)
        with self._lock:
            self._open.pop(entry.name, None)
        replicate(self.session, [info.object])

    def _tell(self, name: str, entry: ManifestEntry | None) -> None:
        what = [name] if entry is None else [name, entry.size, entry.crc32c, entry.owner_node_id]
        self.session.ranks.append(_objects_key(self.version), json.dumps(what).encode())


class Attempts:
    """Those of one session that are open. Thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()
        self._open: dict[CheckpointContainerId, Attempt] = {}
        # The last generation of a container that this rank wrote.
        self._last: dict[CheckpointContainerId, int] = {}
        self._sizes = _Sizes()

    def begin(self, container: CheckpointContainerId) -> Attempt:
        """A new save of `container`, on every rank. Before another rank writes, rank 0 must have come here.

        A file that was written before, without a word of a new save, belongs to this one.
        What this thread began before and never committed has failed.

        Raises:
            StaleEpochError: a newer incarnation of the job exists.
        """
        with self._lock:
            attempt = self.find(container)
            if attempt is not None and attempt.by_name:
                attempt.by_name = False
                return attempt
        return self._begin(container, by_name=False)

    def writing(self, container: CheckpointContainerId) -> Attempt:
        """The open one, or a new one. Raises like `begin`."""
        return self.find(container) or self._begin(container, by_name=True)

    def find(self, container: CheckpointContainerId) -> Attempt | None:
        """The open one."""
        with self._lock:
            attempt = self._open.get(container)
            if attempt is None or not attempt.is_committed():
                return attempt
            self._end(container)
            return None

    def commit(self, container: CheckpointContainerId, wait_for: WaitFor, resumable: bool) -> None:
        """End the open attempt with a commit.

        Raises:
            ConfigError: there is none, or this is another rank than 0.
            ReplicatorError: as of `Attempt.commit` and `wait_for_commit`.
        """
        attempt = self.find(container)
        if attempt is None:
            raise ConfigError(f"{container} is not being saved by this process, so there is nothing to commit")
        session = attempt.session
        try:
            futures = attempt.commit(session.ranks.world_size, resumable)
        finally:
            self._end(container)
        wait_for_commit(session, attempt.version, futures, wait_for, _WAIT_DEADLINES * session.deadline_s)

    def _begin(self, container: CheckpointContainerId, *, by_name: bool) -> Attempt:
        session = self._session
        coordinates = session.ranks.rank == 0
        if coordinates and session.backpressure == "block":
            session.keep_pace(_WAIT_DEADLINES * session.deadline_s)
        if not hasattr(_this_thread, "saver"):
            _this_thread.saver = _Saver()
        with self._lock:
            self._end(container)
            attempt = Attempt(session, container, self._last.get(container, -1), by_name, self._sizes)
            if coordinates:
                attempt.begin(_this_thread.saver)
            self._open[container] = attempt
            while len(self._open) > MAX_ATTEMPTS:
                self._end(next(iter(self._open)))
            return attempt

    def _end(self, container: CheckpointContainerId) -> None:
        with self._lock:
            attempt = self._open.pop(container, None)
            if attempt is None or attempt.generation < 0:
                return
            self._last[container] = attempt.generation
            while len(self._last) > MAX_ATTEMPTS:
                del self._last[next(iter(self._last))]


_by_session: dict[Session, Attempts] = {}


def attempts_of(session: Session) -> Attempts:
    """The open attempts of a session."""
    found = _by_session.get(session)
    if found is None:
        for other in list(_by_session):
            if other.agent.closed:
                _by_session.pop(other, None)
        found = _by_session.setdefault(session, Attempts(session))
    return found


def _objects_key(version: ContainerVersion) -> str:
    return f"the objects of {version}"
