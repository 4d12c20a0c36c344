"""The command line as a process of its own, and an agent that misbehaves in ways a real one cannot be made to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from forked import ADMIN, run

from replicator.native import crc32c
from replicator.v1 import admin_pb2, types_pb2

TIMEOUT_S = 60


def environment(**extra: str) -> dict[str, str]:
    """Without settings of whoever runs the tests. Agents scrub nothing, so that a test decides who finds a bad copy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REPLICATOR_")}
    return {**kept, "REPLICATOR_SCRUB_BYTES_PER_S": "0", **extra}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "replicator.admin", *map(str, args)]


def admin(*args: object, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `replicator-admin` to its end; in a new interpreter where this one is told something."""
    if any(name.startswith("PYTHON") for name in extra):
        return subprocess.run(
            command(*args), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(**extra), check=False
        )
    return run(ADMIN, [str(arg) for arg in args], environment(**extra), TIMEOUT_S)


def admin_json(*args: object, **extra: str) -> tuple[int, dict[str, Any]]:
    """(exit status, the object on stdout)."""
    done = admin(*args, "--json", **extra)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done
    return done.returncode, json.loads(lines[0])


def one_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a failed command, after checking that it is one line and no traceback."""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("replicator-admin: error: "), done.stderr
    return done.stderr.strip().removeprefix("replicator-admin: error: ")


class OddAgent:
    """Serves AdminService on a unix socket with whatever functions a test gives it; raw bytes out of streams."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unary: dict[str, Callable[[bytes, grpc.ServicerContext], bytes]] = {}
        self.streams: dict[str, Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self,))
        socket = root / "agent.sock"
        self._server.add_insecure_port(f"unix:{socket}")
        (root / "agent.json").write_text(json.dumps({"pid": os.getpid(), "node_id": "odd", "socket": str(socket)}))

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = details.method.rpartition("/")[2]
        if name in self.unary:
            return grpc.unary_unary_rpc_method_handler(self.unary[name])
        if name in self.streams:
            return grpc.unary_stream_rpc_method_handler(self.streams[name])
        return None

    def offer(self, objects: dict[str, bytes], sources: tuple[str, ...] = ("n1", "n2")) -> None:
        """Plan for job/step-10 with these objects. ReadObject serves them; a test may replace that."""
        plan = types_pb2.Plan(
            found=True, container=types_pb2.ContainerRef(job="job", step=10, generation=1 << 20), reason="Step 10."
        )
        for name, data in sorted(objects.items()):
            plan.sources.add(
                name=name, size_bytes=len(data), crc32c=crc32c(data), owner_node_id=sources[0], node_ids=sources
            )
        self.unary["Recover"] = lambda request, context: plan.SerializeToString()

        def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            data = objects[admin_pb2.ReadObjectRequest.FromString(request).object.name]
            for start in range(0, len(data), 1 << 20):
                yield data[start : start + (1 << 20)]

        self.streams["ReadObject"] = read

    def __enter__(self) -> OddAgent:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(None).wait()


def source_of(request: bytes) -> str:
    """The one node that a ReadObject asks for."""
    (node_id,) = admin_pb2.ReadObjectRequest.FromString(request).object.node_ids
    return str(node_id)
