"""What surrounds every handler of a service: typed errors leave as typed statuses, others are logged with a trace."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from replicator.agent.link import MEANT_FOR_KEY, NOT_ME_KEY
from replicator.errors import PeerUnavailableError, ReplicatorError, StaleEpochError, StoreError
from replicator.ids import NodeIdentity
from replicator.rpc_errors import KIND_KEY, abort, short_message

MAX_DEADLINE_S = 86_400.0

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
Handler = Callable[[Any, RequestT, "grpc.aio.ServicerContext[Any, Any]"], Awaitable[ResultT]]

log = logging.getLogger(__name__)


def handler(function: Handler[RequestT, ResultT]) -> Handler[RequestT, ResultT]:
    """Make a method of a servicer end its call with the error that it raises.

    Serves unary methods, and streaming ones that send with `context.write` and return None.
    """

    @functools.wraps(function)
    async def wrapped(self: Any, request: RequestT, context: grpc.aio.ServicerContext[Any, Any]) -> ResultT:
        try:
            return await function(self, request, context)
        except ReplicatorError as error:
            level = logging.INFO if isinstance(error, StoreError | StaleEpochError) else logging.DEBUG
            log.log(level, "%s is refused: %s", function.__name__, error, extra={"error": error.kind})
            await abort(context, error)
        except Exception as error:
            log.exception("%s failed", function.__name__)
            await abort(context, error)

    return wrapped


async def require_meant_for(context: grpc.aio.ServicerContext[Any, Any], identity: NodeIdentity) -> None:
    """Abort a call that names another process than this one, which was greeted at this address before (F45)."""
    for key, value in context.invocation_metadata() or ():
        if key == MEANT_FOR_KEY and value != str(identity):
            message = f"expected {value!r}, found {identity} at this address; say Hello again"
            trailing = ((KIND_KEY, PeerUnavailableError.__name__), (NOT_ME_KEY, "1"))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, short_message(message), trailing)


def deadline_s(milliseconds: int, default_s: float) -> float:
    """Seconds of a request's deadline field; 0 means the default, and a day is the most."""
    return min(milliseconds / 1000, MAX_DEADLINE_S) if milliseconds else default_s
