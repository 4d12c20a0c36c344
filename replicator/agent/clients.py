"""The trainer processes of this node: their event streams, and who of them is still alive.

Alive is who holds its lock file. A stream that ends says nothing by itself: the process may only have lost its
connection and come back (it keeps what it reserved), and one that stays open may belong to a forked child
of a process that is dead. So every known client's lock is looked at again and again, and only a free lock
gives up what the client had reserved.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable

from replicator.errors import AgentUnavailableError, InvalidIdError, ReplicatorError, StoreError
from replicator.v1 import local_pb2

# Each has a stream open; the server takes twice as many calls at the same time (rpc_options.MAX_CONCURRENT_RPCS).
MAX_CLIENTS = 512
# Twice what a client may wait for (client.outstanding.MAX_OBJECTS): all its outcomes at once are no overflow.
MAX_QUEUED_EVENTS = 131_072
POLL_S = 0.25
_CLIENT_ID = re.compile(r"[0-9a-f]{32}")

log = logging.getLogger(__name__)


def validate_client_id(client_id: str) -> str:
    """Return the id of a trainer process (32 hex digits of a uuid4), or raise InvalidIdError."""
    if not _CLIENT_ID.fullmatch(client_id):
        raise InvalidIdError(f"expected a client id of 32 lower-case hex digits (a uuid4), found {client_id[:80]!r}")
    return client_id


class ClientStream:
    """The events for one attached client, at most `limit` of them waiting. Used in the event loop only."""

    def __init__(self, client_id: str, pid: int, limit: int = MAX_QUEUED_EVENTS) -> None:
        self.client_id = client_id
        self.pid = pid
        self._limit = limit
        self._events: deque[local_pb2.AttachEvent] = deque()
        self._changed = asyncio.Event()
        self._end: ReplicatorError | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None

    def put(self, event: local_pb2.AttachEvent) -> bool:
        """Queue an event. False when the stream is over, which a full queue makes it.

        Events are never dropped one by one: a client that lost its stream attaches again and asks again for
        what it still waits for, while one that missed a single event would wait for ever.
        """
        if self.ended:
            return False
        if len(self._events) >= self._limit:
            self.end(
                AgentUnavailableError(
                    f"client {self.client_id} (pid {self.pid}) did not read its events: {self._limit} of them waited; "
                    "the stream was closed, attach again and repeat Replicate and Commit for what is outstanding"
                )
            )
            return False
        self._events.append(event)
        self._changed.set()
        return True

    def end(self, error: ReplicatorError) -> None:
        """End the stream: `next` raises `error`, and events not yet read are gone."""
        if self._end is None:
            self._end = error
            self._events.clear()
            self._changed.set()

    async def next(self) -> local_pb2.AttachEvent:
        """Wait for the next event.

        Raises:
            ReplicatorError: the stream was ended, with the reason.
        """
        while True:
            if self._end is not None:
                raise self._end
            if self._events:
                return self._events.popleft()
            self._changed.clear()
            await self._changed.wait()


class ClientRegistry:
    """All trainer processes that this agent knows. Used in the event loop only.

    Args:
        is_alive: whether the client of an id holds its lock file.
        on_gone: called once for each client that is dead, to give up what it had reserved.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        is_alive: Callable[[str], bool],
        on_gone: Callable[[str], None],
        *,
        queued_events: int = MAX_QUEUED_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_alive = is_alive
        self._on_gone = on_gone
        self._queued_events = queued_events
        self._clock = clock
        self._known: set[str] = set()
        self._failing: set[str] = set()
        self._streams: dict[str, ClientStream] = {}
        self._idle_since: float | None = clock()

    @property
    def attached(self) -> int:
        """Clients with an open stream."""
        return len(self._streams)

    @property
    def known(self) -> int:
        """Clients that were alive when last looked at, attached or not."""
        return len(self._known)

    def is_known(self, client_id: str) -> bool:
        """Whether the client counts as alive: seen, and not yet found dead."""
        return client_id in self._known

    def is_attached(self, client_id: str) -> bool:
        """Whether the client has a stream, and so is not a hung old incarnation. What is no trainer always is.

        May be called in any thread.
        """
        return client_id in self._streams or not _CLIENT_ID.fullmatch(client_id)

    def idle_s(self) -> float:
        """Seconds for which no living client has been known; 0.0 while there is one."""
        return 0.0 if self._idle_since is None else self._clock() - self._idle_since

    def track(self, client_ids: Iterable[str]) -> None:
        """Watch clients that were there before this agent started. Those that are dead are given up at once.

        Ids that are no trainer's (earlier agents have lock files too) are passed over.
        """
        for client_id in filter(_CLIENT_ID.fullmatch, client_ids):
            if self._is_alive(client_id):
                self._remember(client_id)
            else:
                self._on_gone(client_id)

    def require(self, client_id: str) -> None:
        """Let a request of this client through when its process is alive, attached or not.

        Raises:
            InvalidIdError: not an id of a client.
            StoreError: its lock file is free, so nothing could be reserved on its behalf.
        """
        validate_client_id(client_id)
        if client_id in self._known:
            return
        if not self._is_alive(client_id):
            raise StoreError(
                f"expected client {client_id} to hold its lock file clients/{client_id} in the store's root, found it "
                "free: the process is dead or uses another root; take the lock, then attach"
            )
        self._remember(client_id)

    def attach(self, client_id: str, pid: int) -> ClientStream:
        """Open the stream of a client, in place of an older one of it. Raises like `require`."""
        self.require(client_id)
        stream = ClientStream(client_id, pid, self._queued_events)
        older = self._streams.pop(client_id, None)
        if older is not None:
            older.end(AgentUnavailableError(f"client {client_id} attached again; this older stream is closed"))
        self._streams[client_id] = stream
        log.info("trainer attached", extra={"client": client_id, "pid": pid})
        return stream

    def detach(self, stream: ClientStream) -> None:
        """The stream is closed. Its client keeps what it reserved as long as it holds its lock."""
        stream.end(AgentUnavailableError(f"the stream of client {stream.client_id} is closed"))
        if self._streams.get(stream.client_id) is stream:
            del self._streams[stream.client_id]
            log.info("trainer detached", extra={"client": stream.client_id, "pid": stream.pid})
        self._look_at(stream.client_id)

    def send(self, client_id: str, event: local_pb2.AttachEvent) -> bool:
        """Queue an event for a client; False when it has no stream, and it will ask again when it attaches."""
        stream = self._streams.get(client_id)
        return stream is not None and stream.put(event)

    def poll(self) -> None:
        """Look at the lock of every known client once, and give up those that are dead."""
        for client_id in list(self._known):
            self._look_at(client_id)

    async def watch(self, interval_s: float = POLL_S) -> None:
        """Poll for ever."""
        while True:
            await asyncio.sleep(interval_s)
            self.poll()

    def close(self) -> None:
        """End all streams because the agent stops. Reservations stay for the agent that comes next."""
        for stream in list(self._streams.values()):
            stream.end(AgentUnavailableError("the agent of this node is stopping; attach again when it is back"))

    def _remember(self, client_id: str) -> None:
        if len(self._known) >= MAX_CLIENTS:
            raise StoreError(f"expected at most {MAX_CLIENTS} trainer processes on one node, found one more")
        self._known.add(client_id)
        self._idle_since = None

    def _look_at(self, client_id: str) -> None:
        if client_id not in self._known:
            return
        try:
            if self._is_alive(client_id):
                return
            self._on_gone(client_id)
        except Exception:
            # The others are looked after all the same, and this one is tried again at the next poll.
            if client_id not in self._failing:
                log.exception("cannot give up what a trainer had reserved", extra={"client": client_id})
                self._failing.add(client_id)
            return
        self._known.discard(client_id)
        self._failing.discard(client_id)
        stream = self._streams.pop(client_id, None)
        if stream is not None:
            stream.end(StoreError(f"client {client_id} (pid {stream.pid}) is dead: its lock file is free"))
        log.info("trainer gone, its reservations are given up", extra={"client": client_id})
        if not self._known:
            self._idle_since = self._clock()
