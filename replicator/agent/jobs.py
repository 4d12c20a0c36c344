"""What this node knows of each job: its epoch, its members, and the attempts it has given out.

Whatever is answered was persisted before. An epoch only grows, and whoever speaks with an older one is
refused (F11). Members of earlier epochs are remembered, because they may hold what a recovery looks for (F13).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import random
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from replicator.agent.placing import PlacementChoice, Placing, labels_of
from replicator.decide.heal import candidates, standing_buddies
from replicator.decide.placement import Buddies, Placement, Preference, note
from replicator.errors import ConfigError, InvalidIdError, ReplicatorError, StaleEpochError, StoreError
from replicator.ids import (
    MAX_ATTEMPT,
    MAX_EPOCH,
    AgreedPlacement,
    CheckpointContainerId,
    ContainerVersion,
    NodeAddress,
    make_generation,
    split_generation,
    validate_job,
)
from replicator.store.records import JobState

MAX_JOBS = 1024
MAX_MEMBERS = 4096
MAX_REMEMBERED = 4096
# Attempts are persisted this many at a time; those not used when the agent dies are skipped.
_ATTEMPT_BATCH = 16
# Of opening: how often, and how far apart, when several incarnations do it at the same time.
_OPEN_ROUNDS = 8
_OPEN_JITTER_S = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpochAnswer:
    """What a peer knows of a job: the highest epoch (0: job unknown), the members, and of which epoch these are."""

    node: NodeAddress
    highest_epoch: int
    known_members: tuple[NodeAddress, ...] = ()
    members_epoch: int = 0


class EpochAsker(Protocol):
    """Asks one peer about a job."""

    async def __call__(self, job: str, address: str, expected: NodeAddress | None, deadline_s: float) -> EpochAnswer:
        """Raises ReplicatorError when the peer does not answer in time or is somebody else."""
        ...


class JobStore(Protocol):
    """The part of `Store` that keeps jobs."""

    def jobs(self) -> Sequence[str]: ...
    def job_state(self, job: str) -> JobState | None: ...
    def put_job_state(self, state: JobState) -> None: ...
    def versions(self, job: str | None = None) -> Sequence[ContainerVersion]: ...


class Jobs:
    """Epochs and members of all jobs. Used in the event loop only.

    Args:
        store: where states are persisted.
        address: of this agent, which is a member of every job its ranks run.
        replicas: copies wanted for a job that no rank has joined yet.
        choice: of this node's settings.

    Attributes:
        placing: where copies go, and may go.
    """

    def __init__(
        self, store: JobStore, address: NodeAddress, replicas: int, choice: PlacementChoice | None = None
    ) -> None:
        self._store = store
        self._address = address
        self._replicas = replicas
        self.placing = Placing(address.node_id, replicas, choice or PlacementChoice())
        self._digests: dict[str, tuple[JobState, int]] = {}
        self._elders: dict[str, tuple[int, NodeAddress]] = {}
        self._states: dict[str, JobState] = {}
        # Another number whenever something of a job has changed.
        self.revision = 0
        self._attempts: dict[str, tuple[int, int]] = {}
        # Set by whoever watches the nodes: those that are dead, and those that are being drained.
        self.dead: frozenset[str] = frozenset()
        self.leaving: frozenset[str] = frozenset()
        self._opening: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        for job in store.jobs():
            state = store.job_state(job)
            if state is not None:
                self._states[job] = dataclasses.replace(state, members=self._with_me(state.members))

    def names(self) -> tuple[str, ...]:
        """All jobs with a known epoch, sorted."""
        return tuple(sorted(self._states))

    def epoch(self, job: str) -> int:
        """The highest epoch known of the job; 0 when it is unknown."""
        state = self._states.get(job)
        return 0 if state is None else state.epoch

    def replicas(self, job: str) -> int:
        """Copies wanted beside the owner's."""
        state = self._states.get(job)
        return self._replicas if state is None else state.replicas

    def members(self, job: str) -> tuple[NodeAddress, ...]:
        """The members of the newest epoch that was joined here, sorted by node id; empty when the job is unknown."""
        state = self._states.get(job)
        return () if state is None else state.members

    def is_member(self, job: str) -> bool:
        """Whether this node takes part in the newest epoch that was joined here."""
        return any(node.node_id == self._address.node_id for node in self.members(job))

    def has_joined(self, job: str, epoch: int) -> bool:
        """Whether a rank of this node entered that epoch, so that its members are known here."""
        state = self._states.get(job)
        return state is not None and state.members_epoch == epoch and self.is_member(job)

    def everyone(self, job: str) -> tuple[NodeAddress, ...]:
        """Members, then nodes remembered from earlier epochs or told by peers. Node ids are unique."""
        state = self._states.get(job)
        return () if state is None else state.members + state.remembered

    def digest(self, job: str) -> int:
        """The same number on nodes that know the same of `everyone`; 0 when the job is unknown."""
        state = self._states.get(job)
        if state is None:
            return 0
        known = self._digests.get(job)
        if known is None or known[0] is not state:
            told = sorted(f"{node.identity}@{node.grpc_address}" for node in self.everyone(job))
            number = int.from_bytes(hashlib.blake2b("\n".join(told).encode(), digest_size=8).digest(), "big")
            known = self._digests[job] = state, max(number, 1)
        return known[1]

    def buddies(self, job: str) -> tuple[str, ...]:
        """Where this node's objects of the job are copied to; none while it is no member of the job."""
        return self.buddies_of(job, self._address.node_id)

    def buddies_of(self, job: str, owner: str) -> tuple[str, ...]:
        """Where a member's objects are copied to: those agreed on, who is dead or being drained replaced if it can be.

        None for a node that is no member.
        """
        agreed = self.placement(job).buddies.get(owner, ())
        avoided = self.dead | self.leaving
        if avoided.isdisjoint(agreed):
            return agreed
        members = [member.node_id for member in self.members(job)]
        return standing_buddies(owner, members, len(agreed), avoided, self.preference(job)).node_ids

    def acting(self, job: str, coordinator: str) -> str:
        """Who does the coordinator's work: itself, or while it is dead (or no member) the next node by placement."""
        members = [member.node_id for member in self.members(job)]
        if not members or (coordinator in members and coordinator not in self.dead):
            return coordinator
        order = candidates(coordinator, members, self.replicas(job), self.preference(job))
        return next((node for node in order if node in members and node not in self.dead), coordinator)

    def buddy_addresses(self, job: str) -> tuple[NodeAddress, ...]:
        """The addresses of `buddies(job)`, in the same order."""
        known = {member.node_id: member for member in self.members(job)}
        return tuple(known[node_id] for node_id in self.buddies(job))

    def placement(self, job: str) -> Placement:
        """Where the copies of every member go: as agreed for the newest epoch that was joined here."""
        return self.placing.of(self._state(job))

    def preference(self, job: str) -> Preference:
        """In which order members hold what a node owns, also when its buddies are lost."""
        return Preference(self.placement(job), labels_of(self.members(job)))

    def agreed(self, job: str) -> AgreedPlacement | None:
        """The placement of the newest epoch whose members are known here, to be carried to others."""
        state = self._states.get(job)
        return None if state is None else state.placement

    def members_epoch(self, job: str) -> int:
        """The newest epoch whose members are known here; 0: none."""
        state = self._states.get(job)
        return 0 if state is None else state.members_epoch

    def retrieved(self, job: str) -> tuple[ContainerVersion | None, int]:
        """The container of the job that its trainers loaded here last, and in which epoch; (None, 0): none."""
        state = self._states.get(job)
        return (None, 0) if state is None else (state.retrieved, state.retrieved_epoch)

    def note_retrieved(self, version: ContainerVersion) -> None:
        """Trainers of the newest epoch load this container here. Remembered over restarts, where there is room."""
        job = version.container.job
        epoch = self.epoch(job)
        if epoch and self.retrieved(job) != (version, epoch):
            self._put_if_room(dataclasses.replace(self._state(job), retrieved=version, retrieved_epoch=epoch))

    def elder(self, job: str) -> NodeAddress | None:
        """The node that knew the members of a later epoch than this one does, when the job was opened here."""
        epoch, node = self._elders.get(job, (0, self._address))
        return node if epoch > self.members_epoch(job) else None

    def check(self, job: str, epoch: int) -> None:
        """Let a message of the job's incarnation `epoch` through; one of a newer incarnation supersedes what is known.

        Raises:
            StaleEpochError: the epoch is older than the newest known here.
            InvalidIdError: the epoch is 0, which no incarnation has, or out of range.
        """
        validate_job(job)
        if not 1 <= epoch <= MAX_EPOCH:
            raise InvalidIdError(f"expected the epoch of a running job in 1..{MAX_EPOCH}, found {epoch}")
        known = self.epoch(job)
        if epoch < known:
            raise StaleEpochError(
                f"job {job}: epoch {epoch} was superseded by epoch {known}, which is running now; "
                "this older incarnation must stop"
            )
        if epoch > known:
            self._put(dataclasses.replace(self._state(job), epoch=epoch, attempt=0))
            log.info("newer incarnation of a job", extra={"job": job, "epoch": epoch, "previous_epoch": known})

    async def open_job(
        self, job: str, members: Sequence[NodeAddress], peers: Sequence[str], ask: EpochAsker, deadline_s: float
    ) -> int:
        """The epoch of a new incarnation: one more than the highest that this node or any other that answers knows.

        Asks `members` (none given: those of the last epoch), the addresses `peers`, and whoever is remembered of
        the job. Nodes that do not answer are passed over: a lost node must not keep the job from starting. Those
        that are only remembered get a quarter of the time, for they are often dead.

        Raises:
            InvalidIdError, StoreError: the job's name cannot be one, or the epoch could not be persisted.
            StaleEpochError: others open it all the time.
        """
        validate_job(job)
        async with self._opening.setdefault(job, asyncio.Lock()):
            asked: dict[str, tuple[NodeAddress | None, float]] = {}
            current = members or self.members(job)
            for node in self.everyone(job):
                asked[node.grpc_address] = (node, deadline_s / 4)
            asked.update(dict.fromkeys(peers, (None, deadline_s)))
            asked.update({node.grpc_address: (node, deadline_s) for node in current})
            asked.pop(self._address.grpc_address, None)
            known = len(asked)
            found: dict[str, EpochAnswer] = {}
            opened = 0
            pause = _OPEN_JITTER_S
            for _ in range(_OPEN_ROUNDS):
                began = asyncio.get_running_loop().time()
                found = await self._ask_all(ask, job, asked)
                took = asyncio.get_running_loop().time() - began
                asked = {address: (node, deadline_s / 4) for address, (node, _) in asked.items() if address in found}
                highest = max([0, *(answer.highest_epoch for answer in found.values())])
                if opened and opened == self.epoch(job) > highest:
                    break
                rivals = [answer.node.node_id for answer in found.values() if answer.highest_epoch >= opened]
                if opened and rivals and max(rivals) > self._address.node_id:
                    # Others open it too. The one with the greatest name goes on at once; the others let it write and
                    # ask, and then look again, so that they cannot overtake each other for ever.
                    await asyncio.sleep(min((1 + random.random()) * max(pause, 4 * took), deadline_s / 4))
                    pause *= 2
                    found = await self._ask_all(ask, job, asked)
                    highest = max([0, *(answer.highest_epoch for answer in found.values())])
                highest = max(self.epoch(job), highest)
                if highest >= MAX_EPOCH:
                    raise InvalidIdError(f"job {job} has used up all {MAX_EPOCH} epochs; give it another name")
                # Whoever opens asks after it has written, and with nothing in between: the later of two that wrote
                # the same epoch hears of the other.
                opened = highest + 1
                self._put(dataclasses.replace(self._state(job), epoch=opened, attempt=0))
            else:
                raise StaleEpochError(
                    f"job {job}: other incarnations opened it at the same time, {_OPEN_ROUNDS} times in a row; let "
                    "only one of them run"
                )
            elder = max(found.values(), key=lambda answer: (answer.members_epoch, answer.node), default=None)
            if elder is not None:
                self._elders[job] = elder.members_epoch, elder.node
            self.learn(job, [answer.node for answer in found.values()], first_hand=True)
            self.learn(job, [node for answer in found.values() for node in answer.known_members])
            log.info(
                "job opened",
                extra={"job": job, "epoch": opened, "asked": known, "answered": len(found)},
            )
            return opened

    def join(
        self,
        job: str,
        epoch: int,
        members: Sequence[NodeAddress],
        replicas: int,
        agreed: AgreedPlacement | None = None,
    ) -> Buddies:
        """Enter the epoch with its members, and get this node's buddies. Idempotent.

        Args:
            agreed: what the epoch was opened with; None: what follows from the members and this node's settings.

        Raises:
            StaleEpochError: a newer epoch is known, or this one was joined with other nodes.
            ConfigError: this node is not among the members, two of them have one name, or they are too many; or the
                placement is not one of these members, not what this node is configured with, or not what others of
                its ranks joined with.
        """
        joining = self._members(job, members)
        if replicas < 0:
            raise ConfigError(f"replicas: expected 0 or more, found {replicas}")
        labels = labels_of(joining)
        again = self.members_epoch(job) == epoch and labels.keys() == labels_of(self.members(job)).keys()
        if agreed is None and again and self.replicas(job) == replicas:
            agreed = self.agreed(job)
        if agreed is None:
            agreed = self.placing.arrange(joining, replicas)
        self.placing.check(job, agreed, labels, replicas)
        self.check(job, epoch)
        state = self._state(job)
        if state.members_epoch == epoch:
            before, now = ({node.node_id for node in nodes} for nodes in (state.members, joining))
            if before != now:
                raise StaleEpochError(
                    f"job {job}: epoch {epoch} was joined here with the nodes {_listed(before)}, and now with "
                    f"{_listed(now)}: two incarnations hold one epoch; let rank 0 of the one that is to run open the "
                    "job again"
                )
            if state.replicas == replicas and state.placement not in (None, agreed):
                raise ConfigError(
                    f"job {job}: epoch {epoch} was joined here with another placement than now, {agreed.strategy!r}; "
                    "let all ranks join with what the job was opened with"
                )
            # Known since the epoch began; addresses that changed meanwhile were learned first hand.
            joining = self._with_me(state.members)
        remembered = _without(_merged(state.members, state.remembered), joining)[:MAX_REMEMBERED]
        joined = dataclasses.replace(
            state, members=joining, members_epoch=epoch, remembered=remembered, replicas=replicas, placement=agreed
        )
        if joined != state:
            self._put(joined)
        return Buddies(self.buddies(job), note(self.placement(job), self._address.node_id, labels))

    def learn(self, job: str, nodes: Iterable[NodeAddress], *, first_hand: bool = False) -> None:
        """Remember nodes of a known job. Only what a node said of itself (`first_hand`) changes its address."""
        state = self._states.get(job)
        if state is None:
            return
        by_id = {node.node_id: node for node in nodes if node.node_id != self._address.node_id}
        known = {node.node_id for node in state.members + state.remembered}
        new = tuple(node for node in by_id.values() if node.node_id not in known)
        members, remembered = state.members, state.remembered
        if first_hand:
            members = tuple(by_id.get(node.node_id, node) for node in members)
            remembered = tuple(by_id.get(node.node_id, node) for node in remembered)
        learned = dataclasses.replace(state, members=members, remembered=(new + remembered)[:MAX_REMEMBERED])
        if learned != state:
            self._put_if_room(learned)

    def begin(self, job: str, step: int, epoch: int) -> ContainerVersion:
        """A new attempt at saving a step, with a generation above all that are known here of this epoch.

        Raises:
            StaleEpochError: a newer epoch is known.
            InvalidIdError: the step cannot be one, or the epoch's attempts are used up.
        """
        container = CheckpointContainerId(job, step)
        self.check(job, epoch)
        state = self._state(job)
        of_epoch, given = self._attempts.get(job, (0, 0))
        stored = [split_generation(version.generation) for version in self._store.versions(job)]
        last = max([given if of_epoch == epoch else state.attempt, *(held[1] for held in stored if held[0] == epoch)])
        version = ContainerVersion(container, make_generation(epoch, last + 1))
        if last + 1 > state.attempt:
            self._put(dataclasses.replace(state, attempt=min(last + _ATTEMPT_BATCH, MAX_ATTEMPT)))
        self._attempts[job] = (epoch, last + 1)
        return version

    async def _ask_all(
        self, ask: EpochAsker, job: str, asked: Mapping[str, tuple[NodeAddress | None, float]]
    ) -> dict[str, EpochAnswer]:
        """The answers that came, by address."""
        answers = await asyncio.gather(
            *(self._ask(ask, job, address, node, limit) for address, (node, limit) in asked.items())
        )
        return {address: answer for address, answer in zip(asked, answers, strict=True) if answer is not None}

    async def _ask(
        self, ask: EpochAsker, job: str, address: str, expected: NodeAddress | None, limit_s: float
    ) -> EpochAnswer | None:
        try:
            return await ask(job, address, expected, limit_s)
        except ReplicatorError as error:
            log.warning("a node does not tell the job's epoch", extra={"job": job, "peer": address, "reason": error})
            return None

    def _members(self, job: str, members: Sequence[NodeAddress]) -> tuple[NodeAddress, ...]:
        by_id: dict[str, NodeAddress] = {}
        for node in members:
            other = by_id.setdefault(node.node_id, node)
            if other != node:
                raise ConfigError(
                    f"job {job}: two agents call themselves {node.node_id!r} ({other.grpc_address} and "
                    f"{node.grpc_address}); give each node a node_id of its own"
                )
        if self._address.node_id not in by_id:
            raise ConfigError(
                f"job {job}: this node {self._address.node_id} is not among its members {_listed(set(by_id))}; "
                "let every rank pass the address of its own node's agent"
            )
        if len(by_id) > MAX_MEMBERS:
            raise ConfigError(f"job {job}: expected at most {MAX_MEMBERS} member nodes, found {len(by_id)}")
        return self._with_me(tuple(sorted(by_id.values())))

    def _with_me(self, nodes: tuple[NodeAddress, ...]) -> tuple[NodeAddress, ...]:
        """The nodes, this one as it is reached now."""
        return tuple(self._address if node.node_id == self._address.node_id else node for node in nodes)

    def _state(self, job: str) -> JobState:
        return self._states.get(job) or JobState(job=job, epoch=0, members=(), replicas=self._replicas)

    def _put(self, state: JobState) -> None:
        if state.job not in self._states and len(self._states) >= MAX_JOBS:
            raise StoreError(
                f"expected at most {MAX_JOBS} jobs on one node, found one more: {state.job}; remove one that is over: "
                "stop the agent, delete jobs/JOB.json, objects/JOB and manifests/JOB in its root, and start it again"
            )
        self._store.put_job_state(state)
        self._states[state.job] = state
        self.revision += 1

    def _put_if_room(self, state: JobState) -> None:
        """Of what is worth knowing as long as this agent lives, too: a full disk is no reason to do without it."""
        try:
            self._put(state)
        except StoreError as error:
            log.warning("what is known of a job is not stored", extra={"job": state.job, "reason": error})
            self._states[state.job] = state
            self.revision += 1


def _merged(first: Sequence[NodeAddress], second: Sequence[NodeAddress]) -> tuple[NodeAddress, ...]:
    return tuple({node.node_id: node for node in (*second, *first)}[key] for key in _ids((*first, *second)))


def _without(nodes: Sequence[NodeAddress], others: Sequence[NodeAddress]) -> tuple[NodeAddress, ...]:
    gone = {node.node_id for node in others}
    return tuple(node for node in nodes if node.node_id not in gone)


def _ids(nodes: Iterable[NodeAddress]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.node_id for node in nodes))


def _listed(names: set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")
