"""The words of the project as types: job, step, generation, container, object, node.

Nothing here does I/O. Ids arrive from users and from peers; every constructor validates, so that an
id that exists is a valid one. Ids are logical names: `store.paths` maps them under the store's root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from replicator.errors import InvalidIdError

MAX_JOB_CHARS = 128
MAX_NODE_CHARS = 128
MAX_NAME_CHARS = 200
MAX_NAME_PARTS = 8
MAX_STEP = 2**63 - 1
MAX_EPOCH = 2**44 - 1
ATTEMPT_BITS = 20
MAX_ATTEMPT = 2**ATTEMPT_BITS - 1

MAX_LABELS = 16
MAX_LABEL_CHARS = 128

Labels = tuple[tuple[str, str], ...]
"""Failure domains of a node: (level, value), outermost level first, for instance (("zone", "a"), ("rack", "r7"))."""

_PART = re.compile(r"[A-Za-z0-9_.\-+=@:~,]+")
_LABEL = re.compile(r"[A-Za-z0-9_.\-+@:/]+")
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})(?:_ckpt)?")


def validate_part(text: str, what: str, max_chars: int) -> str:
    """Return `text` when it can be one part of an id, else raise InvalidIdError with the reason."""
    if not isinstance(text, str):
        raise InvalidIdError(f"{what} must be a string, found {type(text).__name__}")
    if not text:
        raise InvalidIdError(f"{what} is empty")
    if "\0" in text:
        raise InvalidIdError(f"{what} contains a NUL character: {text[:80]!r}")
    if text in (".", ".."):
        raise InvalidIdError(f"{what} is {text!r}, which would be a path traversal")
    if len(text) > max_chars:
        raise InvalidIdError(f"{what} has {len(text)} characters, at most {max_chars} are allowed: {text[:40]!r}...")
    if not _PART.fullmatch(text):
        bad = next(char for char in text if not _PART.fullmatch(char))
        raise InvalidIdError(
            f"{what} contains {bad!r}; allowed are letters, digits and _ . - + = @ : ~ , in: {text[:80]!r}"
        )
    return text


def validate_job(job: str) -> str:
    """Return the job id, or raise InvalidIdError."""
    return validate_part(job, "job id", MAX_JOB_CHARS)


def validate_node_id(node_id: str) -> str:
    """Return the node id, or raise InvalidIdError."""
    return validate_part(node_id, "node id", MAX_NODE_CHARS)


def validate_labels(labels: Labels) -> Labels:
    """Return the labels of a node, or raise InvalidIdError."""
    if not labels:
        return labels
    if len(labels) > MAX_LABELS or len({level for level, _ in labels}) < len(labels):
        raise InvalidIdError(f"labels: expected at most {MAX_LABELS} levels, each once, found {labels!r}"[:300])
    for text in (one for pair in labels for one in pair):
        if not isinstance(text, str) or not 0 < len(text) <= MAX_LABEL_CHARS or not _LABEL.fullmatch(text):
            raise InvalidIdError(
                f"labels: expected levels and values of letters, digits and _ . - + @ : / with at most "
                f"{MAX_LABEL_CHARS} characters, found {text!r}"[:300]
            )
    return labels


def validate_step(step: int) -> int:
    """Return the step, or raise InvalidIdError. Step 0 is a step."""
    return _validate_number(step, "step", MAX_STEP)


def _validate_number(number: int, what: str, most: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidIdError(f"{what} must be an integer, found {type(number).__name__} {number!r}")
    if not 0 <= number <= most:
        raise InvalidIdError(f"{what} must lie in 0..{most}, found {number}")
    return number


def validate_object_name(name: str) -> str:
    """Return the object's name, or raise InvalidIdError. A name may have parts, separated by '/'."""
    if not isinstance(name, str):
        raise InvalidIdError(f"object name must be a string, found {type(name).__name__}")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidIdError(
            f"object name has {len(name)} characters, at most {MAX_NAME_CHARS} are allowed: {name[:40]!r}..."
        )
    parts = name.split("/")
    if len(parts) > MAX_NAME_PARTS:
        raise InvalidIdError(f"object name has {len(parts)} parts, at most {MAX_NAME_PARTS} are allowed: {name!r}")
    for part in parts:
        validate_part(part, f"part of object name {name[:80]!r}" if len(parts) > 1 else "object name", MAX_NAME_CHARS)
    return name


@dataclass(frozen=True, slots=True, order=True)
class CheckpointContainerId:
    """One checkpoint of one job at one step, written `<job>/step-<N>_ckpt`."""

    job: str
    step: int

    def __post_init__(self) -> None:
        validate_job(self.job)
        validate_step(self.step)

    @classmethod
    def parse(cls, text: str) -> CheckpointContainerId:
        """Parse `<job>/step-<N>_ckpt`; the suffix `_ckpt` may be left out.

        Raises:
            InvalidIdError: with the reason, for anything else.
        """
        if not isinstance(text, str):
            raise InvalidIdError(f"container id must be a string, found {type(text).__name__}")
        parts = text.split("/")
        if len(parts) != 2:
            raise InvalidIdError(f"expected a container id like 'my-job/step-100_ckpt', found {text[:200]!r}")
        return cls(parts[0], parse_step_name(parts[1]))

    @property
    def step_name(self) -> str:
        return f"step-{self.step}_ckpt"

    def __str__(self) -> str:
        return f"{self.job}/{self.step_name}"


@dataclass(frozen=True, slots=True, order=True)
class CheckpointObjectId:
    """One immutable file of a container, written `<job>/step-<N>_ckpt/<name>`."""

    container: CheckpointContainerId
    name: str

    def __post_init__(self) -> None:
        validate_object_name(self.name)

    @classmethod
    def parse(cls, text: str) -> CheckpointObjectId:
        """Parse `<job>/step-<N>_ckpt/<name>`.

        Raises:
            InvalidIdError: with the reason, for anything else.
        """
        if not isinstance(text, str):
            raise InvalidIdError(f"object id must be a string, found {type(text).__name__}")
        parts = text.split("/", 2)
        if len(parts) != 3:
            raise InvalidIdError(
                f"expected an object id like 'my-job/step-100_ckpt/__0_0.distcp', found {text[:200]!r}"
            )
        return cls(CheckpointContainerId(parts[0], parse_step_name(parts[1])), parts[2])

    def __str__(self) -> str:
        return f"{self.container}/{self.name}"


def parse_step_name(text: str) -> int:
    """The step of `step-<N>_ckpt` or `step-<N>`; InvalidIdError for anything else."""
    match = _STEP.fullmatch(text)
    if match is None:
        raise InvalidIdError(
            f"expected a step like 'step-100_ckpt' (no leading zeros, at most {MAX_STEP}), found {text[:80]!r}"
        )
    return validate_step(int(match.group(1)))


@dataclass(frozen=True, slots=True, order=True)
class ContainerVersion:
    """One attempt (generation) at saving one container: what stores and peers really hold.

    Saving a step again makes a new generation, and objects of two generations never mix. Generations of
    all steps of a job are ordered: a greater one was begun later, in this or in a later epoch.
    """

    container: CheckpointContainerId
    generation: int

    def __post_init__(self) -> None:
        split_generation(self.generation)

    @property
    def epoch(self) -> int:
        return split_generation(self.generation)[0]

    def object(self, name: str) -> ObjectVersion:
        return ObjectVersion(self, name)

    def __str__(self) -> str:
        epoch, attempt = split_generation(self.generation)
        return f"{self.container}@{epoch}.{attempt}"


@dataclass(frozen=True, slots=True, order=True)
class ObjectVersion:
    """One object of one generation of a container."""

    version: ContainerVersion
    name: str

    def __post_init__(self) -> None:
        validate_object_name(self.name)

    @property
    def object_id(self) -> CheckpointObjectId:
        return CheckpointObjectId(self.version.container, self.name)

    def __str__(self) -> str:
        return f"{self.version}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class NodeIdentity:
    """One agent process: the node's lasting name, and a number drawn at every start of its agent."""

    node_id: str
    incarnation: int

    def __post_init__(self) -> None:
        validate_node_id(self.node_id)
        _validate_number(self.incarnation, "incarnation", 2**64 - 1)

    def __str__(self) -> str:
        return f"{self.node_id}#{self.incarnation:016x}"


@dataclass(frozen=True, slots=True, order=True)
class NodeAddress:
    """Where an agent is reached: `grpc_address` is `host:port`. Labels say where the node stands, and are not compared:
    they change only with the agent's incarnation."""

    identity: NodeIdentity
    grpc_address: str
    labels: Labels = field(default=(), compare=False)

    def __post_init__(self) -> None:
        validate_labels(self.labels)

    @property
    def node_id(self) -> str:
        return self.identity.node_id


@dataclass(frozen=True, slots=True)
class AgreedPlacement:
    """Where the copies of a job go in one epoch, as it is carried between agents and kept over their restarts.

    What it means is known to the strategy of that name (`decide.placement`): `groups` holds every member once, or
    `buddies` those of every member.
    """

    strategy: str
    groups: tuple[tuple[str, ...], ...] = ()
    buddies: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def to_json(self) -> list[Any]:
        return [self.strategy, self.groups, self.buddies]

    @classmethod
    def from_json(cls, found: Any) -> AgreedPlacement:
        """Raises InvalidIdError, ValueError or TypeError for what `to_json` does not give."""
        strategy, groups, buddies = found
        return cls.checked(strategy, groups, ((node_id, chosen) for node_id, chosen in buddies))

    @classmethod
    def checked(
        cls, strategy: str, groups: Iterable[Iterable[str]], buddies: Iterable[tuple[str, Iterable[str]]]
    ) -> AgreedPlacement:
        """Raises InvalidIdError when a name cannot be one of a strategy or of a node."""
        return cls(
            validate_part(strategy, "placement", MAX_NODE_CHARS),
            tuple(tuple(map(validate_node_id, group)) for group in groups),
            tuple((validate_node_id(node_id), tuple(map(validate_node_id, chosen))) for node_id, chosen in buddies),
        )


def make_generation(epoch: int, attempt: int) -> int:
    """Pack an epoch (44 bits) and an attempt within it (20 bits) into one ordered number."""
    _validate_number(epoch, "epoch", MAX_EPOCH)
    _validate_number(attempt, "attempt", MAX_ATTEMPT)
    return epoch << ATTEMPT_BITS | attempt


def split_generation(generation: int) -> tuple[int, int]:
    """The (epoch, attempt) of a generation; InvalidIdError when it is out of range."""
    _validate_number(generation, "generation", 2**64 - 1)
    return generation >> ATTEMPT_BITS, generation & MAX_ATTEMPT
