"""A checkpoint out of the nodes' memory as a directory again, whole or not at all: the inverse of `commit_dir`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from torch.distributed.checkpoint.planner import LoadPlanner

from replicator.checkpoint.directory import PURPOSE
from replicator.checkpoint.fetch import Fetcher, Pulled
from replicator.checkpoint.verified_copy import Extent
from replicator.client.agreement import Ranks
from replicator.client.plan import Plan
from replicator.client.session import Session, current_session, known_session
from replicator.decide.types import ObjectSource
from replicator.errors import StoreError
from replicator.ids import ContainerVersion
from replicator.native import crc32c
from replicator.partial_dir import PartialDirectory

_SLICE_BYTES = 32 << 20
_WAIT_DEADLINES = 20


@dataclass(frozen=True, slots=True)
class RestoredDirectory:
    """A checkpoint that lies in a directory.

    `written`: by this rank; False where another rank did it, and where it lay there already. `pulled`: what this rank
    had to fetch from other nodes. `reason`: why this step.
    """

    version: ContainerVersion
    path: Path | None
    objects: int
    size_bytes: int
    written: bool
    pulled: tuple[Pulled, ...]
    reason: str


def restore_dir(
    path: str | os.PathLike[str] | None,
    job: str | None = None,
    step: int | None = None,
    *,
    session: Session | None = None,
    plan: Plan | None = None,
    replace: bool = False,
    deadline_s: float | None = None,
) -> RestoredDirectory:
    """Lay the newest recoverable checkpoint out as a directory, all files with verified checksums.

    Every rank of the job must call it. Ranks may name the same directory, where one of them writes, or directories of
    their own, each of which gets the whole checkpoint. A directory that holds exactly this checkpoint already stays
    as it is. Otherwise it is written beside its place and renamed when every rank is done writing.

    Args:
        path: to create; may exist if it is empty, see `replace`. None for a rank that needs none.
        job: its name; None: that of the session. Another job than that of the session is only looked at: nothing
            changes for it.
        step: only this one; None: the newest.
        session: default: the open one of that job, else the newest open one, or a new one from `replicator.init(job)`
            where none is open.
        plan: of `session.lookup()`, the same on all ranks; None: asked for now.
        replace: what lies in the directory goes, instead of ConfigError.
        deadline_s: for the slowest rank; default: 20 times the session's.

    Raises:
        NoRecoverableCheckpointError: there is none; with the reason.
        ConfigError: the directory holds something else, or its parent is not there.
        StoreError: it cannot be written; StoreFullError when the disk is full.
        CorruptObjectError: no holder has bytes that match their checksums.
        ReplicatorError: an object cannot be had, or another rank failed. Every error comes on all ranks; after one of
            writing, no directory has its name.
    """
    session = session or known_session(job) or known_session() or current_session(job)
    if plan is None:
        plan = session.lookup(step, job)
    plan.require()
    ranks = session.ranks_for(PURPOSE)
    layout = _Layout(session, plan, None if path is None else Path(os.path.realpath(path)), replace)
    return layout.run(ranks, deadline_s or _WAIT_DEADLINES * session.deadline_s)


class _Layout:
    """One call of `restore_dir`."""

    def __init__(self, session: Session, plan: Plan, path: Path | None, replace: bool) -> None:
        self._session = session
        self._plan = plan
        self._version = plan.require()
        self._path = path
        self._replace = replace
        self._tag = uuid.uuid4().hex[:12]
        self._pulled: list[Pulled] = []

    def run(self, ranks: Ranks, deadline_s: float) -> RestoredDirectory:
        partial: PartialDirectory | None = None
        with ExitStack() as stack:

            def write() -> bytes:
                nonlocal partial
                if leads:
                    partial = self._write(stack)
                return b""

            def finish() -> bytes:
                if partial is not None:
                    partial.finish()
                return b""

            def agree(what: str, local: object) -> None:
                ranks.agree(f"{what} {self._version}", local, lambda _: b"", deadline_s)  # type: ignore[arg-type]

            leads = self._leads(ranks, deadline_s)
            agree("writing", write)
            agree("the directory of", finish)
        return RestoredDirectory(
            self._version,
            self._path,
            len(self._plan.sources),
            self._plan.size_bytes,
            partial is not None,
            tuple(self._pulled),
            self._plan.reason,
        )

    def _leads(self, ranks: Ranks, deadline_s: float) -> bool:
        """Whether this rank writes: of those that see the same directory, the lowest does.

        Whether two hosts see the same directory cannot be told from its name: each rank leaves a mark beside it.
        """
        path = self._path if ranks.world_size > 1 else None
        mark = None if path is None else path.with_name(f".{path.name}.mark-{self._tag}")
        try:

            def leave() -> bytes:
                if mark is not None:
                    try:
                        mark.touch(exist_ok=False)
                    except OSError as error:
                        raise StoreError(
                            f"cannot write beside {path}: {error.strerror}; give another directory"
                        ) from None
                return json.dumps(None if mark is None else mark.name).encode()

            def gather(told: Sequence[bytes]) -> bytes:
                return json.dumps([json.loads(one) for one in told]).encode()

            names = json.loads(ranks.agree("where to write", leave, gather, deadline_s))
            leads = self._path is not None
            if path is not None:
                same = [(rank, name) for rank, name in enumerate(names) if name and _target_of(name) == path.name]
                leads = next(rank for rank, name in same if path.with_name(name).exists()) == ranks.rank
            ranks.agree("who writes", lambda: b"", lambda _: b"", deadline_s)
            return leads
        finally:
            if mark is not None:
                mark.unlink(missing_ok=True)

    def _write(self, stack: ExitStack) -> PartialDirectory | None:
        """The directory, written and not yet named; None when it is in its place already."""
        assert self._path is not None
        if self._is_there():
            return None
        partial = PartialDirectory(self._path, tag=self._tag, signals=False, replace=self._replace)
        stack.enter_context(partial)
        partial.require_space(self._plan.size_bytes)
        files = {source.name: _File(partial, source) for source in self._plan.sources}
        with Fetcher(self._session, self._plan) as fetcher:
            try:
                fetcher.read({name: file.slices() for name, file in files.items()}, None)
            finally:
                for file in files.values():
                    file.close()
            self._pulled += fetcher.pulled
        return partial

    def _is_there(self) -> bool:
        """Whether the directory holds exactly this checkpoint."""
        assert self._path is not None
        expected = {source.name: source for source in self._plan.sources}
        try:
            found = {
                os.path.relpath(os.path.join(folder, name), self._path): os.path.join(folder, name)
                for folder, _, names in os.walk(self._path)
                for name in names
            }
            return found.keys() == expected.keys() and all(
                _is_same(Path(found[name]), source) for name, source in expected.items()
            )
        except OSError:
            return False


def _target_of(mark: str) -> str:
    return mark[1:].rpartition(".mark-")[0]


def _is_same(file: Path, source: ObjectSource) -> bool:
    if file.is_symlink() or file.stat().st_size != source.size:
        return False
    crc, size = 0, 0
    with open(file, "rb", buffering=0) as stream:
        while piece := stream.read(_SLICE_BYTES):
            crc = crc32c(piece, crc)
            size += len(piece)
    return (size, crc) == (source.size, source.crc32c)


class _File:
    """One file of the new directory, open from its first slice to its last."""

    def __init__(self, directory: PartialDirectory, source: ObjectSource) -> None:
        self.directory = directory
        self._source = source
        self._file: FileIO | None = None
        self._left = source.size

    def slices(self) -> list[_Slice]:
        """What is to be read; one empty slice of an empty object."""
        size = self._source.size
        return [_Slice(self, start, min(_SLICE_BYTES, size - start)) for start in range(0, size or 1, _SLICE_BYTES)]

    def write(self, offset: int, data: bytearray) -> None:
        if self._file is None:
            self._file = self.directory.create(self._source.name)
        self._file.seek(offset)
        self.directory.write(self._file, data)
        self._left -= len(data)
        if not self._left:
            self.directory.close(self._file)

    def close(self) -> None:
        """Let go of the descriptor, also of a file that did not become whole."""
        if self._file is not None:
            self._file.close()


class _Slice:
    """Some bytes of an object on their way into a file: a `loading.Reading`."""

    def __init__(self, file: _File, offset: int, size: int) -> None:
        self._file = file
        self._data = bytearray()
        self.ranges = [(offset, size)]

    def prepare(self, planner: LoadPlanner) -> list[Extent]:
        """Memory for them, as long as they are on their way."""
        offset, size = self.ranges[0]
        self._data = bytearray(size)
        return [Extent(offset, memoryview(self._data))]

    def finish(self, planner: LoadPlanner) -> None:
        """They are verified."""
        self._file.write(self.ranges[0][0], self._data)
        self._data = bytearray()
