"""The story: train, lose a node, recover from its buddy, go on; then the same job without any loss, and compare."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path

from replicator.client.launch import find_agent
from replicator.demo.events import Event, Inbox
from replicator.demo.facts import Facts, differing_losses, mean_loss, pulled
from replicator.demo.options import DemoOptions
from replicator.demo.report import Report, Result
from replicator.errors import DeadlineExceededError
from replicator.local_cluster.cluster import Cluster, Launch, Node, ProcessEndedError, environment, torchrun
from replicator.local_cluster.processes import kill_now, start

JOB = "demo"
_LAUNCH = Launch(run_id=JOB, max_restarts=3)
_TRAIN = "replicator.demo.train"
_WAKE_S = 0.2


class Scenario:
    """One play of the demo in `work`, a new directory on a tmpfs.

    `play` starts processes; the caller must `close`, whatever happens.
    """

    def __init__(self, options: DemoOptions, work: Path, report: Report) -> None:
        self._options = options
        self._report = report
        self._work = work
        self._cluster = Cluster(work, options.nodes)
        self._inbox = Inbox(work / "events.sock")
        self._ends_at = time.monotonic() + options.deadline_s
        self._facts = Facts()
        self._lost_at = 0.0
        self._resumed_at: float | None = None
        self._result = Result(
            nodes=options.nodes,
            replicas=options.replicas,
            seed=options.seed,
            steps=options.steps,
            save_every=options.save_every,
        )

    @property
    def logs(self) -> list[Path]:
        """Of all processes, in the order of their names."""
        return sorted((self._work / "logs").glob("*.log"))

    def close(self) -> None:
        """End every process that was started."""
        self._cluster.close()
        self._inbox.close()

    def play(self) -> Result:
        """All of it; the result's `problems` say what was not as it should be.

        Raises:
            ProcessEndedError: a process ended that should not have. DeadlineExceededError: something did not come.
        """
        self._start()
        lost = self._lose()
        self._recover(lost)
        self._wait("the end of the job", lambda: len(self._facts.finished) == self._options.nodes)
        self._report.say("job", f"finished at step {self._options.steps}")
        reference = self._reference()
        self._compare(reference)
        self._judge()
        self._result.total_seconds = round(self._report.elapsed_s, 1)
        return self._result

    def _start(self) -> None:
        (self._work / "logs").mkdir()
        (self._work / "out").mkdir()
        self._cluster.open_rendezvous()
        nodes = [self._cluster.add_node() for _ in range(self._options.nodes)]
        self._cluster.wait_ready(nodes)
        for node in nodes:
            assert node.record is not None
            where = f"grpc {node.record.grpc_address}, bulk {node.record.bulk_address or 'none'}"
            self._report.say(node.name, f"agent {node.record.pid} ready, {where}, memory in {node.root}")
        for node in nodes:
            self._start_ranks(node)
        self._report.say("job", f"torchrun started on {len(nodes)} nodes, one rank each")

    def _start_ranks(self, node: Node) -> None:
        self._cluster.start_ranks(node, _TRAIN, ["--on", node.name, *self._arguments("job")], _LAUNCH)

    def _arguments(self, run: str) -> list[str]:
        options = self._options
        out = self._work / "out" / run
        out.mkdir(exist_ok=True)
        return [
            *("--events", str(self._work / "events.sock"), "--out", str(out), "--seed", str(options.seed)),
            *("--steps", str(options.steps), "--save-every", str(options.save_every)),
            *("--replicas", str(options.replicas)),
        ]

    def _lose(self) -> Node:
        """Kill the node once it is far enough and what is committed by then is with the buddies."""
        node = self._cluster.nodes[self._options.lost_node]
        facts = self._facts

        def due() -> bool:
            far_enough = facts.reached.get(node.name, 0) >= self._options.lost_at_step
            return far_enough and facts.newest_protected is not None and set(facts.committed) <= set(facts.protected)

        self._wait(f"step {self._options.lost_at_step} on {node.name}", due)
        survivors = [other for other in self._cluster.nodes if other is not node]
        self._lost_at = time.monotonic()
        killed = self._cluster.lose(node)
        self._drain()
        result = self._result
        result.lost_node = node.name
        result.lost_rank = facts.rank_of[node.name]
        result.lost_at_step = facts.reached[node.name]
        result.survivors = [other.name for other in survivors]
        self._report.say(
            node.name,
            f"LOST after step {result.lost_at_step}: SIGKILL to agent and ranks ({len(killed)} processes), "
            f"{node.root} deleted",
            "loud",
        )
        result.newest_recoverable_step = self._newest_recoverable(survivors[0])
        result.last_committed_step = facts.newest_committed
        result.last_protected_step = facts.newest_protected
        self._report.say(
            "demo",
            f"last committed step {result.last_committed_step}; the survivors could recover "
            f"step {result.newest_recoverable_step}",
        )
        return node

    def _newest_recoverable(self, node: Node) -> int | None:
        """What `replicator-admin recover --dry-run` would say, asked of one node."""
        plan = self._cluster.recovery_plan(node, JOB)
        return plan.step if plan.found else None

    def _recover(self, lost: Node) -> None:
        replacement = self._cluster.add_node()
        self._cluster.wait_ready([replacement])
        self._result.replacement_node = replacement.name
        assert replacement.record is not None
        self._report.say(
            replacement.name, f"agent {replacement.record.pid} ready in place of {lost.name}, nothing in its memory"
        )
        self._start_ranks(replacement)
        everybody = self._options.nodes
        facts = self._facts
        self._wait("the recovery of every rank", lambda: bool(facts.first_recovery(everybody) or facts.finished))
        recovery = facts.first_recovery(everybody)
        if not recovery:
            raise ProcessEndedError(
                f"the job began anew, although step {self._result.newest_recoverable_step} was recoverable"
            )
        result = self._result
        steps = {event.fields["step"] for event in recovery}
        if len(steps) > 1:
            result.problems.append(f"ranks restored different steps: {sorted(steps)}")
        first = recovery[0].fields
        items = pulled(recovery)
        result.recovered_step = first["step"]
        result.plan_reason = first["reason"]
        result.objects_in_checkpoint = first["objects"]
        result.checkpoint_bytes = first["bytes"]
        moved = {(item["node"], item["name"]) for item in items}
        result.objects_pulled = len(moved)
        result.objects_pulled_by_replacement = sum(node == replacement.name for node, _ in moved)
        result.bytes_pulled = sum(item["bytes"] for item in items)
        result.source_nodes = sorted({item["source"] for item in items})
        result.lanes = sorted({item["lane"] for item in items if item["lane"]})
        result.recovery_seconds = round(max(event.fields["seconds"] for event in recovery), 3)
        result.epochs = sorted({event.fields["epoch"] for event in self._facts.started})
        for node in self._cluster.alive:
            if find_agent(node.root) != node.record:
                result.problems.append(f"the agent of {node.name} is another one than before the loss")
        from_survivors = bool(items) and set(result.source_nodes) <= set(result.survivors)
        result.source = "peers" if from_survivors else "local" if not items else "other"

    def _reference(self) -> Facts:
        """The same job without loss and without Replicator."""
        self._report.say("reference", "the same job once more, uninterrupted and without Replicator")
        job, self._facts = self._facts, Facts()
        command = [
            *torchrun("--standalone", "--nproc-per-node", str(self._options.nodes)),
            *("-m", _TRAIN, "--on", "reference", "--plain", *self._arguments("reference")),
        ]
        process = start(command, self._work / "logs" / "reference.log", environment(), self._work)
        try:

            def over() -> bool:
                if process.poll() not in (None, 0):
                    raise ProcessEndedError(f"the reference ended with status {process.returncode}")
                return len(self._facts.finished) == self._options.nodes and process.poll() == 0

            self._wait("the end of the reference", over)
        finally:
            kill_now([process])
        reference, self._facts = self._facts, job
        return reference

    def _compare(self, reference: Facts) -> None:
        result = self._result
        different = differing_losses(self._facts, reference)
        result.losses_compared = sum(len(values) for values in self._facts.losses.values())
        result.losses_equal = not different
        result.problems += [f"loss differs: {line}" for line in different[:5]]
        result.final_loss = mean_loss(self._facts.losses, self._options.steps, self._options.nodes)
        result.parameters_equal = True
        for rank in range(self._options.nodes):
            ours, theirs = (self._work / "out" / run / f"rank-{rank}.bin" for run in ("job", "reference"))
            mine = ours.read_bytes()
            result.state_bytes_compared += len(mine)
            if not mine or mine != theirs.read_bytes():
                result.parameters_equal = False
                result.problems.append(f"the final state of rank {rank} differs from the reference's")
        result.bitwise_equal = result.losses_equal and result.parameters_equal

    def _judge(self) -> None:
        result = self._result
        if self._resumed_at is not None:
            result.downtime_seconds = round(self._resumed_at - self._lost_at, 1)
        recovered = -1 if result.recovered_step is None else result.recovered_step
        if result.recovered_step != result.newest_recoverable_step:
            result.problems.append(
                f"step {result.recovered_step} was recovered, "
                f"and the newest recoverable one was {result.newest_recoverable_step}"
            )
        if result.last_protected_step is None or recovered < result.last_protected_step:
            result.problems.append(f"step {result.last_protected_step} was protected, and an older one was recovered")
        if result.last_committed_step is None or recovered > result.last_committed_step:
            result.problems.append(
                f"step {result.recovered_step} was recovered, the last committed one is {result.last_committed_step}"
            )
        if result.source != "peers":
            result.problems.append(f"the missing objects came from {result.source_nodes or 'nowhere'}, not from peers")
        result.ok = not result.problems

    def _wait(self, awaited: str, until: Callable[[], bool]) -> None:
        """Take reports until it is so.

        Raises:
            ProcessEndedError: a process failed. DeadlineExceededError: the demo's time is over.
        """
        while not until():
            self._cluster.check()
            rest = self._ends_at - time.monotonic()
            if rest <= 0:
                raise DeadlineExceededError(
                    f"{awaited} did not come within {self._options.deadline_s:.0f} s of the demo's start; "
                    "give it more with --deadline-s, or look at what its processes said last (above)"
                )
            select.select([self._inbox], [], [], min(rest, _WAKE_S))
            self._drain()

    def _drain(self) -> None:
        for event in self._inbox.drain():
            self._facts.apply(event)
            self._tell(event)

    def _tell(self, event: Event) -> None:
        """Print what is worth a line."""
        fields, say = event.fields, self._report.say
        reference = event.node == "reference"
        if event.kind == "step":
            if self._lost_at and self._resumed_at is None and not reference and self._facts.restored:
                self._resumed_at = event.at
            mean = mean_loss(self._facts.losses, fields["step"], self._options.nodes)
            every = self._options.save_every
            if mean is not None and fields["step"] % every == 0 and fields["step"] == min(self._reached()):
                say("reference" if reference else "job", f"step {fields['step']:>3}  loss {mean:.4f}")
        elif event.kind == "plan" and event.rank == 0:
            what = f"step {fields['step']}" if fields["step"] is not None else "nothing to recover"
            say("plan", f"epoch {fields['epoch']}: {what}; {fields['reason']}", "good")
        elif event.kind == "committed":
            say("commit", f"step {fields['step']} committed, manifest on {', '.join(fields['stored_on'])}")
        elif event.kind == "protected":
            say("commit", f"step {fields['step']} protected: every object is with its buddies")
        elif event.kind == "failed":
            say(event.node, f"{fields['what']}: {fields['error']}", "bad")
        elif event.kind == "restored":
            size = sum(item["bytes"] for item in fields["pulled"]) / 1e6
            sources = ", ".join(sorted({item["source"] for item in fields["pulled"]}))
            count = len(fields["pulled"])
            origin = f"{count} object{'s' if count > 1 else ''} ({size:.1f} MB) pulled from {sources}"
            origin = origin if count else "all of it was here"
            say(event.node, f"rank {event.rank} restored step {fields['step']} in {fields['seconds']:.2f} s, {origin}")

    def _reached(self) -> list[int]:
        lost = {node.name for node in self._cluster.nodes if node.lost}
        return [step for node, step in self._facts.reached.items() if node not in lost]
