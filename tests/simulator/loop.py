"""An event loop whose time is a number, and processes that can die between two steps of it.

Nothing waits: when nobody has anything to do now, time jumps to the next timer. Work in threads is done in one piece at
a moment of its own choosing. Every choice comes from one random generator, so a seed is a run.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

MAX_THREAD_S = 0.004
# Steps of one run; a livelock ends here instead of never.
MAX_STEPS = 3_000_000


class DeadlockError(AssertionError):
    """Somebody waits for something that never comes, and has set no deadline."""


class Process:
    """One operating-system process: all steps that run in its context. Killed, none of them runs any more.

    What was suspended stays so until the end of the run, for no `finally` block runs in a process that is dead.
    """

    current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)

    def __init__(self, loop: VirtualLoop, name: str, node: Any = None) -> None:
        self.loop = loop
        self.name = name
        self.node = node
        self.alive = True
        self.on_killed: list[Callable[[], None]] = []
        self._context = contextvars.Context()
        self._context.run(self.current.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this process."""
        return self.loop.create_task(work, context=self._context.copy())

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run something at once as a step of this process."""
        return self._context.copy().run(function, *args)

    def kill(self) -> None:
        """The process ends, at whatever step it was."""
        if self.alive:
            self.alive = False
            for callback in self.on_killed:
                callback()

    def __repr__(self) -> str:
        return f"Process({self.name})"


class SimTask(asyncio.Task[T]):
    """Hashes by a number, given when it is first asked for: sets of tasks have the same order in every run."""

    numbers = itertools.count()
    number: int | None = None

    def __hash__(self) -> int:
        if self.number is None:
            self.number = next(SimTask.numbers)
        return self.number


class SimFuture(asyncio.Future[T]):
    """See SimTask."""

    number: int | None = None

    def __hash__(self) -> int:
        if self.number is None:
            self.number = next(SimTask.numbers)
        return self.number


class Handle:
    """A step to be made. Stands for `asyncio.Handle` and `asyncio.TimerHandle`, of which a run makes many thousands."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs until a coroutine ends.

    Args:
        rng: decides how long threads take.

    Attributes:
        on_moment: called when everything of one moment is done, before time goes on, with the nodes that did something.
        on_failure: called with an error that nobody caught.
        steps: how many callbacks ran.
    """

    def __init__(self, rng: random.Random) -> None:
        self.on_moment: Callable[[list[Any]], None] = lambda nodes: None
        self.on_failure: Callable[[str, BaseException | None], None] = lambda message, error: None
        self.steps = 0
        self._rng = rng
        self._now = 1000.0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[Any]] = []
        self._frozen: list[Handle] = []
        self._compact_at = 4096
        SimTask.numbers = itertools.count()

    # -- what asyncio asks for

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context)
        heapq.heappush(self._timers, (self._now + max(delay, 0.0), next(self._numbers), handle))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = SimTask(coro, loop=self, name=name, context=context)  # type: ignore[arg-type]
        self._tasks.append(task)
        if len(self._tasks) > self._compact_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._compact_at = 2 * len(self._tasks) + 4096
        return task

    def run_in_executor(self, executor: Any, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Everything that the function does happens at one moment, a little later; its outcome is known later still."""
        future: asyncio.Future[T] = self.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def work() -> None:
            # The queue of a thread pool forgets what was cancelled, unless a thread has taken it up already.
            if future.cancelled() and self._rng.random() < 0.5:
                return
            result, error = None, None
            try:
                result = function(*args)
            except Exception as caught:
                error = caught
            self.call_later(self._rng.random() * MAX_THREAD_S / 4, finish, result, error)

        self.call_later(self._rng.random() * MAX_THREAD_S, work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.on_failure(str(context.get("message")), context.get("exception"))

    async def shutdown_asyncgens(self) -> None:
        pass

    # -- running

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run until `work` ends. Raises what it raises, and DeadlockError when nothing can ever happen again."""
        asyncio._set_running_loop(self)
        try:
            main = self.create_task(work)
            ready, current = self._ready, Process.current
            active: dict[Any, None] = {}
            while not main.done():
                if not ready:
                    self.on_moment(list(active))
                    active.clear()
                    if not ready:
                        self._go_on()
                        continue
                handle = ready.popleft()
                if handle.is_cancelled:
                    continue
                process = handle.context.get(current)
                if process is not None:
                    if not process.alive:
                        self._frozen.append(handle)
                        continue
                    active[process.node] = None
                self.steps += 1
                if self.steps > MAX_STEPS:
                    raise DeadlockError(f"no end after {MAX_STEPS} steps, at {self._now:.3f} s")
                try:
                    handle.context.run(handle.callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.on_failure(f"a step failed: {handle.callback}", error)
            return main.result()
        finally:
            asyncio._set_running_loop(None)

    def _go_on(self) -> None:
        """Time goes on to the next timer."""
        timers = self._timers
        while timers:
            when, _, handle = heapq.heappop(timers)
            if handle.is_cancelled:
                continue
            self._now = max(self._now, when)
            self._ready.append(handle)
            while timers and timers[0][0] <= self._now:
                self._ready.append(heapq.heappop(timers)[2])
            return
        raise DeadlockError(f"at {self._now:.3f} s nothing is under way, and somebody still waits")

    def discard(self) -> None:
        """Forget everything that is suspended. What its `finally` blocks do no longer matters to anybody."""
        asyncio._set_running_loop(self)
        try:
            for task in self._tasks:
                coroutine = task.get_coro()
                if not task.done() and coroutine is not None:
                    try:
                        coroutine.close()
                    except BaseException:
                        continue
            self._tasks.clear()
            self._timers.clear()
            self._ready.clear()
            self._frozen.clear()
        finally:
            asyncio._set_running_loop(None)
