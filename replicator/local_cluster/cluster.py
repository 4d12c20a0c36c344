"""Nodes as processes of this machine: per node one agent and one torchrun with one rank, on an address of its own."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from replicator.admin.connection import AdminClient, resolve_target
from replicator.client.launch import AGENT_ENVIRONMENT, AgentRecord, find_agent
from replicator.client.plan import Plan, plan_from_pb
from replicator.errors import DeadlineExceededError, ReplicatorError
from replicator.local_cluster.processes import kill_now, start
from replicator.v1 import admin_pb2, types_pb2

RENDEZVOUS_HOST = "127.0.0.1"
AGENT_START_S = 60.0
AGENT_STOP_S = 10.0
_POLL_S = 0.05
_ASK_S = 15.0


class ProcessEndedError(ReplicatorError):
    """A process of a cluster on this machine ended that should not have."""


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


@dataclass(frozen=True, slots=True)
class Launch:
    """How the ranks of one run of a job are started.

    `run_id`: another one for each run, the job is restarted `max_restarts` times under it; `variables`: of the
    environment, beside the user's; `directory`: where they run, default: the cluster's.
    """

    run_id: str
    max_restarts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None


@dataclass(slots=True)
class Cluster:
    """All nodes there ever were, and the rendezvous of their jobs. `close` ends every process; call it always.

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
        node.agent = start(command, node.agent_log, {**AGENT_ENVIRONMENT, **environment()}, self.work)
        return node

    def wait_ready(self, nodes: Sequence[Node]) -> None:
        """Until the agents of these nodes answer.

        Raises:
            ProcessEndedError: one ended. DeadlineExceededError: one is not there after a minute.
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
                [sys.executable, "-m", "replicator.local_cluster.rendezvous", RENDEZVOUS_HOST],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
                cwd=self.work,
                start_new_session=True,
                text=True,
            )

    def start_ranks(self, node: Node, module: str, arguments: Sequence[str], launch: Launch) -> None:
        """Start this node's torchrun: one rank that runs the module, in a job of `size` nodes."""
        command = [
            *torchrun("--nnodes", str(self.size), "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-id", launch.run_id, "--rdzv-endpoint", self._rendezvous_endpoint()),
            *("--rdzv-conf", "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5"),
            *("--local-addr", node.address, "--max-restarts", str(launch.max_restarts)),
            *("-m", module, *arguments),
        ]
        variables = environment() | {
            "REPLICATOR_ROOT": str(node.root),
            # torchrun keeps the job's store on its first rank's node and hands the same one to every restart, so a
            # restart after that node is lost would look for it there. A new store per restart survives.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        node.ranks = start(command, node.ranks_log, {**variables, **launch.variables}, launch.directory or self.work)

    def recovery_plan(self, node: Node, job: str) -> Plan:
        """What `replicator-admin recover --dry-run` would say, asked of one node.

        Raises:
            AgentUnavailableError, DeadlineExceededError: no answer.
        """
        with self._admin(node) as client:
            request = admin_pb2.RecoverRequest(job=job, deadline_ms=client.agents_deadline_ms)
            return plan_from_pb(client.call("Recover", request, types_pb2.Plan, f"the recovery plan of {job}"))

    def status(self, node: Node) -> admin_pb2.StatusReply:
        """What a node's agent says of itself. Raises like `recovery_plan`."""
        with self._admin(node) as client:
            request = admin_pb2.StatusRequest(brief=True)
            return client.call("Status", request, admin_pb2.StatusReply, f"the status of {node.name}")

    def _admin(self, node: Node) -> AdminClient:
        assert node.record is not None
        return AdminClient(resolve_target(node.record.grpc_address, None), _ASK_S)

    def lose(self, node: Node) -> list[int]:
        """SIGKILL everything that runs on the node, then delete its memory; the ids of what was killed."""
        node.lost = True
        killed = kill_now(node.processes)
        shutil.rmtree(node.root)
        return killed

    def check(self) -> None:
        """Raise ProcessEndedError when a process of a node that is not lost has failed."""
        for node in self.alive:
            if node.agent is not None and node.agent.poll() is not None:
                raise ProcessEndedError(f"the agent of {node.name} ended with status {node.agent.returncode}")
            if node.ranks is not None and node.ranks.poll() not in (None, 0):
                raise ProcessEndedError(f"the torchrun of {node.name} ended with status {node.ranks.returncode}")

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
                raise ProcessEndedError("the job's rendezvous did not start")
            self._endpoint = f"{RENDEZVOUS_HOST}:{port}"
        return self._endpoint


def torchrun(*arguments: str) -> list[str]:
    """The command line of a torchrun with this interpreter."""
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def environment() -> dict[str, str]:
    """The user's environment without Replicator's variables, and what makes the job reproducible."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("REPLICATOR_", "TORCHELASTIC_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
