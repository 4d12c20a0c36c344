"""Replicator in a training loop: what a user's own loop would have to add."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import TracebackType

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter
from replicator.checkpoint.fetch import Pulled
from replicator.client.outstanding import CommitInfo
from replicator.demo.events import Reporter
from replicator.demo.training import Job

LAST_SAVE_S = 60.0


def _told(one: Pulled) -> dict[str, object]:
    return {"name": one.name, "bytes": one.size, "source": one.source_node_id, "lane": one.lane, "whole": one.whole}


class Saves:
    """`restore` before the first step, `save` after every few. The reports to the demo's driver are its own affair."""

    def __init__(self, job: Job, replicas: int, report: Reporter) -> None:
        self._job = job
        self._report = report
        self._started = time.monotonic()
        self._session = replicator.init(replicas=replicas)
        self._writer = ReplicatedStorageWriter(self._session)

    @property
    def epoch(self) -> int:
        """The incarnation of the job."""
        return self._session.epoch

    def restore(self) -> None:
        """Load the newest recoverable checkpoint, when there is one. All ranks load the same."""
        plan = self._session.lookup()
        self._report.send("plan", epoch=self.epoch, step=plan.step, reason=plan.reason)
        if not plan.found:
            return
        state = self._job.state()
        reader = ReplicatedStorageReader(self._session, plan=plan)
        load(state, storage_reader=reader)
        self._job.restore(state)
        self._report.send(
            "restored",
            epoch=self.epoch,
            step=self._job.step,
            version=str(plan.version),
            reason=plan.reason,
            objects=len(plan.sources),
            bytes=plan.size_bytes,
            seconds=time.monotonic() - self._started,
            pulled=[_told(one) for one in reader.pulled],
        )

    def save(self) -> None:
        """Save the step that was just trained. Copies to the buddies and the commit go on while training does."""
        step = self._job.step
        save(self._job.state(), checkpoint_id=f"step-{step}", storage_writer=self._writer)
        if self._writer.commit_future and self._writer.protected_future:
            self._tell("committed", step, self._writer.commit_future)
            self._tell("protected", step, self._writer.protected_future)

    def finish(self) -> None:
        """Wait for what the last save left to do in the background; leaving at once would only lose the report."""
        for copy in self._writer.replica_futures:
            copy.exception(LAST_SAVE_S)
        if self._writer.protected_future:
            self._writer.protected_future.exception(LAST_SAVE_S)

    def __enter__(self) -> Saves:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()

    def _tell(self, kind: str, step: int, future: Future[CommitInfo]) -> None:
        def done(finished: Future[CommitInfo]) -> None:
            error = finished.exception()
            if error is None:
                self._report.send(kind, step=step, stored_on=list(finished.result().stored_on))
            else:
                self._report.send("failed", what=f"step {step} was not {kind}", error=str(error))

        future.add_done_callback(done)
