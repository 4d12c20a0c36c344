"""Named points at which a test may have this process die or stand still. For tests only.

Off, a point costs one look at a module's variable. `REPLICATOR_FAULTPOINT=name[:nth]=action` in the environment of a
process turns one of them on: the nth time (the first, when not given) that it gets there it does `action`: `kill` (it
sends itself SIGKILL), `stop` (SIGSTOP; it goes on after SIGCONT) or `note` (it only says so). `*=note` says of every
point when it is reached first. What is said is one line on stderr: `faultpoint NAME`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from replicator.errors import ConfigError

VARIABLE = "REPLICATOR_FAULTPOINT"
EVERY = "*"
ACTIONS = ("kill", "stop", "note")

POINTS: Mapping[str, str] = {
    "reserve.created": "agent: a segment is allocated, and nobody has it yet",
    "reserve.mapped": "trainer: it has mapped the segment",
    "write.copied": "trainer: bytes of an object are in the segment",
    "write.ended": "trainer: all bytes and the trailer are in the segment",
    "seal.before_rename": "the segment is about to get the object's name",
    "seal.after_rename": "the object has its name, and the agent does not know",
    "seal.indexed": "agent: the index has the object, and the trainer was not told",
    "replicate.offering": "owner's agent: an offer is about to be sent",
    "replicate.received": "buddy's agent: the offer is there, and pulls have begun",
    "pull.serving": "holder's agent: it sends a part of an object",
    "pull.block": "receiver's agent: a block is here, and verified",
    "pull.verified": "receiver's agent: all blocks are here, and the object is not sealed",
    "pull.sealed": "receiver's agent: the copy is sealed, and nobody was told",
    "ingest.written": "receiver's agent: small objects are written, and none has its name",
    "ingest.named": "receiver's agent: one of several small objects has its name",
    "replicate.acknowledged": "owner's agent: a buddy has verified copies",
    "commit.asking": "trainer: the coordinator is about to hand the manifest to its agent",
    "commit.storing": "coordinator's agent: the manifest is about to be stored",
    "commit.stored": "coordinator's agent: the manifest is stored here, and sent to nobody",
    "commit.received": "member's agent: the manifest is stored here, and the coordinator does not know",
    "commit.sent": "coordinator's agent: one more member has stored the manifest",
    "commit.enough": "coordinator's agent: it is committed, and nobody was told",
    "protect.reporting": "owner's agent: all copies are made, and the coordinator is about to be told",
    "protect.reported": "coordinator's agent: an owner's copies are all made",
    "protect.marking": "coordinator's agent: the mark is about to be written",
    "protect.marked": "coordinator's agent: the mark is written, and nobody was told",
    "protect.received": "member's agent: the mark is written here, and the coordinator does not know",
    "protect.spread": "coordinator's agent: one more member was told",
    "drop.unlisted": "agent: the manifest of a superseded container is gone, and its objects are not",
    "drop.recycled": "agent: one object of a superseded container is recycled",
    "epoch.stored": "agent: the new epoch of a job is stored, and nobody was told",
    "lookup.answered": "agent: all inventories and manifests are here",
    "lookup.kept": "agent: the manifest of what is going to be loaded is stored here",
    "heal.planned": "holder's agent: it knows which lost copies it is to make again, and none is begun",
    "heal.told": "holder's agent: the new holder has the manifest of what it is to get, and no copy",
    "heal.copied": "holder's agent: lost copies are made again, and it has not taken note",
    "heal.settled": "holder's agent: a container has all its copies again, and nobody was told",
    "load.planned": "trainer: it has the plan",
    "load.retrieved": "trainer: all objects are on its node, and nothing is loaded",
    "restart.rebuilding": "agent: one more object is in the index",
    "restart.rebuilt": "agent: the index is whole, and nobody is served",
    "restart.publishing": "agent: peers are served, and agent.json is about to be written",
    "restart.resumed": "agent: unfinished commits are taken up",
}


@dataclass(slots=True)
class _Armed:
    """What the environment asked for."""

    name: str
    nth: int
    action: str
    seen: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self, name: str) -> None:
        if self.name not in (name, EVERY):
            return
        with self.lock:
            count = self.seen[name] = self.seen.get(name, 0) + 1
        if count != self.nth:
            return
        # One write, so that lines of several threads do not mix.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"faultpoint {name}\n".encode())
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(self.action)
        if number is not None:
            # To this thread: it goes no further, while a signal to the process may be handled by another one.
            signal.pthread_kill(threading.get_ident(), number)


def parse(text: str) -> _Armed | None:
    """What the variable asks for; None when it is empty.

    Raises:
        ConfigError: it is not of the form `name[:nth]=action`, or there is no such point or action.
    """
    if not text:
        return None
    point, _, action = text.partition("=")
    name, _, nth = point.partition(":")
    known = name in POINTS or (name == EVERY and action == "note")
    if not known or action not in ACTIONS or not (nth or "1").isdecimal() or nth == "0":
        raise ConfigError(
            f"{VARIABLE}: expected name[:nth]=kill|stop|note with a name like {next(iter(POINTS))}, or *=note, "
            f"found {text!r}"
        )
    return _Armed(name, int(nth or 1), action)


_armed = parse(os.environ.get(VARIABLE, ""))


def reach(name: str) -> None:
    """The process is at this point. Nothing happens unless the environment asked for it."""
    if _armed is not None:
        _armed.reached(name)
