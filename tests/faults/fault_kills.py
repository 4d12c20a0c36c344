"""The kill matrix: SIGKILL of trainer, agent, both, or the node with its memory, at every named point.

A process is stopped at the point (SIGSTOP, by the point itself), so that whoever is to die dies exactly there. What
died is started again, the job recovers, and what it finds is compared with the history of the job, with the files of
the living nodes, and byte by byte with what was saved. Then the job saves again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fault_course import Course, check_recovery, recover, save
from fault_model import History, check_index, is_healed
from fault_nodes import CaseFailedError, Cluster, Node, Process, stop_reached, wait_until
from fault_table import Line
from fault_trainer import LARGE

from replicator.faultpoints import POINTS
from replicator.ids import ContainerVersion

# A new agent is there within it also on a busy machine.
DEADLINE_S = 20.0
REACH_S = 30.0
END_S = 150.0
ORDER_S = 10.0
HEALED_S = 90.0
# Of its store, a restarted agent has this much mapped and touched at most: no payload is read for the index.
MAX_TOUCHED = 1 << 20

DEATHS = ("agent", "trainer", "both", "node")
TRAINER_POINTS = frozenset(name for name, what in POINTS.items() if what.startswith("trainer:"))
# Reached by a node that brings a lost node's objects back, and (the last) by the holder that serves them.
PULL_POINTS = ("pull.block", "pull.verified", "pull.sealed", "ingest.written", "ingest.named", "pull.serving")
LOAD_POINTS = ("lookup.answered", "lookup.kept", "load.planned", "load.retrieved")
HEAL_POINTS = tuple(name for name in POINTS if name.startswith("heal."))
RESTART_POINTS = ("restart.rebuilding", "restart.rebuilt", "restart.publishing", "restart.resumed")
_OF_FIRST = ("trainer:", "agent:", "coordinator's agent:", "the segment", "the object")


@dataclass(frozen=True, slots=True)
class Case:
    """What dies, and when. `during`: save, recover, heal, restart, or alone (a save while the node's agent is away)."""

    during: str
    point: str
    death: str
    nth: int = 1

    @property
    def name(self) -> str:
        nth = f":{self.nth}" if self.nth > 1 else ""
        return f"{self.during}/{self.point}{nth}/{self.death}"

    @property
    def victim(self) -> int:
        """The number of the node: n0 coordinates, n0 holds copies of n2's objects."""
        if self.during == "recover":
            return 0 if self.point in ("pull.serving", "epoch.stored") else 2
        if self.during == "heal":
            return 0
        return (
            0 if POINTS[self.point].startswith(("trainer", "agent", "coordinator", "the segment", "the object")) else 1
        )

    @property
    def is_trainers(self) -> bool:
        """Whether it is the trainer that gets to the point."""
        return self.point in TRAINER_POINTS or self.during == "alone"


def all_cases() -> Iterator[Case]:
    """The matrix."""
    special = (*LOAD_POINTS, *RESTART_POINTS, *HEAL_POINTS, "epoch.stored")
    for point in POINTS:
        if point not in special:
            yield from (Case("save", point, death) for death in DEATHS)
    for death in DEATHS:
        # The second of two members, and in the middle of what is many.
        yield Case("save", "commit.sent", death, 2)
        yield Case("save", "ingest.named", death, 2)
        yield Case("save", "drop.recycled", death, 3)
    for point in (*LOAD_POINTS, *PULL_POINTS):
        yield from (Case("recover", point, death) for death in DEATHS)
    for point in HEAL_POINTS:
        yield from (Case("heal", point, death) for death in DEATHS)
    for point in ("epoch.stored", *RESTART_POINTS):
        during = "recover" if point == "epoch.stored" else "restart"
        yield from (Case(during, point, death) for death in ("agent", "both", "node"))
    for point in ("seal.before_rename", "seal.after_rename"):
        yield from (Case("alone", point, death) for death in ("trainer", "node"))


class Matrix:
    """Runs cases on one cluster, as long as each of them leaves it in order. A context manager."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._history: History
        self._noticed_s: float | None = None
        self._lost = 0
        self._large = LARGE

    def __enter__(self) -> Matrix:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def _drop(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def run(self, case: Case) -> Line:
        """Make the fault, and look at what comes of it."""
        began = time.monotonic()
        self._noticed_s, self._lost = None, 0
        try:
            if self._cluster is None:
                self._cluster = Cluster(3, DEADLINE_S)
                self._history = History(self._cluster.job)
                self._cluster.start()
                save(self._cluster, self._history)
            newest = self._history.saves[-1].version
            found = self._run(case)
            outcome = "nothing to recover, as the files say"
            if found is not None:
                outcome = f"step {found.container.step} recovered"
                outcome += ", the one of before" if found == newest else ", the one being saved"
            ok = True
        except Exception as error:
            logs = self._cluster.logs() if self._cluster is not None else ""
            outcome, ok = f"{type(error).__name__}: {error}\n{logs}", False
            self._drop()
        fault = f"kill {case.death} in {case.during}"
        point = case.point + (f":{case.nth}" if case.nth > 1 else "")
        return Line(fault, point, self._noticed_s, outcome, self._lost if ok else None, ok, time.monotonic() - began)

    # -- the course of a case

    @property
    def _made(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    def _run(self, case: Case) -> ContainerVersion | None:
        made, victim = self._made, self._made.nodes[case.victim]
        if case.during == "recover":
            course = self._begin_recovery(victim, case)
        elif case.during == "heal":
            course = self._begin_healing(victim, case)
        elif case.during == "restart":
            course = self._begin_restart(victim, case)
        else:
            course = self._begin_save(victim, case)
        self._die(victim, case)
        is_lost = case.during in ("recover", "heal")
        lost_memory = case.death == "node" or is_lost
        beyond = case.death == "node" and is_lost and case.victim != 2
        if case.death == "agent":
            # Nobody else is started again: the trainers go on as soon as there is an agent.
            made.start_agents([victim])
            if case.during == "restart" and victim.touched_bytes() > MAX_TOUCHED:
                raise CaseFailedError(f"the restarted agent touched {victim.touched_bytes()} bytes of its store")
            course.end(END_S)
        else:
            for node in made.nodes:
                node.kill_trainer()
            course.join(END_S)
            made.start_agents([node for node in made.nodes if node.agent is None])
            made.enter()
        if case.during == "heal" and not beyond:
            # Before anything is loaded, which would bring it to every node.
            newest = self._history.saves[-1].version
            wait_until(lambda: is_healed(made.nodes, newest, 2), f"{newest} has all its copies again", HEALED_S)
        found = check_recovery(made, self._history, lost_memory=lost_memory, beyond=beyond)
        self._lost = self._history.lost(found)
        newest = save(made, self._history).version
        for node in made.nodes:
            # Also for the next case: who does not know that it is protected would go on with it.
            mark = node.paths.manifest_of(newest) / "protected"
            wait_until(mark.exists, f"{node.node_id} knows that {newest} is protected", ORDER_S)
            self._check_order(node)
        return found

    def _check_order(self, node: Node) -> None:
        """At the latest a moment after a save, nothing is reserved, and the index is what the files are."""

        end = time.monotonic() + ORDER_S
        while True:
            try:
                return check_index(node)
            except (CaseFailedError, FileNotFoundError):
                if time.monotonic() > end:
                    raise
            time.sleep(0.02)

    def _point(self, case: Case) -> str:
        return f"{case.point}:{case.nth}=stop"

    def _arm_agent(self, victim: Node, case: Case) -> None:
        victim.kill_agent()
        victim.launch_agent("" if case.is_trainers else self._point(case))

    def _begin_save(self, victim: Node, case: Case) -> Course:
        """A save is under way, and will get to the point."""
        made = self._made
        if case.is_trainers:
            made.enter({victim.node_id: self._point(case)})
            if case.during == "alone":
                victim.kill_agent()
        else:
            self._arm_agent(victim, case)
            victim.wait_agent()
            made.enter()
        # Memory of earlier saves is used again: a segment is made only for what is larger than all of them.
        self._large += (1 << 20) if case.point == "reserve.created" else 0
        return Course(lambda: save(made, self._history, self._large))

    def _begin_recovery(self, victim: Node, case: Case) -> Course:
        """n2 was lost with its memory, and its replacement brings everything back."""
        made = self._made
        for node in made.nodes:
            node.kill_trainer()
        made.nodes[2].lose()
        self._arm_agent(victim, case)
        if victim is not made.nodes[2]:
            made.nodes[2].launch_agent()
        victim.wait_agent()
        made.nodes[2].wait_agent()

        def work() -> None:
            made.enter({victim.node_id: self._point(case)} if case.is_trainers else {})
            if case.point == "lookup.kept" and victim.trainer is not None:
                # Who looks up elsewhere may give it the manifest before it fetches that itself.
                victim.trainer.do("lookup")
            recover(made)

        return Course(work)

    def _begin_healing(self, victim: Node, case: Case) -> Course:
        """n2 was lost with its memory, and its replacement is given what it had, while nobody loads anything."""
        made = self._made
        for node in made.nodes:
            node.kill_trainer()
        self._arm_agent(victim, case)
        victim.wait_agent()
        made.nodes[2].lose()
        made.nodes[2].launch_agent()
        made.nodes[2].wait_agent()
        return Course(made.enter)

    def _begin_restart(self, victim: Node, case: Case) -> Course:
        """The agent was killed, and its trainer waits for the next one."""
        made = self._made
        self._arm_agent(victim, case)

        def work() -> None:
            made.all_do("wait_connected", deadline_s=END_S)

        return Course(work)

    def _die(self, victim: Node, case: Case) -> None:
        """As soon as the process stands at the point."""
        armed: Process | None = None
        end = time.monotonic() + REACH_S
        while armed is None and time.monotonic() < end:
            # A trainer that is to be stopped may be just being started.
            armed = victim.trainer if case.is_trainers else victim.agent
        assert armed is not None
        if not stop_reached(armed, case.point, REACH_S):
            raise CaseFailedError(f"{case.point} was not reached: {''.join(armed.lines[-6:])}")
        killed_at = time.monotonic()
        agent, trainer = victim.agent, victim.trainer
        if case.death in ("agent", "both"):
            victim.kill_agent()
        if case.death in ("trainer", "both"):
            victim.kill_trainer()
        if case.death == "node":
            victim.lose()
        if armed.is_running:
            armed.signal(signal.SIGCONT)
        if case.death == "trainer" and agent is not None and agent.is_running:
            wait_until(lambda: agent.heard_after(killed_at, "trainer gone") is not None, "its death is noticed", 10)
            self._noticed_s = agent.heard_after(killed_at, "trainer gone")
        if case.death == "agent" and case.during != "restart" and trainer is not None:
            wait_until(lambda: trainer.heard_after(killed_at, "lost the agent") is not None, "its death is noticed", 10)
            self._noticed_s = trainer.heard_after(killed_at, "lost the agent")
