"""One run: everything that a seed decides, put together, driven to its end, and taken down again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicator.config import AgentConfig
from replicator.ids import ObjectVersion
from replicator.store import mapping

from .breaks import broken_on_purpose
from .faults import Faults
from .history import problems
from .job import SimJob
from .loop import Process, VirtualLoop
from .machine import simulated
from .network import Network
from .node import SCRUB_PASS_S, SimNode
from .oracle import Oracle

LOGGER = "replicator"
# Of a log record, in the trace.
_FACTS = ("job", "step", "object", "peer", "epoch", "reason")


class SimConfig(AgentConfig):
    """Nodes are asked less often whether they are alive, for most of a run would be nothing else."""

    @property
    def health_interval_s(self) -> float:
        return self.deadline_s


@dataclass(frozen=True)
class Shape:
    """How large a cluster is, and how it is configured."""

    nodes: int = 3
    jobs: int = 1
    replicas: int = 1
    lane: str = "auto"
    budget_bytes: int = 64 << 20
    keep_last: int = 2
    scrubs: bool = False
    racks: int = 0  # nodes are labelled in turn; 0: no labels

    @classmethod
    def of(cls, rng: random.Random) -> Shape:
        """Any; large ones are rare, for they take long."""
        return cls(
            nodes=rng.choices((3, 4, 5, 6, 8, 12, 16, 64), (600, 220, 90, 45, 30, 8, 5, 2))[0],
            jobs=1 + (rng.random() < 0.1),
            replicas=rng.choice((1, 1, 1, 2, 2, 0)),
            lane=rng.choice(("auto", "bulk", "grpc")),
            budget_bytes=rng.choice((64 << 20, 4 << 20, 1 << 20, 1 << 20)),
            keep_last=rng.choice((1, 2)),
            scrubs=rng.random() < 0.4,
            racks=rng.choice((0, 0, 2, 3)),
        )


class BrokenError(AssertionError):
    """What must always hold does not."""


@dataclass
class Result:
    """What one run was."""

    seed: int
    problem: str = ""
    steps: int = 0
    seconds: float = 0.0
    checked: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    restores: int = 0
    protected: int = 0
    trace: list[str] = field(default_factory=list)


class World:
    """See the module. `calm` moments are those in which nothing is wrong, injected or left over."""

    def __init__(
        self, seed: int, root: Path, tell: Callable[[str], None] | None = None, shape: Shape | None = None
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.loop = VirtualLoop(random.Random(self.rng.getrandbits(64)))
        self.faults: Counter[str] = Counter()
        self.network = Network(self.loop, random.Random(self.rng.getrandbits(64)), self.faults)
        self.oracle = Oracle(self)
        self.deadline_s = self.rng.choice((3.0, 6.0))
        self.flipped: set[tuple[str, ObjectVersion]] = set()
        self.lines: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=40)
        self._tell = tell
        self._disturbances = 0
        self._problem = ""
        self.nodes: list[SimNode] = []
        chosen = self.shape = shape or Shape.of(self.rng)
        self._make_nodes(root, chosen)
        self.jobs = [SimJob(self, f"job{number}", chosen.replicas) for number in range(chosen.jobs)]
        self.loop.on_moment = self._moment
        self.loop.on_failure = self._failure

    def _make_nodes(self, root: Path, shape: Shape) -> None:
        for number in range(shape.nodes):
            name = f"n{number}"
            config = SimConfig(
                root=str(root / name),
                node_id=name,
                advertise=name,
                budget_bytes=shape.budget_bytes,
                prefault_bytes=0,
                scrub_bytes_per_s=16 << 20 if shape.scrubs else 0,
                labels=(("rack", f"r{number % shape.racks}"),) if shape.racks else (),
                keep_last=shape.keep_last,
                lane=shape.lane,
                deadline_s=self.deadline_s,
                replicas=shape.replicas,
            )
            self.nodes.append(SimNode(self, name, config))
        self.trace("world", shape=shape)

    # -- what others tell

    def trace(self, what: str, **facts: Any) -> None:
        """One line of the event trace, which most runs never show."""
        line = (self.loop.time(), what, facts)
        self.lines.append(line)
        if self._tell is not None:
            self._tell(_told(*line))

    def broken(self, problem: str) -> None:
        """An invariant does not hold. The run ends at the end of this moment."""
        self.trace("BROKEN", problem=problem)
        self._problem = self._problem or problem

    def disturb(self, what: str, **facts: Any) -> None:
        """A fault is injected, or ends."""
        self._disturbances += 1
        self.trace(what, **facts)

    def calm_mark(self) -> int | None:
        """None while something is wrong; else a number that stays the same as long as nothing is."""
        if not self.network.is_quiet or any(node.present and (node.full or not node.is_up) for node in self.nodes):
            return None
        return self._disturbances

    # -- the run

    async def main(self) -> None:
        """From the first start to the last check."""
        for node in self.nodes:
            node.start()
        faults = Faults(self)
        storm = self.loop.create_task(faults.run())
        runs = [
            self.loop.create_task(job.run(self.rng.randrange(1, 4) if len(self.nodes) < 8 else 1)) for job in self.jobs
        ]
        async with asyncio.timeout(1200):
            await asyncio.gather(*runs)
        storm.cancel()
        await asyncio.gather(storm, return_exceptions=True)
        faults.end_all()
        self.trace("all faults end")
        await asyncio.sleep(2.0)
        async with asyncio.timeout(600):
            for job in self.jobs:
                await job.last()
        await asyncio.sleep(2 + self.deadline_s)
        if self.shape.scrubs:
            # So that whatever turned before is found, too.
            await asyncio.sleep(2 * SCRUB_PASS_S)
            await self._scrubbing_repairs(faults)
        self._check_nothing_is_left()
        self.oracle.audit()
        for job in self.jobs:
            self.oracle.checked["the history is one that the model allows"] += 1
            for problem in problems(job.history):
                self.broken(f"job {job.name}: {problem}")

    async def _scrubbing_repairs(self, faults: Faults) -> None:
        """With nothing else wrong, a bit turns in a copy that another node has too: it is found, and brought again."""
        for node, info in self.oracle.spare_copies():
            faults.flip(node, info)
            self.oracle.checked["a bit that turned is found and the copy brought again"] += 1
            for _ in range(int(3 * SCRUB_PASS_S + 4 * self.deadline_s)):
                await asyncio.sleep(1.0)
                if self.oracle.is_sound(node, info.object):
                    break
            else:
                self.broken(f"node {node.name} still has {info.object} with a bit that turned, or not at all")
            self.flipped.discard((node.name, info.object))

    def _check_nothing_is_left(self) -> None:
        for node in self.nodes:
            if node.agent is None or node.store is None or not node.is_up:
                continue
            self.oracle.checked["nothing stays reserved for the dead"] += 1
            usage = node.store.usage()
            if usage.reserved_bytes or node.store._in_flight:
                self.broken(f"node {node.name} has {usage.reserved_bytes} bytes reserved, and no client is alive")
            if node.agent.core.puller.running:
                self.broken(f"node {node.name} still has {node.agent.core.puller.running} objects on their way")

    def _moment(self, nodes: list[Any]) -> None:
        self.oracle.check_moment(nodes)
        if self._problem:
            raise BrokenError(self._problem)

    def _failure(self, message: str, error: BaseException | None) -> None:
        if error is not None:
            self.broken(f"{message}: {type(error).__name__}: {error}")


class _Watch(logging.Handler):
    """Product code logs an error with its trace only when it is one of its own."""

    def __init__(self, world: World, level: int) -> None:
        super().__init__(level)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno >= logging.ERROR and error is not None:
            self._world.broken(f"{record.getMessage()}: {type(error).__name__}: {error} ({_place(error)})")
        elif self._world._tell is not None:
            extra = {key: getattr(record, key) for key in _FACTS if hasattr(record, key)}
            process = Process.current.get()
            who = process.name if process is not None else "-"
            self._world.trace(f"    {who} ({record.name.rpartition('.')[2]}): {record.getMessage()}", **extra)


def _told(at: float, what: str, facts: dict[str, Any]) -> str:
    return f"{at - 1000:9.4f}  {what}" + "".join(f"  {key}={value}" for key, value in facts.items())


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


@contextlib.contextmanager
def _logging(world: World, verbose: bool) -> Iterator[None]:
    logger = logging.getLogger(LOGGER)
    before = logger.level, logger.propagate
    handler = _Watch(world, logging.INFO if verbose else logging.ERROR)
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        logger.setLevel(before[0])


_frozen = False


Story = Callable[[World], Coroutine[Any, Any, None]]


def run_seed(
    seed: int,
    break_what: str = "",
    tell: Callable[[str], None] | None = None,
    story: Story = World.main,
    shape: Shape | None = None,
    within: str = "/dev/shm",
) -> Result:
    """One run, and what came of it.

    Args:
        tell: gets every line of the trace.
        story: what happens; default: what the seed says.
        shape: of the cluster; default: what the seed says.
        within: the directory for those of the nodes.
    """
    global _frozen
    if not _frozen:
        # What was imported need not be looked at after every run.
        gc.collect()
        gc.freeze()
        _frozen = True
    root = Path(tempfile.mkdtemp(prefix="replicator-sim-", dir=within))
    descriptors = _descriptors()
    world = World(seed, root, tell, shape)
    result = Result(seed, faults=world.faults, checked=world.oracle.checked)
    gc.disable()
    try:
        with (
            simulated(random.Random(seed ^ 0x5EED), world.loop.time),
            _logging(world, tell is not None),
            broken_on_purpose(break_what),
        ):
            try:
                world.loop.run(story(world))
            except BrokenError as error:
                result.problem = str(error)
            except Exception as error:
                result.problem = f"{type(error).__name__}: {error} ({_place(error)})"
            result.problem = world._problem or result.problem
            result.steps = world.loop.steps
            result.seconds = world.loop.time() - 1000
            result.restores = world.oracle.restores
            result.protected = sum(one.protected for one in world.oracle.containers.values())
            result.trace = [_told(*line) for line in world.lines]
            _take_down(world, root)
    finally:
        gc.enable()
    del world
    # Mappings close their descriptors themselves, now and not in the middle of the next run; the rest is nobody's.
    gc.collect()
    for left in _descriptors() - descriptors:
        with contextlib.suppress(OSError):
            mapping.close(left)
    return result


def _descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def _take_down(world: World, root: Path) -> None:
    """What was suspended when the run ended is closed; whatever that says is of no interest."""
    logging.disable(logging.CRITICAL)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        for node in world.nodes:
            node.crash()
        world.loop.discard()
        for node in world.nodes:
            node.agent = None
            node.store = None
        gc.collect()
    finally:
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)
        shutil.rmtree(root, ignore_errors=True)
