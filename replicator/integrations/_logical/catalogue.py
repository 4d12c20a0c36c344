"""What is committed and recoverable, as one process sees it: a plan for each step, and a list of all steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from replicator.client.plan import Plan, plan_from_pb
from replicator.client.retrieval import keep, lookup
from replicator.client.session import Session
from replicator.errors import UnsupportedError
from replicator.v1 import admin_pb2
from replicator.wire import version_from_pb

_MAX_PLANS = 16


class Catalogue:
    """Thread-safe. Other ranks are not waited for: they see what they see when they ask.

    Args:
        session: gives the session of this process.
    """

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._plans: OrderedDict[int, Plan] = OrderedDict()
        self._pinned: Plan | None = None
        self._removed: OrderedDict[int, int] = OrderedDict()  # step -> generation

    def find(self, step: int, *, anew: bool = False) -> Plan | None:
        """The plan of a step that is committed and recoverable, None when it is not.

        Args:
            anew: ask, also when it was found before: it may have been saved again, or dropped.

        Raises:
            StaleEpochError: a newer incarnation of the job exists.
            AgentUnavailableError, DeadlineExceededError: no answer.
        """
        with self._lock:
            pinned, known = self._pinned, self._plans.get(step)
        if pinned is not None and pinned.step == step:
            return pinned
        if known is not None and not anew:
            return known
        session = self._session()
        agent, epoch = session.agent, session.epoch
        plan = plan_from_pb(lookup(agent, session.job, epoch, session.deadline_s / 3, step))
        if plan.version is None or self._is_removed(step, plan.version.generation):
            self.forget(step)
            return None
        keep(agent, plan.version, epoch)
        with self._lock:
            self._plans[step] = plan
            self._plans.move_to_end(step)
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plan

    @contextmanager
    def pinned(self, plan: Plan) -> Iterator[None]:
        """Within the block its step is what this plan says, which is the same on all ranks (F09, F41)."""
        with self._lock:
            self._pinned = plan
        try:
            yield
        finally:
            with self._lock:
                self._pinned = None

    def forget(self, step: int) -> None:
        """Ask anew when the step is next looked for."""
        with self._lock:
            self._plans.pop(step, None)

    def steps(self) -> list[int]:
        """All steps that are committed and recoverable, ascending. Raises like `find`."""
        found = self._recoverable()
        return sorted(step for step, generation in found.items() if not self._is_removed(step, generation))

    def remove(self, step: int) -> None:
        """Let a superseded step go: it is not listed any more here, and its memory is the agents' to take.

        Raises:
            UnsupportedError: it is the newest one, of those that a job can go on from or of all.
        """
        found = self._recoverable()
        if step not in found:
            self.forget(step)
            return
        session = self._session()
        resumed = plan_from_pb(lookup(session.agent, session.job, session.epoch, session.deadline_s / 3)).step
        if step == resumed or found[step] == max(found.values()):
            raise UnsupportedError(
                f"step {step} is the newest checkpoint of job {session.job} that can be recovered, and is not removed; "
                "save a newer one first"
            )
        self.forget(step)
        with self._lock:
            self._removed[step] = found[step]
            while len(self._removed) > 4096:
                self._removed.popitem(last=False)

    def _is_removed(self, step: int, generation: int) -> bool:
        with self._lock:
            return self._removed.get(step, -1) >= generation

    def _recoverable(self) -> dict[int, int]:
        """The newest recoverable generation of every step."""
        session = self._session()
        limit = session.deadline_s / 3
        request = admin_pb2.ListContainersRequest(job=session.job, deadline_ms=int(limit * 1000))
        reply = session.agent.call_patiently(
            "AdminService/ListContainers",
            request,
            admin_pb2.ListContainersReply,
            limit + session.agent.call_deadline_s,
            f"the checkpoints of job {session.job}",
        )
        found: dict[int, int] = {}
        for report in reply.containers:
            if report.committed and report.recoverable:
                version = version_from_pb(report.container)
                step = version.container.step
                found[step] = max(found.get(step, -1), version.generation)
        return found
