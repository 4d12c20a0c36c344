"""The background process of one rank: it saves what was staged while the trainer goes on.

`Background` is the trainer's side, `main` the process. They share staging memory (`checkpoint.arena`) and a socket. The
processes of all ranks form a gloo process group of their own, whose store rank 0's trainer keeps. A process ends with
its trainer, and a trainer notices at once when its process has ended: each watches the other's pidfd.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

import replicator
from replicator.checkpoint.arena import Arena, ArenaReader, Staged, can_be_staged
from replicator.client.session import AGREEMENT_DEADLINES, Session
from replicator.config import split_address
from replicator.errors import (
    DeadlineExceededError,
    ReplicatorError,
    SaveFailedError,
    StaleEpochError,
    UnsupportedError,
    from_wire,
    to_wire,
)
from replicator.integrations._cosmos_save import DATALOADER, PURPOSE, IterationSaver, SaveOptions

logger = logging.getLogger("replicator.integrations")

_JOIN_S = 5.0
# Not `-m`: its messages are to be of the classes that the trainer knows.
_PROGRAM = f"from {__name__} import main; main()"


@dataclass(frozen=True, slots=True)
class SaveDone:
    """What the process says of a save. `succeeded`: it is as safe as `wait_for` wanted it."""

    iteration: int
    elapsed_time: float
    succeeded: bool
    error_kind: str = ""
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class Terminate:
    """The last message, both ways."""


@dataclass(frozen=True, slots=True)
class _Save:
    iteration: int
    staged: Staged


@dataclass(frozen=True, slots=True)
class _Setup:
    session: bytes
    options: SaveOptions
    group: Group | None
    module_path: tuple[str, ...]
    log_level: int


@dataclass(frozen=True, slots=True)
class Group:
    """Where the background processes meet: a store, and a name in it that is new."""

    host: str
    port: int
    name: str
    rank: int
    world_size: int


class Meeting:
    """Gives the background processes of all ranks a place to meet. All ranks make one together, and call it together.

    Raises:
        ReplicatorError: on all ranks.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._store: TCPStore | None = None

    def agree(self) -> Group | None:
        """For one start of the processes; None for a rank that is alone."""
        ranks = self._session.ranks_for(PURPOSE)
        if ranks.world_size == 1:
            return None
        host = split_address(self._session.node.grpc_address)[0]

        def serve() -> bytes:
            if ranks.rank != 0:
                return b""
            if self._store is None:
                self._store = TCPStore(host, 0, None, True, wait_for_workers=False)
            return f"{host} {self._store.port} {uuid.uuid4().hex}".encode()

        deadline_s = AGREEMENT_DEADLINES * self._session.deadline_s
        place = ranks.agree("where the background processes meet", serve, lambda answers: answers[0], deadline_s)
        host, port, name = place.decode().split()
        return Group(host, int(port), name, ranks.rank, ranks.world_size)


class Background:
    """The process, as its trainer sees it. Not thread-safe.

    Args:
        group: from `Meeting.agree`, the same call on all ranks.

    Attributes:
        pid: of the process.
        in_flight: the iteration that it saves, or None.
    """

    def __init__(self, session: Session, options: SaveOptions, group: Group | None) -> None:
        self.in_flight: int | None = None
        self._rank = session.ranks.rank
        self._arena = Arena()
        mine, theirs = socket.socketpair()
        with theirs:
            self._connection: Connection | None = Connection(mine.detach())
            package = str(Path(replicator.__file__).resolve().parent.parent)
            path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(self._arena.fd), str(os.getpid())],
                # It needs no device: a context there would take memory from the training.
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
                pass_fds=(theirs.fileno(), self._arena.fd),
                stdin=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        setup = _Setup(pickle.dumps(session), options, group, tuple(sys.path), logger.getEffectiveLevel())
        self._connection.send(setup)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._connection is not None and self._process.poll() is None

    def stage(self, states: Mapping[str, Any], dataloader: Any) -> Staged:
        """Copy states to where the process saves them from; complete when this returns. Nothing may be in flight.

        Raises:
            StoreFullError: there is no memory for it.
            UnsupportedError: a value that cannot go to another process; with its key.
        """
        assert self.in_flight is None
        try:
            return self._arena.stage({"states": states, "dataloader": dataloader})
        except Exception as error:
            keys = [key for key, state in [*states.items(), (DATALOADER, dataloader)] if not can_be_staged(state)]
            if not keys:
                raise
            raise UnsupportedError(
                f"key {', '.join(map(repr, keys))}: the background process cannot be given what is in it: "
                f"{type(error).__name__}: {error}"
            ) from error

    def submit(self, iteration: int, staged: Staged) -> None:
        """Have what was staged saved. That the process is gone is said by `result`."""
        self.in_flight = iteration
        try:
            assert self._connection is not None
            self._connection.send(_Save(iteration, staged))
        except OSError as error:
            logger.warning("the background process %d takes no save: %s", self.pid, error)

    def result(self, deadline_s: float) -> SaveDone | None:
        """Wait for the save in flight; None when there is none.

        Raises:
            SaveFailedError, StaleEpochError: it failed, or the process ended; with why.
            DeadlineExceededError: it is not done after `deadline_s`. The process is then killed.
        """
        if self.in_flight is None:
            return None
        iteration = self.in_flight
        what = f"the save of iteration {iteration} by the background process {self.pid} of rank {self._rank}"
        try:
            answer = self._receive(time.monotonic() + deadline_s, what, deadline_s)
        finally:
            self.in_flight = None
        if not isinstance(answer, SaveDone):
            raise SaveFailedError(f"{what} failed: the process ended without it")
        if not answer.succeeded:
            stale = StaleEpochError.__name__
            kind = stale if answer.error_kind == stale else SaveFailedError.__name__
            raise from_wire(kind, f"{what} failed: {answer.error_kind}: {answer.error_message}")
        return answer

    def close(self, deadline_s: float) -> None:
        """End the process, when it has finished what it does. After `deadline_s` it is killed. Idempotent."""
        if self._connection is None:
            return
        try:
            self._connection.send(Terminate())
            self._receive(time.monotonic() + deadline_s, "its end", deadline_s)
            self._process.wait(_JOIN_S)
        except (OSError, ReplicatorError, subprocess.TimeoutExpired) as error:
            logger.warning("the background process %d does not end by itself: %s", self.pid, error)
        self.kill()

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        self.in_flight = None
        self._process.kill()
        self._process.wait()
        os.close(self._pidfd)
        self._arena.close()

    def _receive(self, end: float, what: str, deadline_s: float) -> Any:
        assert self._connection is not None
        ready = wait([self._connection, self._pidfd], max(end - time.monotonic(), 0))
        if not ready:
            self._process.kill()
            raise DeadlineExceededError.of(what, "the background process, which is killed now,", deadline_s)
        try:
            # What it said before it ended still counts.
            if self._connection in ready or self._connection.poll(0):
                return self._connection.recv()
        except (EOFError, OSError):
            pass
        raise SaveFailedError(f"{what} failed: the process was ended by {self._status()}; see its output")

    def _status(self) -> str:
        try:
            code = self._process.wait(_JOIN_S)
        except subprocess.TimeoutExpired:
            return "nobody, and says nothing any more"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"itself with status {code}"


def main() -> None:
    """The process. Arguments: descriptors of the socket and of the staging memory, and the trainer's pid."""
    connection_fd, arena_fd, trainer_pid = map(int, sys.argv[1:])
    # A trainer is told to stop by signals to its whole group; what is being saved is finished first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(connection_fd) as connection:
        try:
            trainer = os.pidfd_open(trainer_pid)
        except ProcessLookupError:
            return
        messages = _Messages(connection, trainer)
        setup = messages.next()
        if isinstance(setup, _Setup):
            sys.path[:] = setup.module_path
            logging.basicConfig(level=setup.log_level)
            _serve(connection, messages, setup, ArenaReader(arena_fd))


class _Messages:
    """What the trainer says; None when it is gone."""

    def __init__(self, connection: Connection, trainer: int) -> None:
        self._connection = connection
        self._trainer = trainer

    def next(self) -> Any:
        # A child that the trainer forked may keep the socket open, so its own end is watched, too.
        if self._connection not in wait([self._connection, self._trainer]):
            return None
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None


def _serve(connection: Connection, messages: _Messages, setup: _Setup, arena: ArenaReader) -> None:
    saver: IterationSaver | None = None
    try:
        while True:
            message = messages.next()
            if not isinstance(message, _Save):
                break
            started = time.monotonic()
            try:
                saver = saver or _saver(setup)
                state = arena.load(message.staged)
                saver.save(message.iteration, state["states"], state["dataloader"])
                del state
                done = SaveDone(message.iteration, time.monotonic() - started, True)
            except Exception as error:
                logger.warning("iteration %d is not saved: %s", message.iteration, error)
                done = SaveDone(message.iteration, time.monotonic() - started, False, *to_wire(error))
            connection.send(done)
        if isinstance(message, Terminate):
            if saver is not None:
                saver.settle(saver.session.deadline_s)
            connection.send(Terminate())
    except OSError as error:
        logger.warning("the trainer is gone: %s", error)
    finally:
        if saver is not None:
            saver.session.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _saver(setup: _Setup) -> IterationSaver:
    group = setup.group
    if group is not None:
        timeout = timedelta(seconds=setup.options.wait_s)
        store = TCPStore(group.host, group.port, None, False, timeout=timeout)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(group.name, store),
            rank=group.rank,
            world_size=group.world_size,
            timeout=timeout,
        )
    return IterationSaver(pickle.loads(setup.session), setup.options)
