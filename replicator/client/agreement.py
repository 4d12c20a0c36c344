"""Agreement among the ranks of a job: all get the same answer, or all get the same error, within a deadline.

Ranks talk through the key-value store that torch.distributed was initialised with. No collective is used: the
store works whatever the backend and the device are, from any thread, and its waits can be bounded and say which
rank did not come.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from replicator.errors import DeadlineExceededError, ReplicatorError, from_wire, to_wire

_PIECE_BYTES = 1 << 20  # a value of the store may have 8 MiB
_SHOWN_RANKS = 8
_GRACE_S = 2.0
_MEETING_POLL_S = 0.2


class Ranks(Protocol):
    """The ranks that agree. `rank` 0 decides."""

    rank: int
    world_size: int

    def agree(
        self,
        what: str,
        local: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], bytes],
        deadline_s: float,
    ) -> bytes:
        """Run `local` on every rank and `decide`, on rank 0, over all their results; its result on every rank.

        All ranks must make the same calls in the same order.

        Raises:
            ReplicatorError: an error of any rank, of the same class and text on all of them.
            DeadlineExceededError: ranks (named) that did not come within `deadline_s`.
        """
        ...

    def apart(self, purpose: str) -> Ranks:
        """The same ranks for one purpose alone: its calls have an order of their own, from whichever thread.

        All ranks must use the same purposes, and ask once for each.
        """
        ...

    def post(self, key: str, value: bytes) -> None:
        """Leave a value for the other ranks; it replaces an older one of this key."""
        ...

    def read(self, key: str, deadline_s: float) -> bytes:
        """The value of a key, DeadlineExceededError when nobody posted it in time."""
        ...

    def first(self, key: str, value: bytes) -> bytes:
        """The value of the rank that called this first with the key, the same on all ranks. ASCII, at most 1 MiB."""
        ...

    def append(self, key: str, value: bytes) -> None:
        """Add a value to a list that all ranks share."""
        ...

    def collect(self, key: str, deadline_s: float) -> list[bytes]:
        """All that ranks, this one too, have appended until now; the list is empty afterwards."""
        ...

    def forget(self, key: str) -> None:
        """Nobody reads what was posted under this key any more."""
        ...


class SingleRank:
    """A process that is alone."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._lists: dict[str, list[bytes]] = {}

    def agree(
        self,
        what: str,
        local: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], bytes],
        deadline_s: float,
    ) -> bytes:
        return decide([local()])

    def apart(self, purpose: str) -> SingleRank:
        return self

    def post(self, key: str, value: bytes) -> None:
        pass

    def read(self, key: str, deadline_s: float) -> bytes:
        raise DeadlineExceededError.of(key, "another rank, where there is none", 0.0)

    def first(self, key: str, value: bytes) -> bytes:
        return value

    def append(self, key: str, value: bytes) -> None:
        self._lists.setdefault(key, []).append(value)

    def collect(self, key: str, deadline_s: float) -> list[bytes]:
        return self._lists.pop(key, [])

    def forget(self, key: str) -> None:
        pass


class StoreRanks:
    """Ranks that share a key-value store with set, get, wait, check and delete_key (torch.distributed.Store).

    When that store is gone, as it is when rank 0 has ended, every call raises ReplicatorError that says so.

    Args:
        store: every rank has its own connection to the same store.
        name: ranks that agree use the same name, and nobody else does. It must be new: the store may outlive an
            incarnation of the job, and what that left in it would be taken for an answer. See `meet`.
    """

    def __init__(self, store: Any, rank: int, world_size: int, name: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._name = name
        self._round = 0

    @classmethod
    def meet(cls, store: Any, rank: int, world_size: int, place: str, deadline_s: float) -> StoreRanks:
        """Ranks under a name that is new. All of them meet at the same `place`, where earlier ones may have met too.

        torchrun keeps its store over an elastic restart. So each rank says a fresh word, and believes only what
        answers that word.

        Raises:
            DeadlineExceededError: ranks (named) that did not come; on the other ranks at their next `agree`.
        """
        if rank != 0:
            word = uuid.uuid4().hex
            here = cls(store, rank, world_size, place)
            here._put(f"{place}/word/{rank}", word.encode())
            awaited = f"{place}/answer/{rank}/{word}"
            name = here._take(awaited, 1.5 * deadline_s + _GRACE_S, time.monotonic(), "a common start").decode()
            here._put(f"{name}/here/{rank}", b"+")
            return cls(store, rank, world_size, name)
        ranks = cls(store, rank, world_size, f"{place}/{uuid.uuid4().hex}")
        try:
            ranks._welcome(place, deadline_s)
        except ReplicatorError as error:
            ranks.agree_on_error(error)
            raise
        return ranks

    def _welcome(self, place: str, deadline_s: float) -> None:
        """Rank 0: answer every rank's word until all have come. A word may be old at first, and then is replaced."""
        end = time.monotonic() + deadline_s
        answered: dict[int, bytes] = {}
        missing = list(range(1, self.world_size))
        while missing:
            for rank in missing:
                if self._has([f"{place}/word/{rank}"]):
                    word = self._get(f"{place}/word/{rank}")
                    if answered.get(rank) != word:
                        self._put(f"{place}/answer/{rank}/{word.decode()}", self._name.encode())
                        answered[rank] = word
            self._wait([f"{self._name}/here/{rank}" for rank in missing], _MEETING_POLL_S)
            missing = [rank for rank in missing if not self._has([f"{self._name}/here/{rank}"])]
            if missing and time.monotonic() >= end:
                names = _listed([str(rank) for rank in missing])
                raise DeadlineExceededError.of("a common start", f"rank {names} of {self.world_size}", deadline_s)
        for rank, word in answered.items():
            self._delete(f"{place}/answer/{rank}/{word.decode()}")
            self._delete(f"{self._name}/here/{rank}")

    def agree_on_error(self, error: ReplicatorError) -> None:
        """Rank 0: let the others' next `agree` raise this."""
        self._put(f"{self._name}/{self._round + 1}/result", b"-" + json.dumps(to_wire(error)).encode())

    def agree(
        self,
        what: str,
        local: Callable[[], bytes],
        decide: Callable[[Sequence[bytes]], bytes],
        deadline_s: float,
    ) -> bytes:
        self._round += 1
        key = f"{self._name}/{self._round}"
        started = time.monotonic()
        mine = _try(local)
        if self.rank != 0:
            self._put(f"{key}/{self.rank}", mine, what)
            # Rank 0 waits for the slowest rank, and says so, before this rank gives up on rank 0.
            return _unwrap(self._take(f"{key}/result", 1.5 * deadline_s + _GRACE_S, started, what))
        result = _try(lambda: decide(self._gather(key, mine, deadline_s, started, what)))
        self._put(f"{key}/result", result, what)
        self._forget(self._round - 1)
        return _unwrap(result)

    def apart(self, purpose: str) -> StoreRanks:
        # A connection serves one call at a time: a wait there would hold up everybody else who uses it.
        with _reaching(f"a connection for {purpose}"):
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
        return StoreRanks(store, self.rank, self.world_size, f"{self._name}/{purpose}")

    def post(self, key: str, value: bytes) -> None:
        self._put(f"{self._name}/{key}", value, key)

    def read(self, key: str, deadline_s: float) -> bytes:
        return self._take(f"{self._name}/{key}", deadline_s, time.monotonic(), key)

    def first(self, key: str, value: bytes) -> bytes:
        with _reaching(key):
            return bytes(self._store.compare_set(f"{self._name}/{key}", "", value.decode("ascii")))

    def append(self, key: str, value: bytes) -> None:
        with _reaching(f"the length of {key}"):
            index = self._store.add(f"{self._name}/{key}/length", 1)
        self._put(f"{self._name}/{key}/{index}", value, f"room in {key}")

    def collect(self, key: str, deadline_s: float) -> list[bytes]:
        with _reaching(f"the length of {key}"):
            length = self._store.add(f"{self._name}/{key}/length", 0)
        started = time.monotonic()
        values = []
        for index in range(1, length + 1):
            item = f"{self._name}/{key}/{index}"
            if not self._wait([item], deadline_s - (time.monotonic() - started)):
                raise DeadlineExceededError.of(f"item {index} of {key}", "the rank that announced it", deadline_s)
            values.append(self._get(item))
            self._delete(item)
        with _reaching(f"the end of {key}"):
            self._store.delete_key(f"{self._name}/{key}/length")
        return values

    def forget(self, key: str) -> None:
        self._delete(f"{self._name}/{key}")

    def _gather(self, key: str, mine: bytes, deadline_s: float, started: float, what: str) -> list[bytes]:
        keys = [f"{key}/{rank}" for rank in range(1, self.world_size)]
        if not self._wait(keys, deadline_s - (time.monotonic() - started), what):
            missing = [str(rank) for rank, one in enumerate(keys, start=1) if not self._has([one], what)]
            raise DeadlineExceededError.of(what, f"rank {_listed(missing)} of {self.world_size}", deadline_s)
        gathered = [mine, *(self._get(one, what) for one in keys)]
        _raise_first(gathered)
        return [_unwrap(one) for one in gathered]

    def _take(self, key: str, deadline_s: float, started: float, what: str) -> bytes:
        if not self._wait([key], deadline_s - (time.monotonic() - started), what):
            raise DeadlineExceededError.of(what, f"rank 0 of {self.world_size}", deadline_s)
        return self._get(key, what)

    def _wait(self, keys: list[str], seconds: float, what: str = "") -> bool:
        if not keys:
            return True
        try:
            self._store.wait(keys, timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:  # what the store raises when the time is over, and when it is gone
            return self._has(keys, what)
        return True

    def _has(self, keys: list[str], what: str = "") -> bool:
        with _reaching(what or keys[0]):
            return bool(self._store.check(keys))

    def _put(self, key: str, value: bytes, what: str = "") -> None:
        pieces = [value[i : i + _PIECE_BYTES] for i in range(0, max(len(value), 1), _PIECE_BYTES)]
        with _reaching(what or f"room for {key}"):
            for index, piece in enumerate(pieces[1:], start=1):
                self._store.set(f"{key}/{index}", piece)
            # The first piece makes the value visible, so it goes last.
            self._store.set(key, json.dumps(len(pieces)).encode() + b"\n" + pieces[0])

    def _get(self, key: str, what: str = "") -> bytes:
        with _reaching(what or key):
            head, _, first = bytes(self._store.get(key)).partition(b"\n")
            rest = [bytes(self._store.get(f"{key}/{index}")) for index in range(1, int(head))]
        return b"".join([first, *rest])

    def _forget(self, number: int) -> None:
        """Every rank that came to this round has left the one before, so its keys are no longer read."""
        if number < 1:
            return
        for name in ("result", *(str(rank) for rank in range(1, self.world_size))):
            self._delete(f"{self._name}/{number}/{name}")

    def _delete(self, key: str) -> None:
        try:
            if not self._store.check([key]):
                return
            head = bytes(self._store.get(key)).partition(b"\n")[0]
            for index in range(1, int(head)):
                self._store.delete_key(f"{key}/{index}")
            self._store.delete_key(key)
        except RuntimeError:
            return  # only room is lost


@contextmanager
def _reaching(awaited: str) -> Iterator[None]:
    """Errors of the store in the block say what was awaited, and from whom."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ReplicatorError(
            f"waited for {awaited} from the store of torch.distributed, which rank 0 holds, and it is gone or does not "
            f"answer: {reason}; see why rank 0 ended, and start all ranks again"
        ) from None


def _try(function: Callable[[], bytes]) -> bytes:
    """The result, or the error, of a function as a value that can travel."""
    try:
        return b"+" + function()
    except Exception as error:
        return b"-" + json.dumps(to_wire(error)).encode()


def _unwrap(value: bytes) -> bytes:
    if value[:1] == b"+":
        return value[1:]
    kind, message = json.loads(value[1:])
    raise from_wire(kind, message)


def _raise_first(gathered: Sequence[bytes]) -> None:
    failed = [(rank, value) for rank, value in enumerate(gathered) if value[:1] != b"+"]
    if not failed:
        return
    rank, value = failed[0]
    kind, message = json.loads(value[1:])
    others = f" (and rank {_listed([str(rank) for rank, _ in failed[1:]])} failed too)" if failed[1:] else ""
    raise from_wire(kind, f"rank {rank}: {message}{others}")


def _listed(ranks: Sequence[str]) -> str:
    rest = len(ranks) - _SHOWN_RANKS
    return ", ".join(ranks[:_SHOWN_RANKS]) + (f" and {rest} more" if rest > 0 else "")


def meet_ranks(process_group: Any, deadline_s: float) -> Ranks:
    """The ranks of a torch.distributed process group (None: all), or SingleRank where it is not initialised.

    Every rank must call it. Does not import torch: a process that did not cannot have initialised it.

    Raises:
        DeadlineExceededError: ranks (named) that did not come.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if not is_distributed():
        return SingleRank()
    group = process_group if process_group is not None else dist.group.WORLD
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return SingleRank()
    return StoreRanks.meet(_store(), rank, world_size, f"replicator/{group.group_name}", deadline_s)


def known_ranks(name: str) -> Ranks:
    """All ranks of torch.distributed under a name that they have from somewhere else, and that is new."""
    dist: Any = sys.modules.get("torch.distributed")
    if not is_distributed() or dist.get_world_size() == 1:
        return SingleRank()
    return StoreRanks(_store(), dist.get_rank(), dist.get_world_size(), f"replicator/{name}")


def is_distributed() -> bool:
    """Whether torch.distributed is initialised in this process."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _store() -> Any:
    return sys.modules["torch.distributed"].distributed_c10d._get_default_store()
