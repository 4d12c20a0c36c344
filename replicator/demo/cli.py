"""`replicator-admin demo`: the options, and what surrounds a play of it: memory, signals, exit status."""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from replicator.admin.partial_dir import Terminated
from replicator.demo.options import DemoOptions
from replicator.demo.report import Report, Result
from replicator.errors import ConfigError, ReplicatorError, StoreRootError

SHM = Path("/dev/shm")
PREFIX = "replicator-demo-"
_NEEDED_BYTES = 768 << 20
_LOCK = "driver.lock"
_KEPT = "kept"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser."""
    defaults = DemoOptions()
    add = parser.add_argument
    add("--nodes", type=int, default=defaults.nodes, metavar="N", help="nodes of the job (default %(default)s)")
    add("--replicas", type=int, default=defaults.replicas, metavar="R", help="copies beside the owner's (%(default)s)")
    add("--lose", type=int, metavar="NODE", help="number of the node that is lost (default: drawn from the seed)")
    add("--lose-at-step", type=int, metavar="STEP", help="lose it after this step (default: drawn from the seed)")
    add("--steps", type=int, default=defaults.steps, metavar="N", help="steps to train (default %(default)s)")
    add("--save-every", type=int, default=defaults.save_every, metavar="N", help="save every N steps (%(default)s)")
    add("--seed", type=int, default=defaults.seed, metavar="N", help="of model, data and fate (default %(default)s)")
    add("--deadline-s", type=float, default=defaults.deadline_s, metavar="S", help="give up after (%(default)s)")
    add("--keep", action="store_true", help="leave stores, logs and final states where they are, and say where")
    if not any("--json" in action.option_strings for action in parser._actions):
        add("--json", action="store_true", help="the result as one JSON object on the last line")


def run(args: argparse.Namespace) -> int:
    """Play the demo.

    Returns:
        The exit status: 0 when everything is true, else 1.

    Raises:
        ConfigError: wrong options, or no PyTorch. StoreRootError: no room in /dev/shm.
        ReplicatorError: a process failed, or did not come in time; what it said last was printed.
        KeyboardInterrupt: Ctrl-C. Terminated: SIGTERM or SIGHUP. No process of the demo is left then either.
    """
    options = _options(args)
    report = Report()
    with _raised_signals(), _workspace(options.keep) as work:
        result = _play(options, work, report)
    if args.json:
        report.json(result)
    else:
        report.summary(result)
    return 0 if result.ok else 1


def _options(args: argparse.Namespace) -> DemoOptions:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the demo trains with PyTorch, which is not installed; pip install 'replicator[torch]'")
    return DemoOptions(
        nodes=args.nodes,
        replicas=args.replicas,
        lose=args.lose,
        lose_at_step=args.lose_at_step,
        steps=args.steps,
        save_every=args.save_every,
        seed=args.seed,
        keep=args.keep,
        deadline_s=args.deadline_s,
    )


def _play(options: DemoOptions, work: Path, report: Report) -> Result:
    # Imported late: wrong options are told at once, without loading gRPC.
    from replicator.demo.scenario import Scenario

    scenario = Scenario(options, work, report)
    try:
        result = scenario.play()
    except ReplicatorError:
        report.logs(scenario.logs)
        raise
    finally:
        with _held_signals():
            scenario.close()
    if options.keep:
        result.kept = str(work)
        report.say("demo", f"kept in {work}")
    return result


@contextmanager
def _workspace(keep: bool) -> Iterator[Path]:
    """A new directory on the machine's shared memory, removed at the end. Leftovers of killed demos go first."""
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        raise StoreRootError(f"the demo needs a writable tmpfs at {SHM}; mount one: mount -t tmpfs tmpfs {SHM}")
    for old in SHM.glob(PREFIX + "*"):
        _remove_abandoned(old)
    free = shutil.disk_usage(SHM).free
    if free < _NEEDED_BYTES:
        raise StoreRootError(
            f"the demo needs {_NEEDED_BYTES >> 20} MiB in {SHM}, found {free >> 20} MiB free; enlarge it "
            f"(mount -o remount,size=2G {SHM}; in a container: docker run --shm-size=2g)"
        )
    work = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM))
    with open(work / _LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield work
        finally:
            if keep:
                (work / _KEPT).touch()
            else:
                shutil.rmtree(work, ignore_errors=True)


def _remove_abandoned(work: Path) -> None:
    """Remove the directory of a demo whose driver is gone, unless it was to be kept."""
    try:
        with open(work / _LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (work / _KEPT).exists():
                shutil.rmtree(work, ignore_errors=True)
    except OSError:
        return


@contextmanager
def _raised_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does, so that nothing is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _held_signals() -> Iterator[None]:
    """A second Ctrl-C waits until the processes of this demo have been ended."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
