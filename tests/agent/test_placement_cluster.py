"""Placement over real agents: labels travel with the nodes, and an epoch's placement goes on from the one before."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import AgentProcess, running_agent

from replicator.client.local_agent import LocalAgent
from replicator.errors import ConfigError
from replicator.ids import AgreedPlacement, NodeAddress

ZONES = {"n0": "a", "n1": "a", "n2": "b", "n3": "b", "n9": "b"}
DEADLINE_S = 6.0


class Cluster:
    def __init__(self, root: Path, stack: contextlib.ExitStack) -> None:
        self._root = root
        self._stack = stack
        self.agents: dict[str, AgentProcess] = {}
        self.ranks: dict[str, LocalAgent] = {}

    def start(self, name: str, *flags: str) -> None:
        root = self._root / name
        labels = f"zone={ZONES[name]},rack={name[1:]}"
        self.agents[name] = self._stack.enter_context(
            running_agent(root, "--node-id", name, "--labels", labels, "--deadline-s", str(DEADLINE_S), *flags)
        )
        self.ranks[name] = LocalAgent(root, deadline_s=DEADLINE_S, auto_start=False)
        self._stack.callback(self.ranks[name].close)

    def open(
        self, first: str, names: list[str], wanted: AgreedPlacement | None = None
    ) -> tuple[int, list[NodeAddress], AgreedPlacement]:
        nodes = [self.ranks[name].node for name in names]
        epoch, placement = self.ranks[first].open_job("job", nodes, DEADLINE_S / 3, 1, wanted)
        assert placement is not None
        return epoch, nodes, placement

    def join(
        self, names: list[str], epoch: int, nodes: list[NodeAddress], placement: AgreedPlacement
    ) -> dict[str, str]:
        """The buddy of every node."""
        for name in names:
            assert self.ranks[name].join_job("job", epoch, nodes, 1, placement) == ""
        return {name: self.ranks[name].buddies("job")[0] for name in names}

    def admin_nodes(self, *options: str) -> subprocess.CompletedProcess[str]:
        address = self.agents["n0"].record["grpc_address"]
        command = [sys.executable, "-m", "replicator.admin", "nodes", "--agent", address, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        made = Cluster(tmp_path_factory.mktemp("placement"), stack)
        for name in ("n0", "n1", "n2", "n3"):
            made.start(name)
        yield made


def test_copies_go_to_the_other_zone_and_a_replacement_takes_one_place(cluster: Cluster) -> None:
    """F13: the node of rank 0 is new and knows nothing; it hears the last placement from who knows it."""
    names = ["n0", "n1", "n2", "n3"]
    assert cluster.ranks["n2"].node.labels == (("zone", "b"), ("rack", "2"))
    # Not what a fresh start gives, so that going on from it is told apart.
    other = AgreedPlacement("group", (("n0", "n3"), ("n1", "n2")))
    epoch, nodes, fresh = cluster.open("n0", names)
    assert fresh.groups == (("n0", "n2"), ("n1", "n3"))
    assert cluster.join(names, epoch, nodes, other) == {"n0": "n3", "n3": "n0", "n1": "n2", "n2": "n1"}
    cluster.start("n9")
    names = ["n9", "n0", "n1", "n2"]
    epoch, nodes, placement = cluster.open("n9", names)
    assert placement.groups == (("n0", "n9"), ("n1", "n2"))
    assert cluster.join(names, epoch, nodes, placement) == {"n0": "n9", "n9": "n0", "n1": "n2", "n2": "n1"}


def test_the_operator_sees_labels_and_buddies(cluster: Cluster) -> None:
    names = ["n0", "n1", "n2", "n3"]
    epoch, nodes, placement = cluster.open("n0", names)
    buddies = cluster.join(names, epoch, nodes, placement)
    found: dict[str, dict[str, Any]] = {
        report["node"]["node_id"]: report for report in json.loads(cluster.admin_nodes("--json").stdout)["nodes"]
    }
    for name in names:
        assert found[name]["node"]["labels"] == {"zone": ZONES[name], "rack": name[1:]}
        (job,) = found[name]["status"]["jobs"]
        assert (job["placement"], job["buddy_node_ids"]) == ("group", [buddies[name]])
    told = cluster.admin_nodes().stdout.splitlines()
    assert told[0].split()[-2:] == ["LABELS", "BUDDIES"]
    (line,) = [one for one in told if one.startswith("n0 ")]
    assert line.split()[-2:] == ["zone=a,rack=0", buddies["n0"]]


def test_the_job_may_bring_its_own_map(cluster: Cluster) -> None:
    names = ["n0", "n1", "n2", "n3"]
    buddies = (("n0", ("n1",)), ("n1", ("n2",)), ("n2", ("n0", "n3")), ("n3", ("n0",)))
    wanted = AgreedPlacement("explicit", (), buddies)
    epoch, nodes, placement = cluster.open("n1", names, wanted)
    with pytest.raises(ConfigError, match="node n3 is a member of the job and has no buddies in it"):
        cluster.open("n1", names, AgreedPlacement("explicit", (), buddies[:3]))
    epoch, nodes, placement = cluster.open("n1", names, wanted)
    for name in names:
        cluster.ranks[name].join_job("job", epoch, nodes, 1, placement)
    assert [cluster.ranks[name].buddies("job") for name in names] == [("n1",), ("n2",), ("n0",), ("n0",)]
