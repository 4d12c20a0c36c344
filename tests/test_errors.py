"""Errors keep their type across processes, and each has the exit code the manual promises."""

from __future__ import annotations

import inspect
import pickle

import pytest

from replicator import errors
from replicator.errors import (
    KINDS,
    AgentUnavailableError,
    DeadlineExceededError,
    ReplicatorError,
    StoreFullError,
    from_wire,
    to_wire,
)

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, ReplicatorError) and value.__module__ == errors.__name__
]
MESSAGE = "expected 10 bytes, found ä\n'9'; try again"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_crosses_the_wire_and_keeps_its_message(kind: type[ReplicatorError]) -> None:
    """F40: also through a process pool (pickle), so that a future's exception is what was raised."""
    error = kind(MESSAGE)
    again = from_wire(*to_wire(error))
    for copy in (again, pickle.loads(pickle.dumps(error))):
        assert type(copy) is kind
        assert str(copy) == MESSAGE
        assert copy.kind == kind.__name__
    assert KINDS[kind.__name__] is kind


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_a_documented_exit_code_and_docstring(kind: type[ReplicatorError]) -> None:
    assert kind.exit_code in range(1, 10)
    assert kind.__doc__


def test_exit_codes_are_those_of_the_manual() -> None:
    codes = {name: kind.exit_code for name, kind in KINDS.items()}
    expected = {
        2: {"InvalidIdError", "ConfigError", "UnsupportedError"},
        3: {"NotFoundError", "ObjectNotFoundError", "NoRecoverableCheckpointError"},
        4: {"AgentUnavailableError", "PeerUnavailableError"},
        5: {"StoreError", "StoreRootError", "StoreFullError", "ObjectExistsError", "SegmentError"},
        6: {"CorruptObjectError"},
        7: {
            "TransferError",
            "TransferStalledError",
            "TicketError",
            "ReplicationError",
            "NodeDrainingError",
            "SaveFailedError",
            "SaveError",
            "CommitError",
        },
        8: {"StaleEpochError"},
        9: {"DeadlineExceededError"},
    }
    for code, names in expected.items():
        assert {codes[name] for name in names} == {code}


def test_foreign_error_travels_with_its_types_name() -> None:
    assert to_wire(KeyError("x")) == ("ReplicatorError", "KeyError: 'x'")


def test_unknown_kind_of_a_newer_peer_is_still_an_error_of_ours() -> None:
    error = from_wire("ErrorOfTheFuture", "words")
    assert type(error) is ReplicatorError
    assert str(error) == "words"


def test_kind_is_only_ever_an_error_class() -> None:
    """F37: what a peer names is looked up in a table of error classes, nothing else."""
    for kind in ("__builtins__", "Exception", "os.system", ""):
        assert type(from_wire(kind, "x")) is ReplicatorError


def test_deadline_says_what_from_whom_and_how_long() -> None:
    """F15."""
    error = DeadlineExceededError.of("the inventory", "node n2", 5)
    assert str(error) == (
        "waited 5.0 s for the inventory from node n2, in vain; see that it runs and is not stopped, or allow more time"
    )
    assert isinstance(error, TimeoutError)


def test_builtin_bases_are_caught_by_their_usual_names() -> None:
    with pytest.raises(ConnectionError):
        raise AgentUnavailableError("no agent")
    with pytest.raises(errors.StoreError):
        raise StoreFullError("full")
