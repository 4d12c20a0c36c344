"""Under every protobuf runtime that training images pin (5.29, 6 and 7) generated code talks and the agent runs."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from replicator import ids
from replicator.client.launch import find_agent

# The newest grpcio family that accepts each protobuf line; the last line is whatever is newest.
RUNTIMES = {
    "5.29": ("protobuf==5.29.*", "grpcio==1.71.2", "grpcio-health-checking==1.71.2", "grpcio-reflection==1.71.2"),
    "6": ("protobuf>=6,<7", "grpcio==1.78.0", "grpcio-health-checking==1.78.0", "grpcio-reflection==1.78.0"),
    "7": ("protobuf>=7", "grpcio", "grpcio-health-checking", "grpcio-reflection"),
}

PROBE = """
import importlib, json, pkgutil
from concurrent.futures import ThreadPoolExecutor
import google.protobuf, grpc, replicator.v1

names = sorted(module.name for module in pkgutil.iter_modules(replicator.v1.__path__))
for name in names:
    importlib.import_module(f"replicator.v1.{name}")
from replicator.v1 import local_pb2, peer_pb2, peer_pb2_grpc, types_pb2

class Peer(peer_pb2_grpc.PeerServiceServicer):
    def Hello(self, request, context):
        return peer_pb2.HelloReply(node=request.expected, version="v", highest_epoch=2**40)

    def Inventory(self, request, context):
        for step in range(3):
            ref = types_pb2.ContainerRef(job=request.sender.job, step=step, generation=2**63)
            held = types_pb2.HeldObject(name="a/b", size_bytes=2**33, crc32c=0xFFFFFFFF)
            yield peer_pb2.InventoryReply(container=types_pb2.ContainerInventory(container=ref, objects=[held]))

server = grpc.server(ThreadPoolExecutor(2))
peer_pb2_grpc.add_PeerServiceServicer_to_server(Peer(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    stub = peer_pb2_grpc.PeerServiceStub(channel)
    me = types_pb2.NodeIdentity(node_id="n", incarnation=2**64 - 1)
    hello = stub.Hello(peer_pb2.HelloRequest(expected=me), timeout=10)
    asked = peer_pb2.InventoryRequest(sender=types_pb2.Sender(job="job"))
    held = [reply.container for reply in stub.Inventory(asked, timeout=10)]
server.stop(None)
print(json.dumps({
    "protobuf": google.protobuf.__version__,
    "grpc_from": grpc.__file__,
    "modules": names,
    "incarnation": hello.node.incarnation,
    "epoch": hello.highest_epoch,
    "steps": [container.container.step for container in held],
    "size": held[0].objects[0].size_bytes,
}))
"""
AGENT = """
import sys
from replicator.agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
STATUS = """
import sys
from replicator.admin.cli import main
sys.exit(main(["status", "--json", *sys.argv[1:]]))
"""


class Runtime:
    """A folder with the chosen runtime, before everything else that the running environment has."""

    def __init__(self, line: str, folder: Path) -> None:
        self.folder = folder / "runtime"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(self.folder)]
        made = subprocess.run(
            [*pip, *RUNTIMES[line]],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert made.returncode == 0, made.stdout + made.stderr

    def command(self, code: str, *arguments: str) -> list[str]:
        """Python with -S: no .pth file is read, so that only these folders count."""
        package = str(Path(ids.__file__).parents[1])
        path = [str(self.folder), package, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        return [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {path!r}\n{code}", *arguments]

    def run(self, code: str, *arguments: str) -> dict[str, Any]:
        ran = subprocess.run(self.command(code, *arguments), capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", sorted(RUNTIMES))
def test_generated_code_and_agent_under_protobuf(line: str, tmp_path: Path, shm_root: Path) -> None:
    runtime = Runtime(line, tmp_path)
    told = runtime.run(PROBE)
    assert told["protobuf"].startswith(line + ".")
    assert Path(told["grpc_from"]).is_relative_to(tmp_path)
    protos = {path.stem for path in (Path(__file__).parents[2] / "protos/replicator/v1").glob("*.proto")}
    assert {name.removesuffix("_pb2") for name in told["modules"] if name.endswith("_pb2")} == protos
    assert told["incarnation"] == 2**64 - 1
    assert told["epoch"] == 2**40
    assert told["steps"] == [0, 1, 2]
    assert told["size"] == 2**33

    agent = subprocess.Popen(runtime.command(AGENT, "--root", str(shm_root)), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while find_agent(shm_root) is None:
            assert agent.poll() is None, agent.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert runtime.run(STATUS, "--root", str(shm_root))["filesystem"] == "tmpfs"
        agent.terminate()
        _, log = agent.communicate(timeout=30)
        assert agent.returncode == 0, log
    finally:
        agent.kill()
        agent.wait()
