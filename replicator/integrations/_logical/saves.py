"""One save by many processes, each of which knows files alone: begun by rank 0, ended by one commit of all files.

Rank 0 begins a generation and tells it; every rank tells what it sealed; rank 0 puts all of it into one manifest. The
frameworks end a saver for good when their storage raises once (F40). So trouble with the store, the agents or the
copies is logged, the save it happened in counts as failed on all ranks, its step does not come to exist, and nothing
is raised: the next save works. With `strict` it is raised.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from replicator.checkpoint.committing import WaitFor, commit, give_up, log_failure, replicate, wait_for_commit
from replicator.client.agreement import Ranks
from replicator.client.outstanding import CommitFutures, ReplicaInfo
from replicator.client.segments import SegmentObject
from replicator.client.session import AGREEMENT_DEADLINES, Session
from replicator.decide.types import ManifestEntry
from replicator.errors import (
    ConfigError,
    DeadlineExceededError,
    ForkedClientError,
    InvalidIdError,
    ReplicatorError,
    StaleEpochError,
    UnsupportedError,
)
from replicator.ids import CheckpointContainerId, ContainerVersion
from replicator.integrations._logical.writers import Writers

logger = logging.getLogger("replicator.integrations")

ResultT = TypeVar("ResultT")

# The caller's own mistakes, and a job that has been superseded: raised, always.
_ALWAYS_RAISED = (StaleEpochError, InvalidIdError, ConfigError, UnsupportedError, ForkedClientError)
# Files are written in the time that the slowest rank needs for all of its bytes.
_WAIT_DEADLINES = 20
_MAX_SAVES = 8
_MAX_SKIPPED_TURNS = 64
_MAX_SIZES = 4096


@dataclass(slots=True)
class Save:
    """Of one step, as this rank sees it. Only `Saves` changes it.

    Attributes:
        version: None when it could not be begun. failure: why the step will not come to exist; empty while it may.
        entries: what this rank has sealed, by name. committing: rank 0 has committed it, or tried to.
    """

    step: int
    directory: str
    number: int = -1
    version: ContainerVersion | None = None
    entries: dict[str, ManifestEntry] = field(default_factory=dict)
    copies: list[Future[ReplicaInfo]] = field(default_factory=list)
    failure: str = ""
    is_ready: bool = False
    committing: bool = False
    futures: CommitFutures | None = None


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """How saves are made. `resumable`: a job can go on from them. `wait_s`: for other ranks, copies and commits."""

    wait_for: WaitFor = "commit"
    resumable: bool = True
    strict: bool = False
    wait_s: float | None = None


class Saves:
    """All saves of one process. Thread-safe.

    Args:
        session: gives the session of this process; may raise.
        name: writers of the same name write together.
    """

    def __init__(self, session: Callable[[], Session], writers: Writers, name: str, policy: SavePolicy) -> None:
        self._session = session
        self._writers = writers
        self._name = name
        self._policy = policy
        self._lock = threading.RLock()
        self._store_lock = threading.Lock()  # a client of the key-value store serves one thread at a time
        self._ranks: Ranks | None = None
        self._turns = 0
        self._saves: OrderedDict[int, Save] = OrderedDict()
        self._sizes: OrderedDict[str, int] = OrderedDict()

    @property
    def wait_s(self) -> float:
        """For what takes as long as the bytes that are moved."""
        return self._policy.wait_s or _WAIT_DEADLINES * self._session().deadline_s

    @property
    def is_coordinator(self) -> bool:
        return self._writers.rank == 0

    def meet(self) -> Ranks:
        """Those who write together. Raises DeadlineExceededError when one of them does not come."""
        with self._store_lock:
            if self._ranks is None:
                session = self._session()
                place = f"replicator/writers/{session.job}/{session.epoch}/{self._name}"
                self._ranks = self._writers.meet(place, AGREEMENT_DEADLINES * session.deadline_s)
            return self._ranks

    def barrier(self, deadline_s: float) -> None:
        """Wait for the writers of all ranks. Raises DeadlineExceededError, which names those that did not come."""
        ranks = self.meet()
        with self._store_lock:
            ranks.agree("the end of all ranks' writing", bytes, lambda _: b"", deadline_s)

    # -- a save

    def find(self, step: int) -> Save | None:
        """The last save of a step that this process took part in, committed or not."""
        with self._lock:
            return self._saves.get(step)

    def under_way(self) -> list[Save]:
        """Those that were begun here and not ended."""
        with self._lock:
            return [save for save in self._saves.values() if not save.committing]

    def open(self, step: int, directory: str, *, first: bool = False) -> Save:
        """The save of a step that is under way; a new one, in its turn, when there is none.

        Args:
            first: a directory is made, which happens before anything is written: an earlier save of the step may have
                been ended by rank 0 without a word to this process.
        """
        with self._lock:
            save = self._saves.get(step)
            if save is not None and not save.committing and not (first and self._was_ended(save)):
                return save
            save = Save(step, directory)
            self._saves[step] = save
            self._saves.move_to_end(step)
            while len(self._saves) > _MAX_SAVES:
                self._saves.popitem(last=False)
            self._guarded(save, "cannot be begun", lambda: self._begin(save))
            return save

    def create(self, save: Save, name: str) -> SegmentObject | None:
        """A new file; None, when the save has failed: what would be written is of no use to anybody."""
        version = save.version
        if save.failure or version is None:
            return None
        one = version.object(name)
        size = self._sizes.get(name, 0)
        return self._guarded(save, f"{name!r} cannot be written", lambda: self._session().create(one, size))

    def add(self, save: Save, sink: SegmentObject) -> None:
        """A file was written: seal it, have it copied, and tell rank 0."""

        def seal() -> None:
            info = sink.seal()
            name = info.object.name
            with self._lock:
                save.entries[name] = ManifestEntry(name, info.size, info.crc32c, info.owner_node_id)
                self._sizes[name] = info.size
                while len(self._sizes) > _MAX_SIZES:
                    self._sizes.popitem(last=False)
            self._replicate(save, sink)
            self._tell(save, "entries")

        self._guarded(save, "a file cannot be sealed", seal)

    def fail(self, save: Save, what: str, error: ReplicatorError) -> None:
        """The step will not come to exist. Raises the error when it must be, else logs it."""
        if not save.failure:
            save.failure = f"rank {self._writers.rank}: {what}: {error}"
            logger.error("step %d is not saved: %s", save.step, save.failure)
        if self._policy.strict or isinstance(error, _ALWAYS_RAISED):
            raise error

    def ready(self, save: Save, *, await_copies: bool) -> None:
        """This rank has written everything of the save: wait for the copies of it, and tell rank 0.

        Copies that are not made are logged: they are made later, and until then the step is not protected.
        """

        def tell() -> None:
            if await_copies and save.copies:
                _, late = wait(save.copies, self.wait_s)
                if late:
                    text = f"{len(late)} copies of the files of step {save.step}"
                    logger.warning("%s", DeadlineExceededError.of(text, "the buddies of this node", self.wait_s))
            save.is_ready = True
            self._tell(save, "ready")

        self._guarded(save, "the other ranks cannot be told of its files", tell)

    def commit(self, save: Save) -> None:
        """Rank 0: all ranks have written; one manifest of all of it, which makes the step exist."""
        if save.committing:
            return
        save.committing = True
        self._guarded(save, "it cannot be committed", lambda: self._commit(save))
        if save.failure:
            self.give_up(save)
        self._guarded(save, "the other ranks cannot be told of the commit", lambda: self._tell(save, "outcome"))

    def finish(self, save: Save) -> bool:
        """The end of a save, on every rank: wait until the step exists; whether it does."""
        if self.is_coordinator:
            self.commit(save)
            futures, version = save.futures, save.version
            if futures is not None and version is not None and not save.failure:
                self._settle(save, version, futures)
        else:
            self._guarded(save, "rank 0 did not tell how it ended", lambda: self._hear_outcome(save))
            save.committing = True
        if save.failure:
            self._part()
        return not save.failure

    def give_up(self, save: Save) -> None:
        """Nothing of the save is to stay. Rank 0 says so for all of them."""
        save.committing = True
        save.failure = save.failure or "it was given up"
        if self.is_coordinator and save.version is not None and save.futures is None:
            give_up(self._session(), save.version)

    # -- parts

    def _guarded(self, save: Save, what: str, action: Callable[[], ResultT]) -> ResultT | None:
        try:
            return action()
        except ReplicatorError as error:
            self.fail(save, what, error)
            return None

    def _begin(self, save: Save) -> None:
        session = self._session()
        container = CheckpointContainerId(session.job, save.step)
        ranks = self.meet()
        save.number = self._turns
        if not self.is_coordinator:
            save.version = self._follow(save, container, ranks)
            return
        self._turns += 1
        self._forget(save.number - _MAX_SAVES)
        try:
            if session.backpressure == "block":
                session.keep_pace(self.wait_s)
            save.version = session.begin(container, saver=self)
        finally:
            turn = [save.step, None if save.version is None else save.version.generation]
            self._post(f"{save.number}/turn", turn)

    def _forget(self, number: int) -> None:
        """What was told of a save that all ranks have ended."""
        if number < 0 or self._writers.world_size == 1:
            return
        ranks = self.meet()
        by_rank = [f"{what}/{rank}" for what in ("entries", "ready") for rank in range(1, self._writers.world_size)]
        with self._store_lock:
            for key in ("turn", "outcome", *by_rank):
                ranks.forget(f"{number}/{key}")

    def _follow(self, save: Save, container: CheckpointContainerId, ranks: Ranks) -> ContainerVersion:
        """What rank 0 began. Saves for which this rank had nothing to write are passed over."""
        for _ in range(_MAX_SKIPPED_TURNS):
            save.number = self._turns
            step, generation = self._read(f"{save.number}/turn", AGREEMENT_DEADLINES * self._session().deadline_s)
            self._turns += 1
            if step == save.step:
                if generation is None:
                    raise ReplicatorError("rank 0 could not begin it")
                return ContainerVersion(container, generation)
        raise ConfigError(f"rank 0 has saved {_MAX_SKIPPED_TURNS} other steps, and not step {save.step}")

    def _part(self) -> None:
        """A save failed, and some ranks may not know of it, or of its beginning: all meet anew for the next one."""
        with self._store_lock:
            self._ranks = None
            self._turns = 0

    def _was_ended(self, save: Save) -> bool:
        if self.is_coordinator or save.number < 0:
            return bool(save.failure)
        try:
            failure, _ = self._read(f"{save.number}/outcome", 0.0)
        except ReplicatorError:
            return bool(save.failure)
        if failure:
            self._part()
        return True

    def _replicate(self, save: Save, sink: SegmentObject) -> None:
        copies = replicate(self._session(), [sink.info.object])
        with self._lock:
            save.copies += copies

    def _tell(self, save: Save, what: str) -> None:
        if self._writers.world_size == 1 or save.number < 0:
            return
        with self._lock:
            entries = [[one.name, one.size, one.crc32c, one.owner_node_id] for one in save.entries.values()]
        value = [save.failure, [] if what == "outcome" else entries]
        key = what if what == "outcome" else f"{what}/{self._writers.rank}"
        self._post(f"{save.number}/{key}", value)

    def _commit(self, save: Save) -> None:
        session, version = self._session(), save.version
        if version is None or save.failure:
            return
        entries = dict(save.entries)
        for rank in range(1, self._writers.world_size):
            failure, theirs = self._told_by(save, rank)
            if failure:
                save.failure = failure
                logger.error("step %d is not saved: %s", save.step, failure)
                return
            for name, size, crc, owner in theirs:
                entry = ManifestEntry(name, size, crc, owner)
                other = entries.setdefault(name, entry)
                if (other.size, other.crc32c) != (size, crc):
                    raise ReplicatorError(
                        f"two ranks, on nodes {other.owner_node_id} and {owner}, wrote different files under the name "
                        f"{name!r}; put the rank into the name"
                    )
        if not entries:
            raise ReplicatorError("no rank has written anything")
        save.futures = commit(session, version, entries.values(), self._writers.world_size, self._policy.resumable)
        save.futures.committed.add_done_callback(log_failure(session))

    def _told_by(self, save: Save, rank: int) -> tuple[str, list[Any]]:
        """(why it failed there, what it wrote)."""
        try:
            if not save.is_ready:
                failure, entries = self._read(f"{save.number}/entries/{rank}", 0.0)
            else:
                failure, entries = self._read(f"{save.number}/ready/{rank}", self.wait_s)
        except DeadlineExceededError:
            if not save.is_ready:
                return "", []  # It had nothing to write, and all ranks are past the framework's barrier.
            raise DeadlineExceededError.of(
                f"the files of step {save.step}",
                f"the writer of rank {rank} of {self._writers.world_size}",
                self.wait_s,
            ) from None
        return str(failure), list(entries)

    def _hear_outcome(self, save: Save) -> None:
        if save.number < 0:
            return
        failure, _ = self._read(f"{save.number}/outcome", 2 * self.wait_s)
        if failure and not save.failure:
            save.failure = str(failure)
            logger.error("step %d is not saved: %s", save.step, failure)

    def _settle(self, save: Save, version: ContainerVersion, futures: CommitFutures) -> None:
        """What is waited for beyond the commit itself, which may still come about when this fails."""
        try:
            wait_for_commit(self._session(), version, futures, self._policy.wait_for, self.wait_s)
        except ReplicatorError as error:
            logger.warning("%s: %s", version, error)
            if self._policy.strict or isinstance(error, _ALWAYS_RAISED):
                raise

    def _post(self, key: str, value: Any) -> None:
        ranks = self.meet()
        with self._store_lock:
            ranks.post(key, json.dumps(value).encode())

    def _read(self, key: str, deadline_s: float) -> Any:
        ranks = self.meet()
        with self._store_lock:
            return json.loads(ranks.read(key, deadline_s))
