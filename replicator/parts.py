"""Messages that grow with the number of objects, and may be larger than one gRPC message (4 MiB, F28).

They travel as a stream of parts of about 1 MiB, each a message of the same type, merged by whoever receives them
(protobuf's MergeFrom appends to lists). A message that fits one part is that part, so a peer that knows no parts
understands it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from replicator.errors import TooLargeError

MessageT = TypeVar("MessageT", bound=Message)

PART_BYTES = 1 << 20
# Ten times what a core takes for one that lists objects.
_SECONDS_PER_PART = 4.0
# In front of each item of a list: its field's number and its length.
_ITEM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Parted:
    """How messages of one kind are split.

    `what` is its name in an error; `lists` are the dotted paths of its lists; more than `max_bytes` in all are refused.
    """

    what: str
    lists: tuple[str, ...]
    max_bytes: int


COMMIT = Parted("the list of a checkpoint's objects", ("manifest.entries",), 256 << 20)
PLAN = Parted("a recovery plan", ("sources", "rejected", "nodes", "unanswered"), 1 << 30)

REQUESTS = {"LocalService/Commit": COMMIT}
REPLIES = {"LocalService/Lookup": PLAN, "AdminService/Recover": PLAN}


def allowance_s(size_bytes: int) -> float:
    """What a call with so large a message may take beyond its deadline: it is decoded, checked and stored first."""
    return size_bytes / PART_BYTES * _SECONDS_PER_PART


def split(whole: MessageT, kind: Parted) -> Iterator[MessageT]:
    """The parts of a message, at least one. `whole` is left as it is.

    Raises:
        TooLargeError: it is larger than its kind may be; before the first part.
    """
    size_bytes = whole.ByteSize()
    if size_bytes > kind.max_bytes:
        raise _too_large(kind, size_bytes)
    if size_bytes <= PART_BYTES:
        yield whole
        return
    part = type(whole)()
    part.CopyFrom(whole)
    for path in kind.lists:
        owner, name = _owner(part, path)
        owner.ClearField(name)
    size = part.ByteSize()
    for path in kind.lists:
        owner, name = _owner(whole, path)
        for item in getattr(owner, name):
            more = item.ByteSize() + _ITEM_BYTES
            if size and size + more > PART_BYTES:
                yield part
                part, size = type(whole)(), 0
            into, name = _owner(part, path)
            getattr(into, name).append(item)
            size += more
    yield part


def join(parts: Iterable[MessageT], whole: MessageT, kind: Parted) -> MessageT:
    """Merge parts into `whole`, an empty message, and return it.

    Raises:
        TooLargeError: they are larger than their kind may be.
    """
    size = 0
    for part in parts:
        size = _add(part, whole, kind, size)
    return whole


async def join_async(parts: AsyncIterable[MessageT], whole: MessageT, kind: Parted) -> MessageT:
    """`join` of parts as they come."""
    size = 0
    async for part in parts:
        size = _add(part, whole, kind, size)
    return whole


def _add(part: MessageT, whole: MessageT, kind: Parted, size: int) -> int:
    size += part.ByteSize()
    if size > kind.max_bytes:
        raise _too_large(kind, size)
    whole.MergeFrom(part)
    return size


def stub(channel: Any, path: str, request_type: type[Message], reply_type: type[MessageT]) -> Callable[..., MessageT]:
    """A blocking call of a method whose request and reply are one message each, which may travel in parts.

    Args:
        channel: a `grpc.Channel`.
        path: "<Service>/<Method>" of package replicator.v1.

    Returns:
        (request, timeout) -> reply. Raises grpc.RpcError, and TooLargeError.
    """
    given, taken = REQUESTS.get(path), REPLIES.get(path)

    def call(request: Message, timeout: float | None = None) -> MessageT:
        sent = [request] if given is None else list(split(request, given))
        # One message is sent as such: for several gRPC has a thread of its own.
        kind = f"{'unary' if len(sent) == 1 else 'stream'}_{'stream' if taken else 'unary'}"
        function: Any = getattr(channel, kind)(
            f"/replicator.v1.{path}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        replies: Any = function(sent[0] if len(sent) == 1 else iter(sent), timeout=timeout)
        if taken is None:
            reply: MessageT = replies
            return reply
        try:
            whole = reply_type()
            join(replies, whole, taken)
            return whole
        finally:
            replies.cancel()

    return call


def _owner(message: Any, path: str) -> tuple[Any, str]:
    """The message that has the list, and the list's name there."""
    *outer, name = path.split(".")
    for field in outer:
        message = getattr(message, field)
    return message, name


def _too_large(kind: Parted, size: int) -> TooLargeError:
    return TooLargeError(
        f"{kind.what} may have at most {kind.max_bytes} bytes, found {size} or more; save fewer and larger objects"
    )
