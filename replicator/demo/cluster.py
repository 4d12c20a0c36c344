"""The demo's nodes as processes: per node one agent and one torchrun with one rank, on an address of its own."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from replicator.client.launch import AGENT_ENVIRONMENT, AgentRecord, find_agent
from replicator.demo.processes import kill_now, start
from replicator.errors import DeadlineExceededError, ReplicatorError

JOB = "demo"
RENDEZVOUS_HOST = "127.0.0.1"
MAX_RESTARTS = 3
AGENT_START_S = 60.0
AGENT_STOP_S = 10.0
_POLL_S = 0.05


class DemoError(ReplicatorError):
    """A process of the demo ended that should not have."""


@dataclass(slots=True)
class Node:
    """One node. `root` is its tmpfs: nobody else writes there, and it goes when the node is lost."""

    name: str
    address: str
    root: Path
    logs: Path
    agent: subprocess.Popen[bytes] | None = None
    ranks: subprocess.Popen[bytes] | None = None
    record: AgentRecord | None = None
    lost: bool = False

    @property
    def agent_log(self) -> Path:
        return self.logs / f"{self.name}.agent.log"

    @property
    def ranks_log(self) -> Path:
        return self.logs / f"{self.name}.ranks.log"

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in (self.ranks, self.agent) if process is not None]


@dataclass(slots=True)
class Cluster:
    """All nodes there ever were, and the rendezvous of the job. `close` ends every process; call it always.

    Args:
        work: a directory on a tmpfs; the nodes' roots and logs go there.
        size: how many nodes the job has.
    """

    work: Path
    size: int
    nodes: list[Node] = field(default_factory=list)
    _rendezvous: subprocess.Popen[str] | None = None
    _endpoint: str = ""

    @property
    def logs(self) -> Path:
        return self.work / "logs"

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if not node.lost]

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def add_node(self) -> Node:
        """A new, empty node with the next name and address, and its agent started; see `wait_ready`."""
        index = len(self.nodes)
        name = f"node-{index}"
        node = Node(name, f"127.0.0.{2 + index}", self.work / name, self.logs)
        node.logs.mkdir(exist_ok=True)
        node.root.mkdir(mode=0o700)
        self.nodes.append(node)
        command = [sys.executable, "-m", "replicator.agent", "--root", str(node.root)]
        command += ["--node-id", node.name, "--bind", node.address]
        node.agent = start(command, node.agent_log, {**AGENT_ENVIRONMENT, **_environment()}, self.work)
        return node

    def wait_ready(self, nodes: Sequence[Node]) -> None:
        """Until the agents of these nodes answer.

        Raises:
            DemoError: one ended. DeadlineExceededError: one is not there after a minute.
        """
        deadline = time.monotonic() + AGENT_START_S
        for node in nodes:
            while (record := find_agent(node.root)) is None:
                self.check()
                if time.monotonic() > deadline:
                    raise DeadlineExceededError.of("readiness", f"the agent of {node.name}", AGENT_START_S)
                time.sleep(_POLL_S)
            node.record = record

    def open_rendezvous(self) -> None:
        """Start the store through which torchrun's agents meet."""
        with open(self.logs / "rendezvous.log", "ab") as log:
            self._rendezvous = subprocess.Popen(
                [sys.executable, "-m", "replicator.demo.rendezvous", RENDEZVOUS_HOST],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                cwd=self.work,
                start_new_session=True,
                text=True,
            )

    def start_ranks(self, node: Node, arguments: Sequence[str]) -> None:
        """Start this node's torchrun: one rank, in a job of `size` nodes that is restarted when a member is lost."""
        command = [
            *_torchrun("--nnodes", str(self.size), "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-id", JOB, "--rdzv-endpoint", self._rendezvous_endpoint()),
            *("--rdzv-conf", "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5"),
            *("--local-addr", node.address, "--max-restarts", str(MAX_RESTARTS)),
            *("-m", "replicator.demo.train", "--on", node.name, *arguments),
        ]
        environment = _environment() | {
            "REPLICATOR_ROOT": str(node.root),
            # torchrun keeps the job's store on its first rank's node and hands the same one to every restart, so a
            # restart after that node is lost would look for it there. A new store per restart survives.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        node.ranks = start(command, node.ranks_log, environment, self.work)

    def run_reference(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start the same job under one torchrun, without Replicator."""
        command = [
            *_torchrun("--standalone", "--nproc-per-node", str(self.size)),
            *("-m", "replicator.demo.train", "--on", "reference", "--plain", *arguments),
        ]
        return start(command, self.logs / "reference.log", _environment(), self.work)

    def lose(self, node: Node) -> list[int]:
        """SIGKILL everything that runs on the node, then delete its memory; the ids of what was killed."""
        node.lost = True
        killed = kill_now(node.processes)
        shutil.rmtree(node.root)
        return killed

    def check(self) -> None:
        """Raise DemoError when a process of a node that is not lost has failed."""
        for node in self.alive:
            if node.agent is not None and node.agent.poll() is not None:
                raise DemoError(f"the agent of {node.name} ended with status {node.agent.returncode}")
            if node.ranks is not None and node.ranks.poll() not in (None, 0):
                raise DemoError(f"the torchrun of {node.name} ended with status {node.ranks.returncode}")

    def close(self) -> None:
        """End every process: agents are asked first, everything else is killed."""
        kill_now([node.ranks for node in self.nodes if node.ranks is not None])
        agents = [node.agent for node in self.alive if node.agent is not None]
        for agent in agents:
            agent.terminate()
        deadline = time.monotonic() + AGENT_STOP_S
        for agent in agents:
            try:
                agent.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                kill_now([agent])
        if self._rendezvous is not None:
            self._rendezvous.kill()
            self._rendezvous.communicate()

    def _rendezvous_endpoint(self) -> str:
        if not self._endpoint:
            assert self._rendezvous is not None
            assert self._rendezvous.stdout is not None
            ready, _, _ = select.select([self._rendezvous.stdout], [], [], AGENT_START_S)
            port = self._rendezvous.stdout.readline().strip() if ready else ""
            if not port:
                raise DemoError("the job's rendezvous did not start")
            self._endpoint = f"{RENDEZVOUS_HOST}:{port}"
        return self._endpoint


def _torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def _environment() -> dict[str, str]:
    """The user's environment without Replicator's variables, and what makes the job reproducible."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REPLICATOR_", "TORCHELASTIC_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
