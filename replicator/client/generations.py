"""The generation of each save of a session: begun by the coordinator, followed by the other ranks, or given up.

Generations only grow, also while no agent answers and while several processes of a rank save.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable

from replicator.client.agreement import Ranks
from replicator.client.local_agent import LocalAgent
from replicator.errors import AgentUnavailableError, DeadlineExceededError, InvalidIdError
from replicator.ids import MAX_ATTEMPT, CheckpointContainerId, ContainerVersion, make_generation, split_generation
from replicator.v1 import local_pb2
from replicator.wire import version_from_pb, version_to_pb

logger = logging.getLogger("replicator.client")

_MAX_BEGINS = 64
_GENERATION_POLL_S = 0.02
# Follows the generation of an attempt that failed, where other ranks find it.
_GIVEN_UP = "given up"
# Saves that were begun and not committed, which are remembered until it is known that they failed.
_MAX_UNFINISHED = 64
# Attempts that another process of this job may have begun without this one knowing.
_LONE_STRIDE = 1024


class Generations:
    """Of one session. Thread-safe.

    Args:
        ranks: those who agree with this one; asked for only when it is needed.
    """

    def __init__(self, agent: LocalAgent, job: str, epoch: int, deadline_s: float, ranks: Callable[[], Ranks]) -> None:
        self._agent = agent
        self._job = job
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._ranks = ranks
        self._lock = threading.Lock()
        self._generation = make_generation(epoch, 0)
        self._lone_generation = -1  # the last one chosen without the agent
        # Begun and not committed, and who saves it; nobody any more: it failed.
        self._unfinished: dict[ContainerVersion, Callable[[], object | None]] = {}
        self._posted: dict[CheckpointContainerId, int] = {}  # what the other ranks find, on the coordinator

    @property
    def newest(self) -> int:
        """Of the last save that this rank took part in; the same on all ranks between saves."""
        with self._lock:
            return self._generation

    def begin(self, container: CheckpointContainerId, saver: object | None = None) -> ContainerVersion:
        """The coordinator's first step of a save: a generation of its own, which the other ranks `follow`.

        Without an agent it is chosen here, far above those known.

        Args:
            saver: who saves one step after another. What it began before and never committed has failed, and so has
                what a saver began that is no more: the objects of it are dropped on all nodes.

        Raises:
            StaleEpochError: a newer incarnation of the job exists.
        """
        self._agent.check()
        with self._lock:
            others = any(saved_by() not in (None, saver) for saved_by in self._unfinished.values())
        if others:
            # The error of a save that failed refers to what saved, in a circle: gone, and not yet collected.
            gc.collect()
        with self._lock:
            failed = [of for of, saved_by in self._unfinished.items() if saved_by() is None or saved_by() is saver]
            version = self._begin(container, failed)
            self._generation = version.generation
            if saver is not None:
                self._remember(version, weakref.ref(saver))
        for one in failed:
            self._withdraw(one)
        self._post(version)
        return version

    def committed(self, version: ContainerVersion) -> None:
        """It has a manifest, and is not to be given up any more."""
        with self._lock:
            self._unfinished.pop(version, None)

    def abandon(self, version: ContainerVersion) -> bool:
        """The coordinator's word that a save of this session has failed, so that nothing of it takes room any more.

        Its objects are dropped on this node at once and on the others soon; what comes of it later is refused. Without
        an agent, the next one is told by the next save. Not waited for: other nodes.

        Returns:
            Whether it is abandoned; False for a committed one, with which nothing happens, and without an agent.

        Raises:
            InvalidIdError: a container of another job or epoch.
            StaleEpochError: a newer incarnation of the job exists.
        """
        if version.container.job != self._job or version.epoch != self._epoch:
            # The next save would tell the agent, which would refuse it, and every save after it.
            raise InvalidIdError(
                f"{version} is not of job {self._job} and epoch {self._epoch}, which are to abandon it"
            )
        self._withdraw(version)
        request = local_pb2.AbandonAttemptsRequest(
            job=self._job, epoch=self._epoch, containers=[version_to_pb(version)]
        )
        try:
            reply = self._agent.call("Abandon", request, local_pb2.AbandonAttemptsReply)
        except AgentUnavailableError as error:
            logger.warning("%s is abandoned with the next save: %s", version, error)
            with self._lock:
                self._remember(version, lambda: None)
            return False
        with self._lock:
            self._unfinished.pop(version, None)
        return len(reply.abandoned) > 0

    def follow(self, container: CheckpointContainerId, told: ContainerVersion | None) -> ContainerVersion:
        """The generation that the coordinator began for this save, which told `told`, maybe long ago.

        Generations only grow, so one that this rank has not used yet is the one of now.

        Args:
            told: None, when nothing was told; then the coordinator must have begun this save already.

        Raises:
            DeadlineExceededError: it has begun none of this container.
        """
        self._agent.check()
        with self._lock:
            generation = -1 if told is None else told.generation
            if told is None or generation <= self._generation:
                generation, _ = self._read_posted(container, self._deadline_s)
                told = ContainerVersion(container, generation)
            self._generation = max(self._generation, generation)
        return told

    def await_next(self, container: CheckpointContainerId) -> ContainerVersion:
        """The generation that the coordinator begins for this save, or has begun already: this rank has not used it,
        and the coordinator has not given it up. It may still do so, when it begins anew: see `newer_than`.

        Raises:
            DeadlineExceededError: it begins none.
        """
        self._agent.check()
        end = time.monotonic() + self._deadline_s
        while True:
            generation, given_up = self._read_posted(container, max(end - time.monotonic(), 0.0))
            with self._lock:
                if generation > self._generation and not given_up:
                    self._generation = generation
                    return ContainerVersion(container, generation)
            # That of an earlier attempt; a value that changes is no event of the store.
            if time.monotonic() >= end:
                raise DeadlineExceededError.of(_generation_key(container), "rank 0", self._deadline_s)
            time.sleep(_GENERATION_POLL_S)

    def newer_than(self, version: ContainerVersion) -> ContainerVersion:
        """What the coordinator has begun of the same container after `version`, which it gave up; else `version`.

        A rank that had failed before it came to the coordinator's first attempt, and comes to the second before the
        coordinator does, has been given the first one.
        """
        if self._ranks().world_size == 1:  # also another process of a rank: it knows what it was told
            return version
        generation, given_up = self._read_posted(version.container, self._deadline_s)
        with self._lock:
            if generation <= version.generation or given_up:
                return version
            self._generation = max(self._generation, generation)
        return ContainerVersion(version.container, generation)

    def _read_posted(self, container: CheckpointContainerId, deadline_s: float) -> tuple[int, bool]:
        """The newest generation that the coordinator began, and whether it has given that up."""
        generation, _, word = self._ranks().read(_generation_key(container), deadline_s).decode().partition(" ")
        return int(generation), word == _GIVEN_UP

    def _post(self, version: ContainerVersion) -> None:
        key = _generation_key(version.container)
        self._ranks().post(key, str(version.generation).encode())
        with self._lock:
            self._posted[version.container] = version.generation
            while len(self._posted) > _MAX_UNFINISHED:
                del self._posted[next(iter(self._posted))]

    def _withdraw(self, version: ContainerVersion) -> None:
        """A rank that comes late to this attempt, which has failed, is not to take part in it."""
        with self._lock:
            if self._posted.get(version.container) != version.generation:
                return
            del self._posted[version.container]
        self._ranks().post(_generation_key(version.container), f"{version.generation} {_GIVEN_UP}".encode())

    def _remember(self, version: ContainerVersion, saver: Callable[[], object | None]) -> None:
        self._unfinished[version] = saver
        while len(self._unfinished) > _MAX_UNFINISHED:
            del self._unfinished[next(iter(self._unfinished))]

    def _begin(self, container: CheckpointContainerId, failed: list[ContainerVersion]) -> ContainerVersion:
        request = local_pb2.BeginRequest(
            job=self._job, step=container.step, epoch=self._epoch, abandons=[version_to_pb(one) for one in failed]
        )
        try:
            for _ in range(_MAX_BEGINS):
                reply = self._agent.call("Begin", request, local_pb2.BeginReply)
                for one in failed:
                    self._unfinished.pop(one, None)
                version = version_from_pb(reply.container)
                # An agent that was restarted may not know of attempts of which nothing was published.
                if version.generation > self._generation:
                    return version
        except AgentUnavailableError as error:
            logger.warning("%s is begun without the agent: %s", container, error)
        epoch, attempt = split_generation(self._generation)
        attempt += 1 if self._generation == self._lone_generation else _LONE_STRIDE
        if attempt > MAX_ATTEMPT:
            raise AgentUnavailableError(f"{container} cannot be begun: no attempts are left without the agent")
        self._lone_generation = make_generation(epoch, attempt)
        return ContainerVersion(container, self._lone_generation)


def _generation_key(container: CheckpointContainerId) -> str:
    return f"the generation of {container}"
