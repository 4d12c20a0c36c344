"""A process that was started by one with a session may take part in it; nobody else may."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from replicator.client import inherit
from replicator.client.session_spec import SessionSpec
from replicator.ids import AgreedPlacement, NodeAddress, NodeIdentity

SPEC = SessionSpec(
    root="/dev/shm/x",
    job="job",
    epoch=3,
    members=(NodeAddress(NodeIdentity("n0", 2**63), "h:1", (("zone", "a"), ("rack", "r"))),),
    replicas=1,
    deadline_s=5.0,
    auto_start=False,
    idle_exit_s=None,
    placement=AgreedPlacement("explicit", (), (("n0", ("n1",)),)),
    nonce="word",
)
READ = "import sys; from replicator.client.inherit import inherited; sys.stdout.write(repr(inherited()))"
GRANDCHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {READ!r}], check=True)"


def in_a_child(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout


def test_only_a_child_of_the_process_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inherit.VARIABLE, "")
    assert inherit.inherited() is None
    inherit.announce(SPEC.to_json())
    assert inherit.inherited() is None, "the process itself"
    assert eval(in_a_child(READ)) == SPEC.to_json()
    assert in_a_child(GRANDCHILD) == "None"
    inherit.withdraw(SPEC.to_json() + b" ")
    assert inherit.VARIABLE in os.environ, "another session's"
    inherit.withdraw(SPEC.to_json())
    assert inherit.VARIABLE not in os.environ


def test_a_child_begins_no_other_job_by_a_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: it may be the job of a session that the process which started it has beside the one it told."""
    monkeypatch.setenv(inherit.VARIABLE, "")
    inherit.announce(SPEC.to_json())
    code = """
from replicator.client.session import current_session, known_session
from replicator.errors import ConfigError
assert known_session("other") is None
try:
    current_session("other")
except ConfigError as error:
    print(error)
"""
    told = in_a_child(code)
    assert "expected job job, of which this process has a session, found job other" in told
    assert "replicator.init('other')" in told


def test_a_session_is_told_with_all_that_is_known_of_it() -> None:
    told = SessionSpec.from_json(SPEC.to_json())
    assert told == SPEC
    assert told.members[0].labels == SPEC.members[0].labels


def test_too_much_to_be_told_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inherit.VARIABLE, "")
    inherit.announce(os.urandom(inherit.MAX_CHARS))
    code = """
from replicator.client.inherit import inherited
from replicator.errors import UnsupportedError
try:
    inherited()
except UnsupportedError as error:
    print(error)
"""
    assert "very many nodes" in in_a_child(code)
    for damaged in (f"{os.getpid()}:x", f"{os.getpid()}:eHg=", "x:eHg=", "junk"):
        monkeypatch.setenv(inherit.VARIABLE, damaged)
        assert in_a_child(READ) == "None"
