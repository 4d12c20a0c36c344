"""Commands as forks of a process that has their modules loaded: real processes, without half a second of imports each.

The function is the one that the command runs. What a test says of the command itself, of a new interpreter or of
variables that only that one reads (PYTHON*, MALLOC_*) needs a real start: `subprocess`, `ensure_agent`.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

AGENT = "replicator.agent.__main__:main"
ADMIN = "replicator.admin.__main__:main"

_ANSWER_S = 30.0
_MAX_REQUEST = 1 << 18
_PRELOADED = (
    *("argparse", "importlib.metadata", "grpc.aio", "uvloop", "replicator.agent.__main__", "replicator.agent.core"),
    *("replicator.agent.daemon", "replicator.agent.servers", "replicator.agent.admin_service"),
    *("replicator.store.own_mount", "replicator.admin.__main__", "replicator.admin.cli"),
)


class Forked:
    """A process, with what of subprocess.Popen is used here.

    Args:
        call: `module:function`; it finds the arguments in sys.argv, and returns the exit status.
        output: a file that gets stdout and stderr; None: they are pipes.
    """

    def __init__(
        self, call: str, arguments: Sequence[str], environment: Mapping[str, str], output: IO[Any] | None = None
    ) -> None:
        self.returncode: int | None = None
        self.stdin = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self._status, status = os.pipe()
        theirs = [status]
        if output is None:
            for name in ("stdout", "stderr"):
                mine, other = os.pipe()
                theirs.append(other)
                setattr(self, name, open(mine))  # noqa: SIM115
        else:
            theirs += [os.dup(output.fileno()), os.dup(output.fileno())]
        try:
            self.pid = _nursery().fork(call, arguments, environment, theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        try:
            self._process: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._process = None

    def __del__(self) -> None:
        """Of one that nobody waited for."""
        if self.returncode is None:
            os.close(self._status)
            if self._process is not None:
                os.close(self._process)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready = select.poll()
            ready.register(self._status, select.POLLIN)
            if not ready.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            self.returncode = int(os.read(self._status, 32))
            os.close(self._status)
            if self._process is not None:
                os.close(self._process)
                self._process = None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(
    call: str, arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, as subprocess.run does."""
    process = Forked(call, arguments, environment)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        with ThreadPoolExecutor(1) as pool, process.stdout, process.stderr:
            errors = pool.submit(process.stderr.read)
            output = process.stdout.read()
            return subprocess.CompletedProcess(list(arguments), process.wait(timeout), output, errors.result())
    finally:
        process.kill()


class _Nursery:
    """This process's side of the process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_S)
        self._one_at_a_time = threading.Lock()
        with theirs:
            # It ends when this process does: the socket is closed then.
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(
        self, call: str, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> int:
        request = {"call": call, "arguments": list(arguments), "environment": dict(environment), "cwd": os.getcwd()}
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        with self._one_at_a_time:
            self._socket.sendmsg([json.dumps(request).encode()], [rights])
            return int(self._socket.recv(32))


_made: dict[int, _Nursery] = {}
_making = threading.Lock()


def _nursery() -> _Nursery:
    """One per process: a fork of this one makes its own."""
    with _making:
        if os.getpid() not in _made:
            _made.clear()
            _made[os.getpid()] = _Nursery()
        return _made[os.getpid()]


# -- the process that forks


def _serve(requests: socket.socket) -> None:
    """Fork for each request, and tell each child's status, until nobody is there to ask."""
    statuses: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _collect(statuses)
        if requests in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 3)
            if not request:
                return
            status, out, err = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (woken, wake, status, *statuses.values()):
                    os.close(descriptor)
                requests.close()
                _become(json.loads(request), out, err)
            os.close(out)
            os.close(err)
            statuses[pid] = status
            requests.send(b"%d" % pid)


def _collect(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(statuses[pid], b"%d" % os.waitstatus_to_exitcode(status))
        os.close(statuses.pop(pid))


def _become(request: dict[str, Any], out: int, err: int) -> None:
    """Run what was asked for; never returns."""
    code: Any = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for descriptor, standard in ((out, 1), (err, 2)):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        # It has read the environment when it was loaded.
        importlib.reload(sys.modules["replicator.faultpoints"])
        module, _, function = request["call"].partition(":")
        sys.argv = [module, *request["arguments"]]
        code = getattr(importlib.import_module(module), function)()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)


if __name__ == "__main__":
    _main()
