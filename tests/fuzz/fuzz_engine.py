"""Seeded mutation of valid inputs: what a parser may do with strange bytes is refuse them, with a typed error.

An input fails when the target raises anything else, when a property that it asserts does not hold, or when it
takes more than MAX_CPU_S of processor time, raises the process's memory by more than MAX_GROWTH_BYTES, or is refused
with a message of more than MAX_MESSAGE_CHARS.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

MAX_INPUT_BYTES = 64 << 10
MAX_CPU_S = 5.0
MAX_GROWTH_BYTES = 64 << 20
MAX_MESSAGE_CHARS = 4000
_MAX_POOL = 400
_MAX_MUTATIONS = 6
_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """Something that reads bytes which others wrote.

    Attributes:
        corpus: valid inputs; mutations start from them.
        read: parses one input, and asserts what must hold of the result.
        refusals: the exceptions with which it may refuse an input.
        tokens: pieces that mean something to it, for insertion.
        seal: gives a mutated input its checksums again, so that what lies behind their verification is reached too.
        cost: how many inputs of an ordinary target one of this takes as long as.
    """

    name: str
    corpus: Sequence[bytes]
    read: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]
    tokens: Sequence[bytes] = ()
    seal: Callable[[bytes], bytes] | None = None
    cost: int = 1


class TooSlowError(BaseException):
    """One input took more than MAX_CPU_S. No `except Exception` of the code under test takes it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a target did instead of taking an input as it should; `data` is that input, made shorter where it could."""

    target: str
    seed: int
    number: int
    data: bytes
    error: BaseException

    def __str__(self) -> str:
        shown = self.data if len(self.data) <= 4096 else self.data[:4096] + b"..."
        return (
            f"{self.target}: {type(self.error).__name__}: {str(self.error)[:500]}\n"
            f"  input {self.number} of --seed {self.seed}, made shorter, {len(self.data)} bytes:\n  {shown!r}"
        )


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """The corpus, and then mutations without end. What `keep` is sent for is mutated further."""
    chance = random.Random(f"{target.name} {seed}")
    pool = [*target.corpus]
    yield from target.corpus
    while True:
        data = mutate(chance.choice(pool), pool, target.tokens, chance)
        if target.seal is not None and chance.random() < 0.8:
            data = target.seal(data)
        is_new = yield data
        if is_new:
            if len(pool) >= _MAX_POOL:
                del pool[chance.randrange(len(target.corpus), len(pool))]
            pool.append(data)


def mutate(data: bytes, pool: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> bytes:
    """`data` after a few random changes, of at most MAX_INPUT_BYTES."""
    result = bytearray(data)
    for _ in range(chance.randint(1, _MAX_MUTATIONS)):
        at, length = chance.randint(0, len(result)), chance.choice((1, 1, 2, 4, 8, chance.randint(1, 64)))
        match chance.randrange(8):
            case 0 if result:
                result[at - 1] ^= 1 << chance.randrange(8)
            case 1 if result:
                result[at - 1] = chance.randrange(256)
            case 2:
                size = chance.choice((1, 2, 4, 8))
                number = chance.choice(_NUMBERS) + chance.choice((-1, 0, 0, 1))
                order = chance.choice(("little", "little", "big"))
                result[at : at + size] = (number % 256**size).to_bytes(size, order)  # type: ignore[arg-type]
            case 3:
                del result[at : at + length]
            case 4:
                result[at:at] = result[at : at + length] * chance.choice((1, 1, 2, 100, 5000))
            case 5:
                result[at:at] = chance.randbytes(length)
            case 6 if tokens:
                replaced = chance.choice((0, length))
                result[at : at + replaced] = chance.choice(tokens)
            case 7:
                other = chance.choice(pool)
                begin = chance.randint(0, len(other))
                result[at:] = other[begin:]
    return bytes(result[:MAX_INPUT_BYTES])


def fuzz(
    target: Target, seed: int, *, rounds: int | None = None, seconds: float | None = None
) -> tuple[int, Found | None]:
    """Read so many inputs, or for so long. Returns how many were read, and the first that was not taken well."""
    end = None if seconds is None else time.monotonic() + seconds
    number = 0
    # What an input led to, told by where it was refused: a place that is new makes the input worth mutating.
    seen: set[object] = set()
    stream = inputs(target, seed)
    data = next(stream)
    with _bounded_time():
        while True:
            outcome = _read(target, data)
            if isinstance(outcome, BaseException):
                return number, Found(target.name, seed, number, _shrink(target, data, outcome), outcome)
            number += 1
            if (rounds is not None and number >= rounds) or (end is not None and time.monotonic() >= end):
                return number, None
            is_new = outcome not in seen
            seen.add(outcome)
            data = stream.send(is_new) if number > len(target.corpus) else next(stream)  # type: ignore[attr-defined]


def _read(target: Target, data: bytes) -> object:
    """The error of an input that was not taken well; else anything that tells apart where it led to."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
    try:
        target.read(data)
        outcome: object = None
    except target.refusals as refusal:
        outcome = _place(refusal)
        # A message is shown, logged and sent on: whatever was read, it is text, and short.
        try:
            if len(str(refusal)) > MAX_MESSAGE_CHARS:
                return AssertionError(f"a message of {len(str(refusal))} characters: {str(refusal)[:200]}")
        except Exception as error:
            return error
    except (Exception, TooSlowError) as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if growth > MAX_GROWTH_BYTES:
        return MemoryError(f"{growth >> 20} MiB of memory for {len(data)} bytes")
    return outcome


def _shrink(target: Target, data: bytes, error: BaseException) -> bytes:
    """A shorter input that ends in the same kind of error, as far as a few hundred attempts bring it."""
    if isinstance(error, TooSlowError | MemoryError):
        return data
    size, attempts = len(data) // 2, 0
    while size and attempts < 300:
        for at in range(0, len(data), size):
            attempts += 1
            shorter = data[:at] + data[at + size :]
            if type(_read(target, shorter)) is type(error):
                data = shorter
                break
        else:
            size //= 2
    return data


def _place(error: BaseException) -> object:
    where, trace = 0, error.__traceback__
    while trace is not None:
        where, trace = trace.tb_lineno, trace.tb_next
    return type(error), where, len(str(error)) // 16


@contextlib.contextmanager
def _bounded_time() -> Iterator[None]:
    """SIGVTALRM ends an input that takes too long; it counts this process's own time, not a busy machine's."""

    def too_slow(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"more than {MAX_CPU_S} s of processor time")

    # The peak that earlier work of this process left behind would hide what an input takes.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = signal.signal(signal.SIGVTALRM, too_slow)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, before)
