"""A process's membership in a job: its agent, its epoch, and the lookups that all ranks do together."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicator.client import inherit
from replicator.client.agreement import Ranks, is_distributed, known_ranks, meet_ranks
from replicator.client.generations import Generations
from replicator.client.job import find_job
from replicator.client.local_agent import LocalAgent
from replicator.client.outstanding import CommitFutures, CommitInfo
from replicator.client.plan import Plan, plan_from_pb
from replicator.client.replication import ReplicationManager
from replicator.client.retrieval import keep, lookup
from replicator.client.roll_call import Presence, here, members
from replicator.client.segments import SegmentObject, Segments
from replicator.client.session_spec import SessionSpec
from replicator.config import load_config
from replicator.decide.types import Manifest
from replicator.errors import ConfigError, DeadlineExceededError, ReplicatorError
from replicator.faultpoints import reach
from replicator.ids import (
    AgreedPlacement,
    CheckpointContainerId,
    ContainerVersion,
    NodeAddress,
    ObjectVersion,
    validate_step,
)
from replicator.v1 import types_pb2

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from replicator.store.trailer import ObjectInfo

logger = logging.getLogger("replicator.client")

# Ranks come to a common point at different times; the slowest is given this many deadlines.
AGREEMENT_DEADLINES = 4
# Containers committed through a session of which it is remembered whether they lack copies.
_MAX_UNPROTECTED = 64


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
        self._unprotected: dict[ContainerVersion, Future[CommitInfo]] = {}
        self._generations = Generations(agent, spec.job, spec.epoch, spec.deadline_s, lambda: self.ranks)
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
        """The coordinator's first step of a save, which the other ranks `follow`: see `Generations.begin`."""
        return self._generations.begin(container, saver)

    def commit(self, manifest: Manifest) -> CommitFutures:
        """The coordinator's last step of a save: see `LocalAgent.commit`."""
        futures = self.agent.commit(manifest)
        self._generations.committed(manifest.version)
        with self._lock:
            self._unprotected[manifest.version] = futures.protected
            while len(self._unprotected) > _MAX_UNPROTECTED:
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
        """The coordinator's word that a save of this session has failed: see `Generations.abandon`."""
        return self._generations.abandon(version)

    @property
    def newest_generation(self) -> int:
        """Of the last save that this rank took part in; the same on all ranks between saves."""
        return self._generations.newest

    def follow(self, container: CheckpointContainerId, told: ContainerVersion | None) -> ContainerVersion:
        """The generation that the coordinator began for this save: see `Generations.follow`."""
        return self._generations.follow(container, told)

    def await_next(self, container: CheckpointContainerId) -> ContainerVersion:
        """The generation that the coordinator begins for this save: see `Generations.await_next`."""
        return self._generations.await_next(container)

    def newer_than(self, version: ContainerVersion) -> ContainerVersion:
        """What the coordinator has begun after `version`, which it gave up: see `Generations.newer_than`."""
        return self._generations.newer_than(version)

    def create(self, one: ObjectVersion, size: int) -> SegmentObject:
        """A new object on this node; `size` in bytes as far as known. Use it in a `with` block: it is sealed at
        the end, and nothing of it stays when the block raises.

        Raises:
            StoreFullError: no room, with numbers.
            StaleEpochError: a newer incarnation of the job exists.
        """
        return self.segments.create(one, size, self.epoch)

    def create_many(self, objects: Sequence[tuple[ObjectVersion, ReadableBuffer]]) -> list[ObjectInfo]:
        """Seal objects whose bytes are here already: many small ones cost a call together, not two each.

        Raises:
            ReplicatorError: some are not sealed; of the first one's kind, and with its reason. The others are.
            StaleEpochError: a newer incarnation of the job exists.
        """
        results = self.segments.seal_many(objects, self.epoch)
        failed = [one for one in results if isinstance(one, ReplicatorError)]
        if failed:
            raise type(failed[0])(f"{len(failed)} of {len(results)} objects could not be sealed: {failed[0]}")
        return [one for one in results if not isinstance(one, ReplicatorError)]

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


def _given(**settings: Any) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}


def _check_distributed() -> None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1 and not is_distributed():
        raise ConfigError(
            f"WORLD_SIZE is {size}, and torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before replicator.init(), so that the ranks can agree"
        )
