"""One example, played: two nodes train and save, one of them loses its memory, and both go on from what is left."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.report import REPORT_FILE
from replicator.errors import DeadlineExceededError
from replicator.local_cluster.cluster import Cluster, Launch, Node

SOURCE = Path(__file__).resolve().parent
RANKS = 2
SAVE_EVERY = 2
STEPS_BEFORE = 4
STEPS_AFTER = 6
_WAKE_S = 0.2


def names() -> list[str]:
    """All examples: the modules of this package that are none of the harness."""
    return sorted(path.stem for path in SOURCE.glob("[a-z]*.py") if path.stem != "report")


@dataclass(slots=True)
class Played:
    """What came of one example. `source`: whose memory the recovered step came from; `ok`: no problems."""

    framework: str
    ok: bool = False
    saved_step: int | None = None
    recovered_step: int | None = None
    source: str = "nowhere"
    bitwise_equal: bool = False
    ranks: int = RANKS
    tensor_bytes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Play:
    """One example in `work`, a new directory on a tmpfs. `close` it, whatever happens.

    Args:
        deadline_s: for all of it.
    """

    def __init__(self, name: str, work: Path, deadline_s: float) -> None:
        self._name = name
        self._work = work
        self._cluster = Cluster(work, RANKS)
        self._started = time.monotonic()
        self._deadline_s = deadline_s
        self.played = Played(name)

    @property
    def logs(self) -> list[Path]:
        """Of all processes, in the order of their names."""
        return sorted((self._work / "logs").glob("*.log"))

    def close(self) -> None:
        """End every process that was started."""
        self._cluster.close()

    def run(self) -> Played:
        """All of it; the result's `problems` say what was not as it should be.

        Raises:
            ProcessEndedError: an agent or a rank failed. DeadlineExceededError: it took too long.
        """
        played = self.played
        (self._work / "logs").mkdir()
        self._cluster.open_rendezvous()
        nodes = [self._cluster.add_node() for _ in range(RANKS)]
        self._cluster.wait_ready(nodes)
        before = self._train("before", nodes, STEPS_BEFORE)
        survivor, lost = nodes
        self._cluster.lose(lost)
        replacement = self._cluster.add_node()
        self._cluster.wait_ready([replacement])
        self._judge_source(survivor, replacement, before)
        after = self._train("after", [survivor, replacement], STEPS_AFTER)
        self._judge_bytes(before, after)
        played.seconds = round(time.monotonic() - self._started, 1)
        played.ok = not played.problems
        return played

    def _train(self, run: str, nodes: list[Node], steps: int) -> list[dict[str, Any]]:
        """Run the example on these nodes to its end; what its ranks reported."""
        directory = self._work / run
        directory.mkdir()
        report = self._work / f"{run}.jsonl"
        report.touch()
        variables = {
            "REPLICATOR_JOB": self._name,
            "PYTHONPATH": str(SOURCE.parent),
            "TMPDIR": str(directory),
            REPORT_FILE: str(report),
        }
        launch = Launch(run_id=run, variables=variables, directory=directory)
        arguments = ["--steps", str(steps), "--save-every", str(SAVE_EVERY)]
        for node in nodes:
            self._cluster.start_ranks(node, f"examples.{self._name}", arguments, launch)
        for node in nodes:
            self._wait(run, node)
            node.ranks = None
        # What a run left on this machine's disk is no node's memory: the next one must not find it.
        shutil.rmtree(directory)
        return [json.loads(line) for line in report.read_text().splitlines()]

    def _wait(self, run: str, node: Node) -> None:
        assert node.ranks is not None
        while node.ranks.poll() is None:
            self._cluster.check()
            if time.monotonic() - self._started > self._deadline_s:
                awaited = f"the end of {self._name} ({run} the loss)"
                raise DeadlineExceededError.of(awaited, node.name, self._deadline_s)
            try:
                node.ranks.wait(_WAKE_S)
            except subprocess.TimeoutExpired:
                continue
        self._cluster.check()

    def _judge_source(self, survivor: Node, replacement: Node, before: list[dict[str, Any]]) -> None:
        """Only the survivors' memory is left: what they could recover now is what will be recovered."""
        played = self.played
        played.saved_step = max((line["step"] for line in before if line["kind"] == "saved"), default=None)
        if any(line["kind"] == "recovered" for line in before):
            played.problems.append("something was recovered before anything had been saved")
        if objects := self._cluster.status(replacement).sealed_objects:
            played.problems.append(f"the replacement of the lost node began with {objects} objects in its memory")
        plan = self._cluster.recovery_plan(survivor, self._name)
        holders = sorted({node_id for source in plan.sources for node_id in source.node_ids})
        if plan.step != played.saved_step or plan.step is None:
            played.problems.append(f"step {played.saved_step} was saved, recoverable is {plan.step}: {plan.reason}")
        elif holders != [survivor.name]:
            played.problems.append(f"expected step {plan.step} in the memory of {survivor.name} alone, found {holders}")
        else:
            played.source = "peers"

    def _judge_bytes(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        """Each rank must get back, bit for bit, what the same rank had saved last."""
        played = self.played
        saved = {line["rank"]: line for line in before if line["kind"] == "saved" and line["step"] == played.saved_step}
        found = {line["rank"]: line for line in after if line["kind"] == "recovered"}
        everybody = list(range(RANKS))
        for what, lines in (("saved", saved), ("recovered", found)):
            if sorted(lines) != everybody:
                played.problems.append(f"expected ranks {everybody} to report what they {what}, found {sorted(lines)}")
        played.recovered_step = max((line["step"] for line in found.values()), default=None)
        played.tensor_bytes = sum(line["tensor_bytes"] for line in found.values())
        different = [
            f"rank {rank}: {key} {saved[rank][key]} was saved, {found[rank][key]} was recovered"
            for rank in sorted(saved.keys() & found.keys())
            for key in ("step", "sha256", "tensor_bytes")
            if saved[rank][key] != found[rank][key]
        ]
        played.problems += different
        if not played.tensor_bytes:
            played.problems.append("no bytes of tensors were compared")
        last = max((line["step"] for line in after if line["kind"] == "saved"), default=None)
        if last != STEPS_AFTER:
            played.problems.append(f"expected the job to go on and save step {STEPS_AFTER}, its last save is {last}")
        played.bitwise_equal = not different and sorted(saved) == sorted(found) == everybody
