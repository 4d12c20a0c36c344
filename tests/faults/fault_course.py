"""What a job does while a fault is made: saves and recoveries of all its ranks, in a thread, as far as they get."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from fault_model import History, Save, newest_recoverable
from fault_nodes import CaseFailedError, Cluster, Trainer
from fault_trainer import LARGE

from replicator.ids import CheckpointContainerId, ContainerVersion

OUTCOME_S = 60.0
ANSWERING_S = 15.0


class Course:
    """Runs in a thread of its own from the start; `end` waits for it. `error` is what stopped it, if something did."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: Exception | None = None
        self.result: Any = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error

    def end(self, deadline_s: float) -> Any:
        """What the work returned. Raises what it raised, or CaseFailedError when it goes on for too long."""
        self.join(deadline_s)
        if self.error is not None:
            raise self.error
        return self.result

    def join(self, deadline_s: float) -> None:
        """Wait for it, whatever comes of it. Raises CaseFailedError when it goes on for too long."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise CaseFailedError(f"a save or a recovery did not end within {deadline_s:.0f} s")


def save(made: Cluster, history: History, large: int = LARGE) -> Save:
    """All ranks save the next step; the end is its protection.

    Args:
        large: bytes of the largest object of each rank.

    Raises:
        CaseFailedError: a rank could not do its part, or died.
    """
    made.step += 1
    step, trainers = made.step, made.trainers
    coordinator = trainers[0]
    generation = coordinator.do("begin", step=step)
    one = history.begin(step, generation)
    for trainer in trainers:
        trainer.start("write", step=step, generation=generation, large=large)
    # All answers are taken, so that none is left over for the next question.
    answers = [trainer.ask() for trainer in trainers]
    entries = [entry for answer in answers for entry in _ok(answer)["entries"]]
    one.commit_asked = True
    coordinator.do("commit", step=step, generation=generation, entries=entries, replicas=made.replicas)
    for what in ("committed", "protected"):
        said = coordinator.do("outcome", step=step, generation=generation, what=what, deadline_s=OUTCOME_S)
        if said != "yes":
            raise CaseFailedError(f"{one.version} is not {what}: {said}")
        setattr(one, what, True)
    for trainer in trainers:
        trainer.start("copies", deadline_s=OUTCOME_S)
    for answer in [trainer.ask() for trainer in trainers]:
        if _ok(answer)["errors"]:
            raise CaseFailedError(f"{one.version} is protected, and its copies failed: {_ok(answer)['errors']}")
    return one


def recover(made: Cluster) -> ContainerVersion | None:
    """All ranks ask what to load, get the same answer, and load it, every byte compared. Returns what they loaded."""
    end = time.monotonic() + ANSWERING_S
    while True:
        plans = _all(made.trainers, "lookup")
        # A lookup asks once: whose agent has just been started again may be known to others at its old address.
        if not any(plan["unanswered"] for plan in plans) or time.monotonic() > end:
            break
    for plan in plans[1:]:
        # Of each object a copy may have come to one more node between two answers.
        names, others = ([name for name, *_ in one["sources"]] for one in (plan, plans[0]))
        if names != others or any(plan[key] != plans[0][key] for key in ("step", "generation")):
            raise CaseFailedError(f"ranks got different plans: {plans[0]} and {plan}")
    if plans[0]["step"] is None:
        return None
    loads = _all(made.trainers, "load", all_objects=True)
    if any(load["loaded"] != len(plans[0]["sources"]) for load in loads):
        raise CaseFailedError(f"not everything was loaded: {loads}")
    return ContainerVersion(CheckpointContainerId(made.job, plans[0]["step"]), plans[0]["generation"])


def check_recovery(
    made: Cluster, history: History, *, lost_memory: bool, beyond: bool = False
) -> ContainerVersion | None:
    """Recover, and hold what was found against the files and the history. Returns what was found.

    Args:
        lost_memory: a node died with its memory.
        beyond: more nodes died than there are copies: nothing is promised but the truth.
    """
    before = newest_recoverable(made.nodes)
    found = recover(made)
    after = newest_recoverable(made.nodes)
    history.check(found, before, lost_memory, beyond)
    if found not in (before, after):
        raise CaseFailedError(f"{found} was found, while {before} and then {after} were the newest by the files")
    return found


def _all(trainers: list[Trainer], name: str, **arguments: Any) -> list[dict[str, Any]]:
    for trainer in trainers:
        trainer.start(name, **arguments)
    return [_ok(answer) for answer in [trainer.ask() for trainer in trainers]]


def _ok(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise CaseFailedError(f"{answer['error']}: {answer['message']}")
    return answer["ok"]
