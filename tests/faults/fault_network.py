"""Network faults between real agents: lost packets, cut links, slow links, vanished peers, and mute ones.

Trainers reach the agent of their node by its unix socket, which no network fault touches. In each case one promise is
held against the clock: who must notice does so within what the configuration promises, and no trainer waits for a peer.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fault_course import check_recovery, save
from fault_model import History, Save, check_index, newest_recoverable
from fault_net import Network
from fault_nodes import CaseFailedError, Cluster, Node, wait_until
from fault_table import Line
from fault_trainer import LARGE

from replicator.config import AgentConfig
from replicator.ids import ContainerVersion

CONFIG = AgentConfig(deadline_s=6.0)
DEADLINE_S = CONFIG.deadline_s
# On a busy machine a process may not run for so long.
SLACK_S = 1.5
# A save, as a trainer calls it, waits for the agent of its own node at most, and never for a peer.
BLOCKED_S = 1.0
# What lacks a copy is offered again after one deadline, then after two.
AGAIN_S = 4 * DEADLINE_S
SUSPECT_S = 1.25 * CONFIG.health_interval_s + CONFIG.rpc_deadline_s + SLACK_S
DEAD_S = 1.25 * DEADLINE_S + SLACK_S
LOOKUP_S = CONFIG.lookup_deadline_s + SLACK_S


@dataclass(frozen=True, slots=True)
class NetworkCase:
    """One fault. `run` makes it, and returns (seconds until it was noticed, what came of it)."""

    fault: str
    point: str
    run: Callable[[Faults], tuple[float | None, str]]
    replicas: int = 1

    @property
    def name(self) -> str:
        return f"network/{self.fault.replace(' ', '-')}"


class Faults:
    """Runs cases on three nodes in namespaces, as long as each leaves them in order. A context manager."""

    def __init__(self) -> None:
        self.net: Network
        self._cluster: Cluster | None = None
        self._resources = contextlib.ExitStack()
        self.history: History

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def _drop(self) -> None:
        self._cluster = None
        self._resources.close()

    @property
    def made(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    def run(self, case: NetworkCase) -> Line:
        began = time.monotonic()
        noticed_s: float | None = None
        try:
            if self._cluster is None or self._cluster.replicas != case.replicas:
                self._drop()
                self._new_cluster(case.replicas)
            noticed_s, outcome = case.run(self)
            for node in self.made.nodes:
                _until_passes(lambda: check_index(node), 10)  # noqa: B023
                _until_passes(lambda: _all_alive(node), 2 * DEAD_S)  # noqa: B023
            ok = True
        except Exception as error:
            logs = self._cluster.logs() if self._cluster is not None else ""
            outcome, ok = f"{type(error).__name__}: {error}\n{logs}", False
            self._drop()
        return Line(case.fault, case.point, noticed_s, outcome, 0 if ok else None, ok, time.monotonic() - began)

    def _new_cluster(self, replicas: int) -> None:
        self.net = Network(3)
        self._resources.callback(self.net.close)
        self.net.build()
        self._cluster = Cluster(
            3,
            DEADLINE_S,
            flags=lambda index: ("--bind", self.net.address(index), "--insecure", "--congestion", "reno"),
            prefix=self.net.prefix,
            replicas=replicas,
        )
        self._resources.callback(self._cluster.close)
        self.history = History(self.made.job)
        self.made.start()
        save(self.made, self.history)

    # -- what cases are made of

    def begin_save(self) -> Save:
        """All ranks write, and the coordinator commits. Raises CaseFailedError when one of these calls was blocked."""
        made = self.made
        made.step += 1
        coordinator = made.trainers[0]
        generation = coordinator.do("begin", step=made.step)
        one = self.history.begin(made.step, generation)
        written = made.all_do("write", step=made.step, generation=generation)
        entries = [entry for found in written for entry in found["entries"]]
        one.commit_asked = True
        commit_s = coordinator.do(
            "commit", step=made.step, generation=generation, entries=entries, replicas=made.replicas
        )
        slowest = max(commit_s, *(found["seconds"] for found in written))
        if slowest > BLOCKED_S + SLACK_S:
            raise CaseFailedError(f"a trainer waited {slowest:.1f} s while it saved")
        return one

    def until(self, one: Save, what: str, deadline_s: float) -> None:
        """Wait until the save is `committed` or `protected`."""
        step, generation = one.version.container.step, one.version.generation
        said = self.made.trainers[0].do("outcome", step=step, generation=generation, what=what, deadline_s=deadline_s)
        if said != "yes":
            raise CaseFailedError(f"{one.version} is not {what} within {deadline_s:.0f} s: {said}")
        setattr(one, what, True)

    def heard(self, who: int, text: str, of: int, since: float, promise_s: float) -> float:
        """Wait until the agent of a node says something of another; after how long it did."""
        agent = self.made.nodes[who].agent
        assert agent is not None
        peer = f"peer=n{of}"

        def said() -> float | None:
            lines = [(at, line) for at, line in list(agent.heard) if at >= since and text in line and peer in line]
            return lines[0][0] - since if lines else None

        wait_until(lambda: said() is not None, f"n{who} says of n{of}: {text}", promise_s + 5)
        after = said()
        assert after is not None
        if after > promise_s:
            raise CaseFailedError(f"n{who} noticed after {after:.1f} s, promised are {promise_s:.1f} s")
        return after

    def lookup_without(self, who: int, silent: set[str]) -> Any:
        """The plan of one node, in time, in which the silent nodes are named."""
        trainer = self.made.nodes[who].trainer
        assert trainer is not None
        plan = trainer.do("lookup")
        if plan["seconds"] > LOOKUP_S:
            raise CaseFailedError(f"a lookup took {plan['seconds']:.1f} s, promised are {LOOKUP_S:.1f} s")
        if set(plan["unanswered"]) != silent:
            raise CaseFailedError(f"expected {silent} to be named as silent, found {plan['unanswered']}")
        return plan

    @contextlib.contextmanager
    def nothing_deleted(self) -> Iterator[None]:
        """What is committed stays where it is, on all nodes; a lost copy may be made anew on another one meanwhile."""
        newest = newest_recoverable(self.made.nodes)
        assert newest is not None
        before = [_held(node, newest) for node in self.made.nodes]
        yield
        for node, held in zip(self.made.nodes, before, strict=True):
            gone = held - _held(node, newest)
            if gone:
                raise CaseFailedError(f"{', '.join(sorted(gone))} of {newest} went from {node.node_id}")

    def recovered(self, one: Save) -> None:
        """After it is over, all ranks find and load that save."""
        _until_passes(lambda: self._all_answer(), DEAD_S)
        found = check_recovery(self.made, self.history, lost_memory=False)
        if found != one.version:
            raise CaseFailedError(f"{found} was found, and {one.version} is the newest")

    def _all_answer(self) -> None:
        for trainer in self.made.trainers:
            silent = trainer.do("lookup")["unanswered"]
            if silent:
                raise CaseFailedError(f"{silent} do not answer yet")


def _held(node: Node, version: ContainerVersion) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return {path.name for path in node.paths.objects_of(version).iterdir()}
    return set()


def _all_alive(node: Node) -> None:
    """The node believes of both others that they are alive."""
    believed = {peer.node.identity.node_id: peer.state for peer in node.status().peers}
    if sorted(believed.values()) != ["alive", "alive"]:
        raise CaseFailedError(f"{node.node_id} still believes {believed}")


def _until_passes(check: Callable[[], None], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while True:
        try:
            return check()
        except (CaseFailedError, FileNotFoundError):
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


# -- the cases


def _one_is_away(
    faults: Faults, begin: Callable[[], None], end: Callable[[], None], sees: set[str]
) -> tuple[float, str]:
    """n1, the buddy of n0, cannot be reached by n0. A save during that is committed, and protected afterwards."""
    since = time.monotonic()
    with faults.nothing_deleted():
        begin()
        one = faults.begin_save()
        noticed_s = faults.heard(0, "a peer is suspect", 1, since, SUSPECT_S)
        faults.until(one, "committed", DEADLINE_S)
        plan = faults.lookup_without(0, sees)
        if plan["step"] is None:
            raise CaseFailedError(f"nothing was found: {plan['reason']}")
        faults.heard(0, "a peer is dead", 1, since, DEAD_S)
    end()
    healed = time.monotonic()
    faults.until(one, "protected", AGAIN_S)
    again_s = time.monotonic() - healed
    faults.recovered(one)
    return noticed_s, f"saved and committed meanwhile; protected {again_s:.1f} s after it was over"


def _dropped(faults: Faults) -> tuple[float, str]:
    return _one_is_away(faults, lambda: faults.net.cut(0, 1), faults.net.heal, {"n1"})


def _asymmetric(faults: Faults) -> tuple[float, str]:
    return _one_is_away(faults, lambda: faults.net.drop(1, 0), faults.net.heal, {"n1"})


def _link_down(faults: Faults) -> tuple[float, str]:
    return _one_is_away(faults, lambda: faults.net.link(1, "down"), faults.net.heal, {"n1"})


def _mute(faults: Faults) -> tuple[float, str]:
    """Its kernel accepts connections and acknowledges bytes; the process never answers."""
    agent = faults.made.nodes[1].agent
    assert agent is not None
    return _one_is_away(faults, lambda: agent.signal(signal.SIGSTOP), lambda: agent.signal(signal.SIGCONT), {"n1"})


def _partition(faults: Faults) -> tuple[float, str]:
    """n2 alone on one side: each side knows what it misses, and keeps what it has."""
    # What was loaded before is on all nodes; this one is only where it was saved and copied to.
    newest = save(faults.made, faults.history)
    since = time.monotonic()
    with faults.nothing_deleted():
        faults.net.isolate(2)
        noticed_s = max(
            faults.heard(0, "a peer is dead", 2, since, DEAD_S), faults.heard(2, "a peer is dead", 0, since, DEAD_S)
        )
        most = faults.lookup_without(0, {"n2"})
        alone = faults.lookup_without(2, {"n0", "n1"})
        # Alone it has an older one at most, of which it had loaded all.
        step = newest.version.container.step
        if most["step"] != step or alone["step"] == step:
            raise CaseFailedError(
                f"two of three nodes find {most['step']}, the third {alone['step']}, saved was {step}"
            )
        if "n0" not in alone["reason"]:
            raise CaseFailedError(f"who is missing is not said: {alone['reason']}")
    faults.net.heal()
    faults.recovered(newest)
    return noticed_s, "two nodes find the newest without the third, which says whom it misses; nothing deleted"


def _half_open(faults: Faults) -> tuple[float, str]:
    """n1's process dies while its cable is out: nobody gets a FIN, and what comes back is another process."""
    node = faults.made.nodes[1]
    since = time.monotonic()
    faults.net.link(1, "down")
    node.kill_agent()
    noticed_s = faults.heard(0, "a peer is suspect", 1, since, SUSPECT_S)
    node.launch_agent()
    node.wait_agent()
    faults.net.heal()
    up = time.monotonic()
    one = faults.begin_save()
    faults.until(one, "protected", AGAIN_S)
    again_s = time.monotonic() - up
    faults.recovered(one)
    return noticed_s, f"a save is protected {again_s:.1f} s after another process is there"


def _limited(faults: Faults) -> tuple[None, str]:
    """A copy takes longer than every deadline, and moves all the time (F47)."""
    size = LARGE + 4 * 3000
    rate = int(size * 8 / (1.7 * DEADLINE_S))
    for index in range(3):
        faults.net.limit(index, rate)
    failed = _counter(faults, "replica_attempts_failed")
    began = time.monotonic()
    one = faults.begin_save()
    faults.until(one, "protected", 4 * DEADLINE_S)
    took_s = time.monotonic() - began
    for index in range(3):
        faults.net.unlimit(index)
    if took_s < DEADLINE_S:
        raise CaseFailedError(f"it took {took_s:.1f} s only, so the link was not slow")
    if _counter(faults, "replica_attempts_failed") != failed:
        raise CaseFailedError("an attempt was given up, although it moved")
    faults.recovered(one)
    return None, f"copied in {took_s:.1f} s with deadlines of {DEADLINE_S:.0f} s, at the first attempt"


def _counter(faults: Faults, name: str) -> int:
    return sum(int(node.status().counters.get(name, 0)) for node in faults.made.nodes)


def _switch(faults: Faults, break_source: Callable[[int], None], mend: Callable[[int], None]) -> tuple[float, str]:
    """n2 comes back empty, and brings everything from n0 and n1, one of which goes away in the middle."""
    made, net = faults.made, faults.net
    lost = made.nodes[2]
    for node in made.nodes:
        node.kill_trainer()
    lost.lose()
    made.start_agents([lost])
    made.enter()
    for index in (0, 1):
        net.limit(index, 16_000_000)
    trainer = lost.trainer
    assert trainer is not None
    plan = trainer.do("lookup")
    first = next(sources[1] for sources in plan["sources"] if sources[0] == "n2-large")
    source = int(first[1:])
    trainer.start("load")
    wait_until(lambda: _received(lost) > (1 << 20), "n2 has received something", DEADLINE_S)
    since = time.monotonic()
    break_source(source)
    loaded = trainer.result()
    took_s = time.monotonic() - since
    mend(source)
    for index in (0, 1):
        net.unlimit(index)
    other = f"n{1 - source}"
    if other not in loaded["pulled_from"]:
        raise CaseFailedError(f"n{source} was gone, and everything came from {loaded['pulled_from']}")
    # Silence is a failure after one deadline; then all of it comes from the other one.
    if took_s > DEADLINE_S + 2 * 8 * LARGE / 16_000_000 + SLACK_S:
        raise CaseFailedError(f"it took {took_s:.1f} s to load after the source was gone")
    _until_passes(lambda: faults._all_answer(), DEAD_S)
    one = save(made, faults.history)
    faults.recovered(one)
    return took_s, f"n{source} went away in the middle; the rest came from {other}"


def _received(node: Node) -> int:
    """Bytes that lie in the segment which its agent fills."""
    return sum(path.stat().st_blocks * 512 for path in node.paths.segments.glob("w.agent-*"))


def _switch_cut(faults: Faults) -> tuple[float, str]:
    return _switch(faults, lambda source: faults.net.cut(source, 2), lambda source: faults.net.heal())


def _switch_mute(faults: Faults) -> tuple[float, str]:
    def tell(source: int, number: int) -> None:
        agent = faults.made.nodes[source].agent
        assert agent is not None
        agent.signal(number)

    return _switch(faults, lambda source: tell(source, signal.SIGSTOP), lambda source: tell(source, signal.SIGCONT))


CASES = (
    NetworkCase("packets dropped", "save, owner and buddy", _dropped),
    NetworkCase("packets dropped one way", "save, buddy to owner", _asymmetric),
    NetworkCase("link down", "save, buddy", _link_down),
    NetworkCase("peer mute", "save, buddy", _mute),
    NetworkCase("partition", "lookup, one of three nodes", _partition),
    NetworkCase("half-open connections", "save, buddy", _half_open),
    NetworkCase("slow link", "save, all links", _limited),
    NetworkCase("link cut in a pull", "recover, first source", _switch_cut, replicas=2),
    NetworkCase("source mute in a pull", "recover, first source", _switch_mute, replicas=2),
)
