"""A process's membership in a job: its agent, its epoch, and the lookups that all ranks do together."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicator.client import inherit
from replicator.client.agreement import Ranks, is_distributed, known_ranks, meet_ranks
from replicator.client.job import find_job
from replicator.client.local_agent import LocalAgent
from replicator.client.outstanding import CommitFutures, CommitInfo
from replicator.client.plan import Plan, plan_from_pb
from replicator.client.replication import ReplicationManager
from replicator.client.retrieval import keep, lookup
from replicator.client.roll_call import Presence, here, members
from replicator.client.segments import SegmentObject, Segments
from replicator.config import load_config
from replicator.decide.types import Manifest
from replicator.errors import AgentUnavailableError, ConfigError, DeadlineExceededError, InvalidIdError
from replicator.faultpoints import reach
from replicator.ids import (
    MAX_ATTEMPT,
    AgreedPlacement,
    CheckpointContainerId,
    ContainerVersion,
    NodeAddress,
    NodeIdentity,
    ObjectVersion,
    make_generation,
    split_generation,
    validate_step,
)
from replicator.v1 import local_pb2, types_pb2
from replicator.wire import version_from_pb, version_to_pb

logger = logging.getLogger("replicator.client")

# Ranks come to a common point at different times; the slowest is given this many deadlines.
AGREEMENT_DEADLINES = 4
_MAX_BEGINS = 64
_GENERATION_POLL_S = 0.02
# Follows the generation of an attempt that failed, where other ranks find it.
_GIVEN_UP = "given up"
# Saves that were begun and not committed, which are remembered until it is known that they failed.
_MAX_UNFINISHED = 64
# Attempts that another process of this job may have begun without this one knowing.
_LONE_STRIDE = 1024


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What another process of the same rank needs to take part in the same epoch."""

    root: str
    job: str
    epoch: int
    members: tuple[NodeAddress, ...]
    replicas: int
    deadline_s: float
    auto_start: bool
    idle_exit_s: float | None
    backpressure: str = "skip"
    placement: AgreedPlacement | None = None
    nonce: str = ""  # known to all ranks of this incarnation, and never used before

    def to_json(self) -> bytes:
        members = [(one.node_id, one.identity.incarnation, one.grpc_address, one.labels) for one in self.members]
        placement = None if self.placement is None else self.placement.to_json()
        return json.dumps({**dataclasses.asdict(self), "members": members, "placement": placement}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> SessionSpec:
        found = json.loads(data)
        found["members"] = tuple(
            NodeAddress(NodeIdentity(node_id, incarnation), address, tuple((level, value) for level, value in labels))
            for node_id, incarnation, address, labels in found["members"]
        )
        found["placement"] = None if found["placement"] is None else AgreedPlacement.from_json(found["placement"])
        return cls(**found)


class Session:
    """Made by `replicator.init`. Thread-safe; not usable in a forked child, which may make its own.

    Pickling gives the other process (on the same node) its own handle in the same epoch.

    Attributes:
        job: the job's id. epoch: this incarnation of it. members: its nodes.
        replicas: copies wanted beside the owner's. deadline_s: the one knob for waits. backpressure: skip or block.
        agent: the handle on this node's agent. replication: copies and bulk retrieval of objects.
    """

    def __init__(self, agent: LocalAgent, spec: SessionSpec, ranks: Ranks | None = None) -> None:
        self.job = spec.job
        self.epoch = spec.epoch
        self.members = spec.members
        self.replicas = spec.replicas
        self.deadline_s = spec.deadline_s
        self.backpressure = spec.backpressure
        self.agent = agent
        self.replication = ReplicationManager(agent, spec.job, spec.epoch, spec.deadline_s)
        self.segments = Segments(agent)
        self._pid = os.getpid()
        self._spec = spec
        self._ranks = ranks
        self._apart: dict[str, Ranks] = {}
        self._lock = threading.Lock()
        self._generation = make_generation(spec.epoch, 0)
        self._lone_generation = -1  # the last one chosen without the agent
        # Begun and not committed, and who saves it; nobody any more: it failed.
        self._unfinished: dict[ContainerVersion, Callable[[], object | None]] = {}
        self._unprotected: dict[ContainerVersion, Future[CommitInfo]] = {}
        self._posted: dict[CheckpointContainerId, int] = {}  # what the other ranks find, on the coordinator
        with _sessions_lock:
            _sessions[_key(spec)] = self

    @property
    def spec(self) -> SessionSpec:
        """What `attach` needs in another process on this node."""
        return self._spec

    @property
    def node(self) -> NodeAddress:
        """This node, as its peers reach its agent."""
        return self.agent.node

    @property
    def ranks(self) -> Ranks:
        """Those who agree with this one."""
        if self._ranks is None:
            self._ranks = known_ranks(f"{self.job}/{self.epoch}/{self._spec.nonce}")
        return self._ranks

    def ranks_for(self, purpose: str) -> Ranks:
        """Those who agree with this one on one matter: see `Ranks.apart`. The same object each time."""
        with self._lock:
            if purpose not in self._apart:
                self._apart[purpose] = self.ranks.apart(purpose)
            return self._apart[purpose]

    def lookup(self, step: int | None = None, job: str | None = None) -> Plan:
        """Which checkpoint to load: the newest recoverable one, or only `step`. The same on all ranks.

        Every rank must call it. A plan that found nothing is a plan too; its `reason` says why.

        Args:
            job: another job, whose checkpoint is to be read; this node's agent must have been in it, or be told of an
                agent that was. Nothing changes for that job, running or not.

        Raises:
            InvalidIdError: `step` cannot be one. On all ranks.
            StaleEpochError: a newer incarnation of the job exists; this one must stop.
            AgentUnavailableError, DeadlineExceededError: the agent, or a rank, did not come. On all ranks.
        """
        self.agent.check()
        epoch = self.epoch if job in (None, self.job) else 0

        def ask(_: object) -> bytes:
            if step is not None:
                validate_step(step)
            return lookup(self.agent, job or self.job, epoch, self.deadline_s / 3, step).SerializeToString()

        answer = self.ranks.agree("the recovery plan", bytes, ask, AGREEMENT_DEADLINES * self.deadline_s)
        plan = plan_from_pb(types_pb2.Plan.FromString(answer))
        if plan.version is not None:
            keep(self.agent, plan.version, epoch)
            reach("load.planned")
        return plan

    def begin(self, container: CheckpointContainerId, saver: object | None = None) -> ContainerVersion:
        """The coordinator's first step of a save: a generation of its own, which the other ranks `follow`.

        Without an agent it is chosen here, far above those known.

        Args:
            saver: who saves one step after another. What it began before and never committed has failed, and so has
                what a saver began that is no more: the objects of it are dropped on all nodes.

        Raises:
            StaleEpochError: a newer incarnation of the job exists.
        """
        self.agent.check()
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

    def commit(self, manifest: Manifest) -> CommitFutures:
        """The coordinator's last step of a save: see `LocalAgent.commit`."""
        futures = self.agent.commit(manifest)
        with self._lock:
            self._unfinished.pop(manifest.version, None)
            self._unprotected[manifest.version] = futures.protected
            while len(self._unprotected) > _MAX_UNFINISHED:
                del self._unprotected[next(iter(self._unprotected))]
        return futures

    def keep_pace(self, deadline_s: float) -> bool:
        """Wait until at most one container that was committed through this session lacks copies.

        Args:
            deadline_s: no longer than this, in seconds; then it is said in a warning.

        Returns:
            Whether it is so.
        """
        end = time.monotonic() + deadline_s
        while True:
            with self._lock:
                self._unprotected = {of: future for of, future in self._unprotected.items() if not future.done()}
                behind = dict(self._unprotected)
            if len(behind) <= 1:
                return True
            left = end - time.monotonic()
            if left <= 0:
                error = DeadlineExceededError.of(
                    f"the copies of {next(iter(behind))}", "the buddies of the job's nodes", deadline_s
                )
                logger.warning("saves come faster than their copies are made: %s", error)
                return False
            wait(behind.values(), left, return_when=FIRST_COMPLETED)

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
        if version.container.job != self.job or version.epoch != self.epoch:
            # The next save would tell the agent, which would refuse it, and every save after it.
            raise InvalidIdError(f"{version} is not of job {self.job} and epoch {self.epoch}, which are to abandon it")
        self._withdraw(version)
        request = local_pb2.AbandonAttemptsRequest(job=self.job, epoch=self.epoch, containers=[version_to_pb(version)])
        try:
            reply = self.agent.call("Abandon", request, local_pb2.AbandonAttemptsReply)
        except AgentUnavailableError as error:
            logger.warning("%s is abandoned with the next save: %s", version, error)
            with self._lock:
                self._remember(version, lambda: None)
            return False
        with self._lock:
            self._unfinished.pop(version, None)
        return len(reply.abandoned) > 0

    def _post(self, version: ContainerVersion) -> None:
        key = _generation_key(version.container)
        self.ranks.post(key, str(version.generation).encode())
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
        self.ranks.post(_generation_key(version.container), f"{version.generation} {_GIVEN_UP}".encode())

    def _remember(self, version: ContainerVersion, saver: Callable[[], object | None]) -> None:
        self._unfinished[version] = saver
        while len(self._unfinished) > _MAX_UNFINISHED:
            del self._unfinished[next(iter(self._unfinished))]

    def _begin(self, container: CheckpointContainerId, failed: list[ContainerVersion]) -> ContainerVersion:
        request = local_pb2.BeginRequest(
            job=self.job, step=container.step, epoch=self.epoch, abandons=[version_to_pb(one) for one in failed]
        )
        try:
            for _ in range(_MAX_BEGINS):
                reply = self.agent.call("Begin", request, local_pb2.BeginReply)
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

    @property
    def newest_generation(self) -> int:
        """Of the last save that this rank took part in; the same on all ranks between saves."""
        with self._lock:
            return self._generation

    def follow(self, container: CheckpointContainerId, told: ContainerVersion | None) -> ContainerVersion:
        """The generation that the coordinator began for this save, which told `told`, maybe long ago.

        Generations only grow, so one that this rank has not used yet is the one of now.

        Args:
            told: None, when nothing was told; then the coordinator must have begun this save already.

        Raises:
            DeadlineExceededError: it has begun none of this container.
        """
        self.agent.check()
        with self._lock:
            generation = -1 if told is None else told.generation
            if told is None or generation <= self._generation:
                generation, _ = self._read_posted(container, self.deadline_s)
                told = ContainerVersion(container, generation)
            self._generation = max(self._generation, generation)
        return told

    def await_next(self, container: CheckpointContainerId) -> ContainerVersion:
        """The generation that the coordinator begins for this save, or has begun already: this rank has not used it,
        and the coordinator has not given it up. It may still do so, when it begins anew: see `newer_than`.

        Raises:
            DeadlineExceededError: it begins none.
        """
        self.agent.check()
        end = time.monotonic() + self.deadline_s
        while True:
            generation, given_up = self._read_posted(container, max(end - time.monotonic(), 0.0))
            with self._lock:
                if generation > self._generation and not given_up:
                    self._generation = generation
                    return ContainerVersion(container, generation)
            # That of an earlier attempt; a value that changes is no event of the store.
            if time.monotonic() >= end:
                raise DeadlineExceededError.of(_generation_key(container), "rank 0", self.deadline_s)
            time.sleep(_GENERATION_POLL_S)

    def newer_than(self, version: ContainerVersion) -> ContainerVersion:
        """What the coordinator has begun of the same container after `version`, which it gave up; else `version`.

        A rank that had failed before it came to the coordinator's first attempt, and comes to the second before the
        coordinator does, has been given the first one.
        """
        if self.ranks.world_size == 1:  # also another process of a rank: it knows what it was told
            return version
        generation, given_up = self._read_posted(version.container, self.deadline_s)
        with self._lock:
            if generation <= version.generation or given_up:
                return version
            self._generation = max(self._generation, generation)
        return ContainerVersion(version.container, generation)

    def _read_posted(self, container: CheckpointContainerId, deadline_s: float) -> tuple[int, bool]:
        """The newest generation that the coordinator began, and whether it has given that up."""
        generation, _, word = self.ranks.read(_generation_key(container), deadline_s).decode().partition(" ")
        return int(generation), word == _GIVEN_UP

    def create(self, one: ObjectVersion, size: int) -> SegmentObject:
        """A new object on this node; `size` in bytes as far as known. Use it in a `with` block: it is sealed at
        the end, and nothing of it stays when the block raises.

        Raises:
            StoreFullError: no room, with numbers.
            StaleEpochError: a newer incarnation of the job exists.
        """
        return self.segments.create(one, size, self.epoch)

    def close(self) -> None:
        """Leave. The agent goes on with what it was asked for. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with _sessions_lock:
            if _sessions.get(_key(self._spec)) is self:
                del _sessions[_key(self._spec)]
        inherit.withdraw(self._spec.to_json())
        self.agent.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return attach, (self._spec,)

    def __repr__(self) -> str:
        return f"Session(job={self.job!r}, epoch={self.epoch}, node={self.node.node_id!r})"


# Sessions of this process, so that one that comes back from a pickle is the one that is there.
_sessions: dict[tuple[str, str, int, int], Session] = {}
_sessions_lock = threading.Lock()


def _new_lock() -> None:
    """Another thread may have held the lock at the fork."""
    global _sessions_lock
    _sessions_lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def open_session(job: str | None = None) -> Session | None:
    """The newest session of this process (of this job, when it is given) that is not closed, or None."""
    with _sessions_lock:
        mine = [session for key, session in _sessions.items() if key[-1] == os.getpid()]
    return next((one for one in reversed(mine) if job in (None, one.job)), None)


def known_session(job: str | None = None) -> Session | None:
    """`open_session`. In a process without one that one with a session has started, to save in the background, that
    session; None when it is of another job.

    Raises:
        UnsupportedError: see `inherit.inherited`. Also the errors of `attach`.
    """
    found = open_session(job)
    if found is None and open_session() is None and (spec := _inherited()) is not None and job in (None, spec.job):
        return attach(spec)
    return found


def current_session(job: str | None = None) -> Session:
    """`known_session`, or a new one from `init()` when there is none.

    Args:
        job: only a session of this job will do.

    Raises:
        ConfigError: sessions are there, in this process or in the one that started it, and none is of this job: a
            misspelt name must not make a second job, whose session would then be the process's newest, and a job whose
            session is the other process's must not begin anew. Also the other errors of `init`.
    """
    found = known_session(job)
    if found is None and (other := open_session() or _inherited()) is not None:
        raise ConfigError(
            f"expected job {other.job}, of which this process has a session, found job {job}; correct the name, or "
            f"make a session of the other job first: replicator.init({job!r})"
        )
    return found or init(job)


def _inherited() -> SessionSpec | None:
    announced = inherit.inherited()
    return None if announced is None else SessionSpec.from_json(announced)


def _key(spec: SessionSpec) -> tuple[str, str, int, int]:
    return spec.root, spec.job, spec.epoch, os.getpid()


def attach(spec: SessionSpec) -> Session:
    """The session of this process for an epoch that its rank has entered already; joined when there is none."""
    with _sessions_lock:
        known = _sessions.get(_key(spec))
    if known is not None:
        return known
    agent = LocalAgent(spec.root, deadline_s=spec.deadline_s, auto_start=spec.auto_start, idle_exit_s=spec.idle_exit_s)
    try:
        agent.join_job(spec.job, spec.epoch, spec.members, spec.replicas, spec.placement)
        return Session(agent, spec)
    except BaseException:
        agent.close()
        raise


def init(
    job: str | None = None,
    *,
    root: str | Path | None = None,
    replicas: int | None = None,
    placement: str | Mapping[str, Sequence[str]] | None = None,
    deadline_s: float | None = None,
    backpressure: str | None = None,
    process_group: Any = None,
    auto_start: bool | None = None,
    idle_exit_s: float | None = None,
) -> Session:
    """Enter a job: find this node's agent or start one, and agree with all other ranks on a new epoch.

    Under torch.distributed (initialised before) every rank calls it with the same arguments; else the process
    is alone. All ranks get a session of the same epoch, or all get the same error.

    Args:
        job: a name that lasts over restarts; default: REPLICATOR_JOB, or what the launcher gives (`client.job`).
        root: of the store on this node; default: REPLICATOR_ROOT, the directory of REPLICATOR_SOCKET, or
            /dev/shm/replicator-<uid>.
        replicas: copies on other nodes beside the owner's; default: REPLICATOR_REPLICAS, or 1.
        placement: where copies go: "group", "pairwise" or "ring", or a map from each node to its buddies (see
            docs/placement.md); default: REPLICATOR_PLACEMENT, or what the agents are configured with.
        deadline_s: the one knob for waits; default: REPLICATOR_DEADLINE_S, or 30.
        backpressure: of saves that come faster than their copies: `skip` or `block` (docs/configuration.md); default:
            REPLICATOR_BACKPRESSURE, or skip.
        process_group: the ranks that take part; default: all.
        auto_start: start an agent where none runs; default: yes, unless REPLICATOR_SOCKET names one.
        idle_exit_s: an agent started here ends after so long without a trainer; default: one hour.

    Raises:
        ConfigError: contradicting settings, or agents that cannot reach each other.
        AgentUnavailableError, DeadlineExceededError: an agent or a rank did not come; with its name.
    """
    given = {} if placement is None else {"placement": placement, "placement_map": ""}
    if isinstance(placement, Mapping):
        given = {
            "placement": "explicit",
            "placement_map": json.dumps({node: list(of) for node, of in placement.items()}),
        }
    config = load_config(
        _given(root=root, replicas=replicas, deadline_s=deadline_s, backpressure=backpressure, **given)
    )
    wanted = AgreedPlacement(config.placement, (), config.placement_map) if config.placement else None
    socket_path = os.environ.get("REPLICATOR_SOCKET", "")
    if root is None and socket_path:
        root = Path(socket_path).parent
    if auto_start is None:
        auto_start = not socket_path
    name = find_job(job)
    deadline = AGREEMENT_DEADLINES * config.deadline_s
    _check_distributed()
    ranks = meet_ranks(process_group, deadline)
    agents: list[LocalAgent] = []

    def present() -> bytes:
        agent = LocalAgent(
            root or config.root, deadline_s=config.deadline_s, auto_start=bool(auto_start), idle_exit_s=idle_exit_s
        )
        agents.append(agent)
        host, network = here()
        node = agent.node
        return Presence(
            rank=ranks.rank,
            job=name.job,
            replicas=config.replicas,
            root=str(agent.root),
            node_id=node.node_id,
            incarnation=node.identity.incarnation,
            grpc_address=node.grpc_address,
            host=host,
            network=network,
            labels=node.labels,
            placement=wanted,
        ).to_json()

    def open_epoch(answers: Any) -> bytes:
        presences = [Presence.from_json(answer) for answer in answers]
        nodes = members(presences)
        epoch, agreed = agents[0].open_job(name.job, nodes, config.lookup_deadline_s, config.replicas, wanted)
        by_name = {one.node_id: one for one in presences}
        by_node = [by_name[node.node_id].to_json().decode() for node in nodes]
        return json.dumps([epoch, by_node, uuid.uuid4().hex, agreed.to_json() if agreed else None]).encode()

    try:
        epoch, nodes, nonce, agreed = json.loads(ranks.agree("the epoch of the job", present, open_epoch, deadline))
        spec = SessionSpec(
            root=str(agents[0].root),
            job=name.job,
            epoch=epoch,
            members=tuple(Presence.from_json(node).node for node in nodes),
            replicas=config.replicas,
            deadline_s=config.deadline_s,
            auto_start=bool(auto_start),
            idle_exit_s=idle_exit_s,
            backpressure=config.backpressure,
            placement=None if agreed is None else AgreedPlacement.from_json(agreed),
            nonce=nonce,
        )
        notes: list[str] = []

        def join() -> bytes:
            notes.append(agents[0].join_job(spec.job, spec.epoch, spec.members, spec.replicas, spec.placement))
            return b""

        ranks.agree("every rank's entry into the job", join, lambda _: b"", deadline)
    except BaseException:
        for agent in agents:
            agent.close()
        raise
    if ranks.rank == 0:
        for note in (name.note, *notes):
            if note:
                logger.warning("%s", note)
        logger.info("job %s, epoch %d, %d nodes (job name from %s)", spec.job, epoch, len(nodes), name.origin)
    inherit.announce(spec.to_json())
    return Session(agents[0], spec, ranks)


def _generation_key(container: CheckpointContainerId) -> str:
    return f"the generation of {container}"


def _given(**settings: Any) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}


def _check_distributed() -> None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1 and not is_distributed():
        raise ConfigError(
            f"WORLD_SIZE is {size}, and torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before replicator.init(), so that the ranks can agree"
        )
