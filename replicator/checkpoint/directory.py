"""A finished directory, written by anything, becomes a committed checkpoint: its files are the objects.

Whatever a rank reads is read once, checksummed while it is copied into the memory of this node, and sealed there; from
then on it is an object like any other. Nothing of it is visible before the commit, so a directory that turns out not
to be finished, or a rank that fails, leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicator.checkpoint.listing import Found, list_files, share_out
from replicator.checkpoint.plain_save import PlainSave
from replicator.client.agreement import Ranks, SingleRank
from replicator.client.outstanding import CommitFutures, CommitInfo, ReplicaInfo
from replicator.client.segments import SegmentObject
from replicator.client.session import Session, current_session
from replicator.decide.types import ManifestEntry
from replicator.errors import (
    ConfigError,
    DeadlineExceededError,
    DirectoryError,
    ReplicatorError,
)
from replicator.ids import CheckpointContainerId, ContainerVersion
from replicator.native import crc32c
from replicator.packs import pieces_of

PURPOSE = "directories"
"""What ranks agree on apart from everything else: commits may come from a thread of their own."""
_PIECE_BYTES = 8 << 20
_THREADS = 4
# For ranks to come, to read their files, and to wait for copies; transfers have deadlines of their own.
_WAIT_DEADLINES = 20
_TOLD_AT_ONCE = 256


@dataclass(slots=True)
class DirectoryCommit:
    """A directory that was committed. What is left goes on in the background; nobody has to wait for it.

    Attributes:
        version: of the checkpoint. objects, size_bytes: of all ranks together.
        replica_futures: of what this rank wrote, one per object and buddy.
        committed, protected: on rank 0; elsewhere None.
    """

    version: ContainerVersion
    objects: int
    size_bytes: int
    replica_futures: list[Future[ReplicaInfo]]
    committed: Future[CommitInfo] | None
    protected: Future[CommitInfo] | None
    _ranks: Ranks = field(repr=False)
    _deadline_s: float = field(repr=False)

    def wait_protected(self, deadline_s: float | None = None) -> None:
        """Until the loss of a node costs nothing. Every rank must call it, in the order of its other commits.

        Args:
            deadline_s: default: that of the commit.

        Raises:
            SaveSkippedError: a newer checkpoint superseded this one before its copies were made.
            ReplicationError, CommitError: a copy, or the commit, failed. On all ranks.
            DeadlineExceededError: it took longer.
        """
        deadline = deadline_s or self._deadline_s

        def wait() -> bytes:
            if self.protected is not None:
                try:
                    self.protected.result(deadline)
                except TimeoutError as error:
                    if isinstance(error, ReplicatorError):
                        raise
                    awaited = f"{self.version} to be protected"
                    raise DeadlineExceededError.of(awaited, "the agents of the job", deadline) from None
            return b""

        self._ranks.agree(f"the protection of {self.version}", wait, lambda _: b"", deadline + self._deadline_s)


def commit_dir(
    path: str | os.PathLike[str] | None,
    job: str | None,
    step: int,
    *,
    session: Session | None = None,
    alone: bool = False,
    resumable: bool = True,
    of_rank_0: Collection[str] = (),
    deadline_s: float | None = None,
) -> DirectoryCommit:
    """Commit a finished directory as the checkpoint of a step. Returns when its bytes are in this node's memory.

    Every rank of the job must call it when its own files are finished, each with a directory of its own or all with
    the same one: a file that several ranks see is committed once, and of files that have one name on several ranks the
    content must be the same (but see `of_rank_0`). Names are paths relative to the directory. Links to files are
    committed as files; directories without files are not kept. Copies to the buddies and the commit go on in the
    background. A step may be committed again: the newer attempt counts.

    Args:
        path: the directory; None for a rank that has none.
        job: its name; None: that of the session.
        step: 0 is a step.
        session: default: the open one of that job, or a new one from `replicator.init(job)` where none is open.
        alone: this rank's directory is the whole checkpoint, and no other rank calls it. Of the ranks of a job one may
            commit a step that way.
        resumable: whether a job can go on from it; False, for instance, for the model alone.
        of_rank_0: names, or patterns of names as of `fnmatch`. Of what they fit, ranks may have different files of one
            name, and rank 0's is committed; one that rank 0 has not is like any other.
        deadline_s: for the slowest rank to come and to read its files; default: 20 times the session's.

    Raises:
        DirectoryError: the directory, or something in it, cannot be committed, or changed meanwhile.
        InvalidIdError: a file whose name no object can have, or a step that is none.
        ConfigError: a session of another job is given, or the only one open; or ranks name different steps.
        StoreFullError: no room in the memory of a node.
        ReplicatorError: another rank failed. Every error comes on all ranks, and nothing of the attempt is kept.
    """
    session = session or current_session(job)
    if job is not None and session.job != job:
        raise ConfigError(f"expected a session of job {job}, found one of {session.job}")
    ranks = SingleRank() if alone else session.ranks_for(PURPOSE)
    deadline = deadline_s or _WAIT_DEADLINES * session.deadline_s
    return _Commit(session, ranks, path, step, resumable, of_rank_0, deadline).run()


class _Commit:
    """One call of `commit_dir`."""

    def __init__(
        self,
        session: Session,
        ranks: Ranks,
        path: str | os.PathLike[str] | None,
        step: int,
        resumable: bool,
        of_rank_0: Collection[str],
        deadline_s: float,
    ) -> None:
        self._session = session
        self._ranks = ranks
        self._path = None if path is None else Path(path)
        self._step = step
        self._resumable = resumable
        self._of_rank_0 = of_rank_0
        self._deadline_s = deadline_s
        self._listing: dict[str, Found] = {}
        self._listings: list[dict[str, Found]] = []
        self._begun: ContainerVersion | None = None  # on rank 0
        self._futures: CommitFutures | None = None  # on rank 0

    def run(self) -> DirectoryCommit:
        # A rank comes when its own files are finished. Only when all have come is a directory that they share.
        self._agree("arrival of all ranks", lambda: b"", lambda _: b"")
        try:
            generation, shares, disputed = json.loads(self._agree("files", self._list, self._share_out))
            if disputed:
                shares = json.loads(
                    self._agree(
                        "files of one name",
                        lambda: self._checksums(disputed),
                        lambda told: self._settle(shares, disputed, told),
                    )
                )
            version = ContainerVersion(CheckpointContainerId(self._session.job, self._step), generation)
            if self._ranks.rank != 0:
                self._session.follow(version.container, version)
            attempt, mine = PlainSave(self._session, version), shares[self._ranks.rank]
            objects, size = json.loads(
                self._agree("objects", lambda: self._write(attempt, mine), lambda told: self._commit(attempt, told))
            )
        except BaseException:
            if self._begun is not None:
                PlainSave(self._session, self._begun).give_up()
            raise
        futures = self._futures
        return DirectoryCommit(
            version,
            objects,
            size,
            attempt.replica_futures,
            futures.committed if futures else None,
            futures.protected if futures else None,
            self._ranks,
            self._deadline_s,
        )

    def _agree(self, what: str, local: Any, decide: Any) -> bytes:
        return self._ranks.agree(f"the {what} at step {self._step}", local, decide, self._deadline_s)

    # -- which files there are, and whose

    def _list(self) -> bytes:
        CheckpointContainerId(self._session.job, self._step)
        if self._path is not None:
            self._listing = list_files(self._path)
        told = {name: dataclasses.astuple(found) for name, found in self._listing.items()}
        return json.dumps([self._step, told]).encode()

    def _share_out(self, answers: Sequence[bytes]) -> bytes:
        told = [json.loads(answer) for answer in answers]
        steps = sorted({step for step, _ in told})
        if len(steps) > 1:
            raise ConfigError(f"expected all ranks to commit the same step, found steps {steps}")
        self._listings = [{name: Found(*found) for name, found in listing.items()} for _, listing in told]
        if not any(self._listings):
            raise DirectoryError(f"expected a directory with files to commit, {self._path or 'no rank'} has none")
        shares, disputed = share_out(self._listings, self._of_rank_0)
        if self._session.backpressure == "block":
            self._session.keep_pace(self._deadline_s)
        self._begun = self._session.begin(CheckpointContainerId(self._session.job, self._step))
        return json.dumps([self._begun.generation, shares, disputed]).encode()

    def _checksums(self, disputed: dict[str, list[int]]) -> bytes:
        mine = [name for name, ranks in disputed.items() if self._ranks.rank in ranks]
        return json.dumps({name: self._checksum(name) for name in mine}).encode()

    def _checksum(self, name: str) -> int:
        crc = 0
        piece = memoryview(bytearray(min(_PIECE_BYTES, self._listing[name].size or 1)))

        def take(size: int) -> memoryview:
            return piece[:size]

        def done(filled: memoryview) -> None:
            nonlocal crc
            crc = crc32c(filled, crc)

        self._read(name, take, done)
        return crc

    def _settle(self, shares: list[list[str]], disputed: dict[str, list[int]], answers: Sequence[bytes]) -> bytes:
        """Files of one name are one object when their bytes are equal, and the lowest of those ranks commits it."""
        told = [json.loads(answer) for answer in answers]
        for name, ranks in sorted(disputed.items()):
            found = {rank: (self._listings[rank][name].size, told[rank][name]) for rank in ranks}
            first = ranks[0]
            for rank in ranks[1:]:
                if found[rank] != found[first]:
                    raise DirectoryError(
                        f"{name} is one file on rank {first} and another on rank {rank} ({found[first][0]} and "
                        f"{found[rank][0]} bytes); a checkpoint has one file of a name: put the rank into the name, or "
                        "give the file to one rank"
                    )
            shares[first].append(name)
        return json.dumps(shares).encode()

    # -- their bytes

    def _write(self, attempt: PlainSave, names: Sequence[str]) -> bytes:
        entries: list[ManifestEntry] = []
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="replicator-commit-dir") as pool:
            parts = pieces_of([self._listing[name].size for name in names])
            waiting = [pool.submit(self._write_some, attempt, names[part]) for part in parts]
            try:
                # Some at a time: one call to the agent for many small objects, and copies begin before the last one.
                told = 0
                for left, written in zip(range(len(waiting) - 1, -1, -1), waiting, strict=True):
                    entries += written.result()
                    if not left or len(entries) - told >= _TOLD_AT_ONCE:
                        attempt.replicate([entry.name for entry in entries[told:]])
                        told = len(entries)
            finally:
                for one in waiting:
                    one.cancel()
        if self._path is not None and list_files(self._path) != self._listing:
            raise DirectoryError(f"{self._path} changed while it was read; commit a directory that is finished")
        return json.dumps([dataclasses.astuple(entry) for entry in entries]).encode()

    def _write_some(self, attempt: PlainSave, names: Sequence[str]) -> list[ManifestEntry]:
        """Small files together, or a large one alone."""
        if len(names) == 1:
            return [self._write_object(attempt, names[0])]
        return attempt.write_many([(name, self._content(name)) for name in names])

    def _content(self, name: str) -> memoryview:
        """Of a file of one piece."""
        content = memoryview(bytearray(self._listing[name].size))
        self._read(name, lambda size: content[:size], lambda _: None)
        return content

    def _write_object(self, attempt: PlainSave, name: str) -> ManifestEntry:
        def fill(sink: SegmentObject) -> None:
            self._read(name, sink.next_buffer_slice, lambda _: None)

        return attempt.write(name, self._listing[name].size, fill)

    def _read(self, name: str, take: Any, done: Any) -> None:
        """All bytes of a file, piece by piece into what `take(size)` gives; `done` gets each when it is filled.

        Raises:
            DirectoryError: it cannot be read, or is not what was listed.
        """
        assert self._path is not None
        expected, file = self._listing[name], self._path / name
        changed = DirectoryError(f"{file} changed while it was read; commit a directory that is finished")
        try:
            with open(file, "rb", buffering=0, opener=_open_now) as stream:
                if Found.of(os.fstat(stream.fileno())) != expected:
                    raise changed
                left = expected.size
                while left:
                    piece = take(min(left, _PIECE_BYTES))
                    filled = 0
                    while filled < len(piece):
                        count = stream.readinto(piece[filled:])
                        if not count:
                            raise changed
                        filled += count
                    done(piece)
                    left -= filled
                if stream.read(1) or Found.of(os.fstat(stream.fileno())) != expected:
                    raise changed
        except FileNotFoundError:
            raise DirectoryError(f"{file} vanished; commit a directory that is finished") from None
        except OSError as error:
            if isinstance(error, ReplicatorError):
                raise
            raise DirectoryError(f"{file} cannot be read: {error.strerror}") from None

    # -- the commit, on rank 0

    def _commit(self, attempt: PlainSave, answers: Sequence[bytes]) -> bytes:
        entries = [ManifestEntry(*entry) for answer in answers for entry in json.loads(answer)]
        self._futures = attempt.commit(entries, self._ranks.world_size, resumable=self._resumable)
        return json.dumps([len(entries), sum(entry.size for entry in entries)]).encode()


def _open_now(path: str, flags: int) -> int:
    """A file that became a pipe meanwhile must not be waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
