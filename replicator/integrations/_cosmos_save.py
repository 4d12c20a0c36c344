"""One iteration into one container: every key as a DCP checkpoint of its own, the data loader's state of each rank, and
one commit at the end. Runs in the trainer, or in the background process beside it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from replicator.checkpoint import CheckpointObjectManager, ReplicatedStorageWriter
from replicator.checkpoint.committing import SaveInParts, WaitFor, entry_of, wait_for_commit
from replicator.client.agreement import is_distributed
from replicator.client.outstanding import CommitInfo
from replicator.client.session import AGREEMENT_DEADLINES, Session
from replicator.decide.types import ManifestEntry
from replicator.errors import ReplicatorError, SaveError, from_wire, to_wire
from replicator.ids import CheckpointContainerId
from replicator.integrations._cosmos_pointer import LatestPointer

logger = logging.getLogger("replicator.integrations")

DATALOADER = "dataloader"
PURPOSE = "cosmos"
"""Of the agreements of ranks here: `Session.ranks_for`."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What all saves of one checkpointer have in common. `wait_s`: for whatever a save may wait, in seconds."""

    wait_for: WaitFor
    thread_count: int
    wait_s: float
    pointer: str  # the path of latest_checkpoint.txt; empty: none is written


class IterationSaver:
    """Saves of one process, one after another. All ranks of the session save together. Not thread-safe."""

    def __init__(self, session: Session, options: SaveOptions, process_group: Any = None) -> None:
        self.session = session
        self._options = options
        self._process_group = process_group
        self._pointer = LatestPointer(options.pointer) if options.pointer and session.ranks.rank == 0 else None
        self.committed: Future[CommitInfo] | None = None  # of the last save, on rank 0
        self.protected: Future[CommitInfo] | None = None

    def save(self, iteration: int, states: Mapping[str, Any], dataloader: Any) -> None:
        """Save and commit the states (one for each key) and, when it is not None, the data loader's state.

        Raises:
            ReplicatorError: on all ranks; it names the key, and the rank that failed. Nothing of it is committed.
        """
        session = self.session
        self.committed = self.protected = None
        whole = SaveInParts(session, CheckpointContainerId(session.job, iteration))
        try:
            for key, state in states.items():
                self._save_key(whole, key, state)
            self._commit(whole, iteration, dataloader)
        except BaseException:
            if session.ranks.rank == 0:
                whole.give_up()
            raise

    def settle(self, deadline_s: float) -> None:
        """Wait until the last save is committed and the pointer written. Trouble is logged, as it was before."""
        if self.committed is not None:
            try:
                self.committed.exception(deadline_s)
            except TimeoutError:
                logger.warning("the last save is not yet committed after %.1f s; the agents go on with it", deadline_s)
        if self._pointer is not None:
            self._pointer.settle(deadline_s)

    def _save_key(self, whole: SaveInParts, key: str, state: Any) -> None:
        writer = self._writer(whole, key)
        # One rank writes what all have: the lowest one, so that a load opens few objects.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        with typed_errors(f"cannot save {key!r} of {whole.container}"):
            save(
                state,
                storage_writer=writer,
                planner=planner,
                process_group=self._process_group,
                no_dist=not is_distributed(),
            )

    def _commit(self, whole: SaveInParts, iteration: int, dataloader: Any) -> None:
        session, options = self.session, self._options

        def write() -> bytes:
            if dataloader is None:
                return b"[]"
            version = whole.begin() if session.ranks.rank == 0 else whole.version
            if version is None:
                raise ReplicatorError(
                    f"{whole.container}: this rank came to no part of the save before its data loader"
                )
            stream = io.BytesIO()
            with typed_errors(f"cannot save {DATALOADER!r} of {whole.container}", SaveError):
                torch.save(dataloader, stream)
            name = f"rank_{session.ranks.rank}.pt"
            objects = CheckpointObjectManager(session)
            info = objects.write_bytes(version.object(f"{DATALOADER}/{name}"), stream.getvalue())
            objects.replicate(info.object)
            entry = entry_of(info)
            return json.dumps([[entry.name, entry.size, entry.crc32c, entry.owner_node_id]]).encode()

        def commit(answers: Sequence[bytes]) -> bytes:
            whole.add(ManifestEntry(*entry) for answer in answers for entry in json.loads(answer))
            futures = whole.commit(session.ranks.world_size)
            self.committed, self.protected = futures.committed, futures.protected
            if self._pointer is not None:
                self._pointer.follow(iteration, futures.committed)
            assert whole.version is not None
            wait_for_commit(session, whole.version, futures, options.wait_for, options.wait_s)
            return b""

        deadline_s = AGREEMENT_DEADLINES * session.deadline_s + (0 if options.wait_for == "seal" else options.wait_s)
        session.ranks_for(PURPOSE).agree(f"the commit of {whole.container}", write, commit, deadline_s)

    def _writer(self, whole: SaveInParts, key: str) -> ReplicatedStorageWriter:
        return ReplicatedStorageWriter(
            self.session,
            wait_deadline_s=self._options.wait_s,
            thread_count=self._options.thread_count,
            prefix=f"{key}/",
            part_of=whole,
        )


@contextlib.contextmanager
def typed_errors(what: str, default: type[ReplicatorError] = ReplicatorError, hint: str = "") -> Iterator[None]:
    """What DCP raises on all ranks together becomes an error of ours: what could not be done, and on which rank.

    Args:
        default: the class for a cause that is none of ours.
    """

    def typed(cause: BaseException, whom: str = "", also: str = "") -> ReplicatorError:
        kind, message = to_wire(cause)
        text = f"{what}: {whom}{message}{also}{hint}"
        return from_wire(kind, text) if isinstance(cause, ReplicatorError) else default(text)

    try:
        yield
    except CheckpointException as error:
        if not error.failures:
            raise typed(error) from error
        rank, (cause, _trace) = min(error.failures.items(), key=lambda failure: failure[0])
        others = sorted(other for other in error.failures if other != rank)
        also = f" (and rank {', '.join(map(str, others[:8]))} failed too)" if others else ""
        raise typed(cause, f"rank {rank}: ", also) from error
    except ReplicatorError:
        raise
    except Exception as error:
        raise typed(error) from error
