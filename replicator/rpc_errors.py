"""Errors across a process boundary: an exception as the status of a call, and back to one of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import grpc

from replicator import errors
from replicator.errors import DeadlineExceededError, ReplicatorError
from replicator.v1 import peer_pb2

KIND_KEY = "replicator-error-kind"
# Status details travel as one HTTP/2 header, percent-encoded, and headers of a call are limited to 8 KiB.
MAX_DETAIL_BYTES = 2_000

_CODES: tuple[tuple[type[ReplicatorError], grpc.StatusCode], ...] = (
    (errors.InvalidIdError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.AgentUnavailableError, grpc.StatusCode.UNAVAILABLE),
    # Not UNAVAILABLE: the agent that says so is there, it is another one that is not.
    (errors.PeerUnavailableError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.StoreFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ObjectExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.StoreError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CorruptObjectError, grpc.StatusCode.DATA_LOSS),
    (errors.TicketError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.TransferError, grpc.StatusCode.ABORTED),
    (errors.ReplicationError, grpc.StatusCode.ABORTED),
    (errors.CommitError, grpc.StatusCode.ABORTED),
    (errors.StaleEpochError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DeadlineExceededError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.ForkedClientError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
)


def status_code(error: BaseException) -> grpc.StatusCode:
    """The gRPC status with which `error` leaves a service; what is not ours is INTERNAL."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.UNKNOWN if isinstance(error, ReplicatorError) else grpc.StatusCode.INTERNAL


def short_message(message: str) -> str:
    """`message`, cut so that it fits into a status."""
    encoded = message.encode("utf-8", "backslashreplace")
    if len(encoded) <= MAX_DETAIL_BYTES:
        return encoded.decode()
    return encoded[: MAX_DETAIL_BYTES - 20].decode("utf-8", "ignore") + "... (cut)"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the call with `error`: its kind as trailing metadata, its message as details."""
    kind, message = errors.to_wire(error)
    await context.abort(status_code(error), short_message(message), ((KIND_KEY, kind),))
    raise AssertionError("unreachable: abort raises")


def error_from_rpc(error: grpc.RpcError, awaited: str, whom: str, seconds: float) -> ReplicatorError:
    """What a failed call means: the error that the other side raised, or why nothing came from it.

    Args:
        error: of `grpc` or `grpc.aio`.
        awaited: what the call was to bring, for the message.
        whom: who was asked.
        seconds: the call's deadline.
    """
    kind = ""
    for key, value in _trailing_metadata(error):
        if key == KIND_KEY:
            kind = value if isinstance(value, str) else value.decode("ascii", "replace")
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else str(error)) or ""
    if kind:
        return errors.from_wire(kind, details)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError.of(awaited, whom, seconds)
    if code == grpc.StatusCode.UNAVAILABLE:
        return errors.PeerUnavailableError(f"{whom} cannot be reached for {awaited}: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return errors.UnsupportedError(
            f"{whom} does not know how to give {awaited}: {details}; is it an older version?"
        )
    return ReplicatorError(f"{whom} failed to give {awaited}: {code.name} {details}")


def _trailing_metadata(error: grpc.RpcError) -> Sequence[tuple[str, str | bytes]]:
    getter = getattr(error, "trailing_metadata", None)
    found = getter() if getter is not None else None
    return tuple(found) if found else ()


def offer_failure(error: BaseException) -> peer_pb2.OfferFailure:
    """`error` as it is reported to the owner of an offered object."""
    kind, message = errors.to_wire(error)
    return peer_pb2.OfferFailure(error_kind=kind, error_message=short_message(message))
