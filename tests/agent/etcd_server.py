"""A real etcd (Debian's package etcd-server) of a test's own, on loopback."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from agent_harness import DEADLINE_S


def etcd_program() -> str:
    """Where etcd is. CI installs it (.ci/run); elsewhere: apt-get install etcd-server."""
    found = shutil.which("etcd")
    assert found is not None, "this test needs etcd: apt-get install etcd-server"
    return found


class EtcdServer:
    """One member. It can be killed and started again, with what it had or with nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Both are ours until etcd is started, which takes no port 0.
        with socket.create_server(("127.0.0.1", 0)) as client, socket.create_server(("127.0.0.1", 0)) as peer:
            self.port, self._peer_port = client.getsockname()[1], peer.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> EtcdServer:
        url, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        command = [etcd_program(), "--data-dir", str(self.directory), "--name", "one", "--logger", "zap"]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url]
        command += [
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"one={peer}",
        ]
        # Elections of one member, and so the shortest lease, take their time from these.
        command += ["--heartbeat-interval", "50", "--election-timeout", "250", "--log-level", "error"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=None)
        end = time.monotonic() + DEADLINE_S
        while True:
            assert self.process.poll() is None, "etcd ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            assert time.monotonic() < end, "etcd does not listen"
            time.sleep(0.02)

    def kill(self, *, forget: bool = False) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            self.process = None
        if forget:
            shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def etcd(directory: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(directory)
    try:
        yield server.start()
    finally:
        server.kill(forget=True)
