"""The named points: all are registered, all are reached, and a wrong setting is told."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_course import recover, save
from fault_kills import HEAL_POINTS
from fault_model import History
from fault_nodes import Cluster, Process, cluster, environment, wait_until

import replicator
from replicator.errors import ConfigError
from replicator.faultpoints import POINTS, parse

SOURCE = Path(replicator.__file__).parent


def test_points_in_the_code_are_those_of_the_registry() -> None:
    named = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reach":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant)
                named.append(argument.value)
    assert sorted(named) == sorted(POINTS), "each point is at one place"


@pytest.mark.parametrize("text", ["seal", "nothing=kill", "seal.indexed=die", "seal.indexed:0=kill", "*=kill"])
def test_a_wrong_setting_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="REPLICATOR_FAULTPOINT"):
        parse(text)


@pytest.mark.parametrize(("action", "status"), [("kill", -9), ("note", 0)])
def test_the_nth_time_counts(action: str, status: int) -> None:
    code = "from replicator.faultpoints import reach\nfor i in range(3): reach('seal.indexed'); print(i)"
    done = subprocess.run(
        [sys.executable, "-uc", code],
        env=environment(REPLICATOR_FAULTPOINT=f"seal.indexed:2={action}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, "faultpoint seal.indexed\n")
    assert done.stdout == ("0\n" if action == "kill" else "0\n1\n2\n")


@pytest.fixture
def noting() -> Iterator[Cluster]:
    """A cluster of which every process says which points it reaches."""
    Process.default_point = "*=note"
    Process.noted.clear()
    Process.complaints.clear()
    try:
        with cluster(3) as made:
            yield made
    finally:
        Process.default_point = ""


def test_every_point_is_reached(noting: Cluster) -> None:
    """So that no kill of the matrix is one that never happens: two saves, a restart, and a node that is lost.

    F31: no process complains meanwhile.
    """
    history = History(noting.job)
    noting.start()
    save(noting, history)
    noting.nodes[0].kill_agent()
    noting.start_agents(noting.nodes[:1])
    save(noting, history)
    for _ in range(5):
        noting.nodes[2].lose()
        noting.start_agents(noting.nodes[2:])
        noting.enter()
        assert recover(noting) == history.saves[-1].version
        if "lookup.kept" in Process.noted:
            break  # else the survivors were quicker, and had given the replacement the manifest
    # Once more, and nobody loads: the replacement is given copies of a new step. The survivors have all of this one.
    save(noting, history)
    noting.nodes[2].lose()
    noting.start_agents(noting.nodes[2:])
    noting.enter()
    wait_until(lambda: set(HEAL_POINTS) <= Process.noted, f"all of {HEAL_POINTS} are reached", 60.0)
    assert POINTS.keys() - Process.noted == set()
    assert not Process.complaints
