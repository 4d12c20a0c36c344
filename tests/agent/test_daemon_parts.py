"""An agent of which a part fails, and what an agent says of its settings."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import logging
from pathlib import Path

import pytest

import replicator
from replicator.agent.__main__ import parser
from replicator.agent.daemon import Agent
from replicator.agent.heal import Healer
from replicator.agent.health import HealthMonitor
from replicator.agent.membership.static import StaticSource
from replicator.agent.repair import Repairer
from replicator.config import AgentConfig
from replicator.errors import ReplicatorError


@pytest.mark.parametrize("part", [HealthMonitor, Healer, Repairer, StaticSource])
async def test_an_agent_without_one_of_its_parts_ends(
    shm_root: Path, part: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F19: half alive, it would answer that it is well, and never make a lost copy again. Whoever started it may."""

    async def fails(self: object) -> None:
        raise RuntimeError("a fault that nobody thought of")

    monkeypatch.setattr(part, "run", fails)
    config = AgentConfig(root=str(shm_root), node_id="n1", labels=(("zone", "a"),), domain_levels=("rack", "zone"))
    with caplog.at_level(logging.WARNING):
        agent = await Agent.start(config)
        try:
            await asyncio.wait_for(agent.ended.wait(), 10)
        finally:
            await agent.stop()
    assert agent.status == ReplicatorError.exit_code
    assert "would be half alive" in caplog.text
    assert "a fault that nobody thought of" in caplog.text
    assert "no label for the level rack" in caplog.text
    assert "level zone" not in caplog.text


def test_the_help_gives_what_is_a_percentage_as_one() -> None:
    shown = parser().format_help()
    percents = [
        item.name for item in dataclasses.fields(AgentConfig) if str(item.metadata.get("help")).startswith("percent")
    ]
    assert len(percents) >= 2
    for name in percents:
        assert f"--{name.replace('_', '-')} PERCENT" in shown


def test_an_agent_has_one_event_loop_and_a_trainer_none() -> None:
    """F31: asynchronous gRPC in a second loop of a process takes the first one's wake-ups. One place makes one."""
    package = Path(replicator.__file__).parent
    makers = {"run", "Runner", "new_event_loop", "run_until_complete", "run_forever", "EventLoopPolicy"}
    loops, speakers = [], set()
    for path in package.rglob("*.py"):
        where = str(path.relative_to(package))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("asyncio", "uvloop"):
                loops += [where for name in node.names if name.name in makers]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in ("asyncio", "uvloop", "loop") and node.attr in makers:
                    loops.append(where)
                elif (node.value.id, node.attr) == ("grpc", "aio"):
                    speakers.add(Path(where).parts[0])
    assert loops == ["agent/daemon.py"] * 2, "asyncio.Runner of uvloop.new_event_loop, at one place"
    assert speakers <= {"agent", "transfer", "rpc_errors.py"}
