"""Every error that Replicator raises on purpose.

Each message says what was expected, what was found and what to do next. Each class has the exit code
with which the command line ends, and a `kind` (its name) under which it crosses a process boundary:
`to_wire` and `from_wire` keep the type from the agent to the trainer and the operator.
"""

from __future__ import annotations


class ReplicatorError(Exception):
    """Base of all errors of this package."""

    exit_code = 1

    @property
    def kind(self) -> str:
        return type(self).__name__


class InvalidIdError(ReplicatorError, ValueError):
    """An id of a job, step, container, object or node that cannot be one."""

    exit_code = 2


class ConfigError(ReplicatorError, ValueError):
    """A wrong configuration: unknown key, wrong type, values that contradict each other."""

    exit_code = 2


class NotFoundError(ReplicatorError, LookupError):
    """A job, container, object or node that nobody knows."""

    exit_code = 3


class ObjectNotFoundError(NotFoundError):
    """An object that this node (or, after a lookup, any node) does not hold."""


class NoRecoverableCheckpointError(NotFoundError):
    """Recovery lookup found no step that could be restored; the message names what is missing where."""


class AgentUnavailableError(ReplicatorError, ConnectionError):
    """The agent of this node does not answer."""

    exit_code = 4


class PeerUnavailableError(ReplicatorError, ConnectionError):
    """Another node's agent does not answer, or answers as somebody else."""

    exit_code = 4


class DirectoryError(ReplicatorError):
    """A directory that cannot be committed as a checkpoint: no directory, a file in it that cannot be read, is none,
    changed meanwhile, or is another one on another rank. The message names it."""

    exit_code = 2


class StoreError(ReplicatorError):
    """The node-local store cannot do what was asked."""

    exit_code = 5


class StoreRootError(StoreError):
    """The store's root is missing, not writable, in use by another agent, or of another format."""


class StoreFullError(StoreError):
    """No room for a reservation, in the budget or in the file system; the message has the numbers."""


class ObjectExistsError(StoreError):
    """An object of this name and generation is sealed with other content. Sealed objects are immutable."""


class SegmentError(StoreError):
    """A segment or writer used after its end, beyond its size, or by somebody who does not own it."""


class CorruptObjectError(ReplicatorError):
    """Bytes that do not match their checksum, or an object whose trailer is not valid."""

    exit_code = 6


class TransferError(ReplicatorError):
    """Bytes could not be moved from a peer."""

    exit_code = 7


class TransferStalledError(TransferError):
    """A transfer made no progress within its deadline."""


class TicketError(TransferError):
    """A bulk-lane request with a ticket that is unknown, expired, or for another object."""


class ReplicationError(ReplicatorError):
    """A replica was not made; the message names the buddy and every attempt."""

    exit_code = 7


class SaveSkippedError(ReplicationError):
    """Copies of a container were not made: saves came faster, and a newer one superseded it; the message names both."""


class NodeDrainingError(ReplicationError):
    """A node that is being drained was offered a copy; another node is to get it."""


class CommitError(ReplicatorError):
    """A container was not committed. It may still become visible later, complete and correct."""

    exit_code = 7


class SaveError(ReplicatorError):
    """A save that failed on this rank or on another; the message names the key, the object or the rank."""

    exit_code = 7


class SaveFailedError(SaveError):
    """A save that went on in the background failed; the message names what was saved, the process, and why."""


class StaleEpochError(ReplicatorError):
    """Spoken by an older incarnation of the job, which has been superseded. It must stop."""

    exit_code = 8


class DeadlineExceededError(ReplicatorError, TimeoutError):
    """Something awaited did not come: the message says what, from whom, and for how long."""

    exit_code = 9

    @classmethod
    def of(cls, awaited: str, whom: str, seconds: float) -> DeadlineExceededError:
        hint = "see that it runs and is not stopped, or allow more time"
        return cls(f"waited {seconds:.1f} s for {awaited} from {whom}, in vain; {hint}")


class ForkedClientError(ReplicatorError, RuntimeError):
    """A client handle used in a forked child; only the process that made it may use it."""


class UnsupportedError(ReplicatorError):
    """Something this version does not do, said before anything was written."""

    exit_code = 2


class TooLargeError(UnsupportedError):
    """A message that lists more than it may; the message names the bound."""


def _all_kinds(base: type[ReplicatorError]) -> dict[str, type[ReplicatorError]]:
    kinds = {base.__name__: base}
    for child in base.__subclasses__():
        kinds.update(_all_kinds(child))
    return kinds


KINDS: dict[str, type[ReplicatorError]] = _all_kinds(ReplicatorError)


def to_wire(error: BaseException) -> tuple[str, str]:
    """(kind, message) of any error; what is not ours travels as ReplicatorError with its type's name."""
    if isinstance(error, ReplicatorError):
        return error.kind, str(error)
    return ReplicatorError.__name__, f"{type(error).__name__}: {error}"


def from_wire(kind: str, message: str) -> ReplicatorError:
    """The error that `to_wire` described; an unknown kind (a newer peer's) becomes ReplicatorError."""
    return KINDS.get(kind, ReplicatorError)(message)
