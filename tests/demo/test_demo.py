"""The demo, once, as a user runs it; and its parts that can be told apart."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import ADMIN, run

from replicator.demo.cli import PREFIX, add_arguments
from replicator.demo.events import Event, Inbox, Reporter
from replicator.demo.facts import Facts, differing_losses, pulled
from replicator.demo.options import DemoOptions
from replicator.errors import ConfigError
from replicator.local_cluster.processes import descendants, die_with_parent, kill_now
from replicator.local_cluster.workspace import SHM, workspace

DEMO = [sys.executable, "-m", "replicator.admin", "demo"]


def workspaces_in(text: str) -> set[Path]:
    """The workspaces that the demo's own lines name: others may run on this machine at the same time."""
    return {SHM / name for name in re.findall(f"{SHM}/({PREFIX}[^/ ]+)/", text)}


def of_workspace(work: Path) -> list[int]:
    """Ids of processes whose command line names the workspace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(work).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.timeout(300)
def test_demo_recovers_bit_for_bit_from_peers() -> None:
    """Node 0 is lost, with the coordinator rank on it; the numbers agree with each other (F05, F06, F10, F11)."""
    ran = subprocess.run(
        [*DEMO, "--json", "--lose", "0", "--steps", "9", "--save-every", "3", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["ok"] is True
    assert told["problems"] == []
    assert told["bitwise_equal"] is True
    assert told["source"] == "peers"
    assert told["nodes"] == 3
    assert told["lost_node"] == "node-0"
    assert told["replacement_node"] == "node-3"
    assert told["recovered_step"] == told["last_committed_step"] == told["newest_recoverable_step"]
    assert told["recovered_step"] % told["save_every"] == 0
    assert told["recovered_step"] <= told["lost_at_step"]
    assert 0 < told["objects_pulled"] <= told["objects_in_checkpoint"] * 3
    assert told["bytes_pulled"] > 4 << 20
    assert "node-0" not in told["source_nodes"]
    assert 0 < told["recovery_seconds"] < told["downtime_seconds"] < told["total_seconds"]
    # Every rank reported every step at least once, and those after the recovered step twice or as far as it got.
    assert told["losses_compared"] >= 9 * 3
    (work,) = workspaces_in(ran.stdout + ran.stderr)
    assert not work.exists(), "the demo left memory behind"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_it_is_stopped(number: signal.Signals) -> None:
    """Every process of the demo ends with its driver, however that ends; memory too, unless it was SIGKILL."""
    text = ""
    driver = subprocess.Popen([*DEMO], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert driver.stdout is not None
    try:
        for line in driver.stdout:
            text += line
            if "torchrun started" in line:
                break
        (work,) = workspaces_in(text)
        assert len(of_workspace(work)) >= 6, "three agents and three torchruns"
        driver.send_signal(number)
        driver.wait(60)
        assert driver.returncode in (130, 143, -signal.SIGKILL)
        deadline = time.monotonic() + 20
        while of_workspace(work) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert of_workspace(work) == []
        assert work.exists() == (number == signal.SIGKILL)
    finally:
        driver.kill()
        driver.wait()


def test_what_a_killed_demo_left_is_removed_by_the_next() -> None:
    with workspace(PREFIX, 1, keep=False) as other:
        left = SHM / f"{PREFIX}left"
        left.mkdir(exist_ok=True)
        (left / "driver.lock").touch()
        kept = SHM / f"{PREFIX}kept-by-user"
        kept.mkdir(exist_ok=True)
        (kept / "driver.lock").touch()
        (kept / "kept").touch()
        try:
            with workspace(PREFIX, 1, keep=False):
                assert not left.exists()
                assert kept.exists(), "asked to be kept"
                assert other.exists(), "in use"
        finally:
            (kept / "kept").unlink()
    with workspace(PREFIX, 1, keep=False):
        assert not kept.exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--nodes", "1"],
        ["--replicas", "0"],
        ["--replicas", "3"],
        ["--lose", "3"],
        ["--lose-at-step", "4"],
        ["--lose-at-step", "24"],
        ["--steps", "5"],
        ["--save-every", "0"],
        ["--seed", "-1"],
        ["--deadline-s", "nan"],
    ],
)
def test_wrong_options_are_one_line(options: list[str]) -> None:
    ran = run(ADMIN, ["demo", *options], os.environ)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1
    assert options[0] in ran.stderr


def test_fate_is_drawn_from_the_seed_and_never_at_a_save() -> None:
    fates = {(DemoOptions(seed=seed).lost_node, DemoOptions(seed=seed).lost_at_step) for seed in range(40)}
    assert {node for node, _ in fates} == {0, 1, 2}
    assert len({step for _, step in fates}) > 3
    assert all(step % 4 and 4 < step < 24 for _, step in fates)
    assert DemoOptions(seed=7).lost_at_step == DemoOptions(seed=7).lost_at_step
    assert DemoOptions(steps=3, save_every=1).lost_at_step == 2


def test_defaults_of_the_command_line_are_those_of_the_options() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = vars(parser.parse_args([]))
    assert given.pop("json") is False
    assert DemoOptions(**given) == DemoOptions()


def test_reports_survive_their_sender(shm_root: Path) -> None:
    """A rank that is killed right after it reported has reported."""
    inbox = Inbox(shm_root / "events")
    child = os.fork()
    if child == 0:
        Reporter(str(shm_root / "events"), "node-9", 2).send("step", step=3, loss=(0.1).hex())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (event,) = inbox.drain()
    assert (event.kind, event.node, event.rank, event.pid) == ("step", "node-9", 2, child)
    assert float.fromhex(event.fields["loss"]) == 0.1
    inbox.close()


def test_kill_reaches_every_descendant() -> None:
    sleep = "import time; time.sleep(60)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, preexec_fn=die_with_parent)
    deadline = time.monotonic() + 20
    while not descendants(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    (grandchild,) = descendants(process.pid)
    assert kill_now([process]) == [process.pid, grandchild]
    assert process.returncode == -signal.SIGKILL
    while Path(f"/proc/{grandchild}/stat").exists() and time.monotonic() < deadline:
        # The grandchild is collected by init; a zombie is as dead.
        if Path(f"/proc/{grandchild}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.02)
    assert time.monotonic() < deadline


def step(rank: int, number: int, loss: float) -> Event:
    return Event("step", f"node-{rank}", rank, 1, 0.0, {"step": number, "loss": loss.hex()})


def test_one_other_bit_of_one_loss_is_found() -> None:
    """Also where a later incarnation gave the right one: every report counts."""
    reference, job = Facts(), Facts()
    for facts in (reference, job):
        for number in (1, 2):
            facts.apply(step(0, number, 1.5))
    assert differing_losses(job, reference) == []
    job.apply(step(0, 2, 1.5 + 2**-52))
    (line,) = differing_losses(job, reference)
    assert line.startswith("step 2, rank 0")
    reference.apply(step(0, 3, 1.5))
    assert differing_losses(job, reference)[-1] == "step 3, rank 0: never reported"


def test_recovery_is_the_first_epoch_in_which_all_restored() -> None:
    facts = Facts()
    items = [{"name": "a", "bytes": 5, "source": "node-0", "lane": "bulk", "whole": True}]
    for epoch, rank in ((2, 0), (3, 0), (3, 1), (4, 0), (4, 1)):
        fields = {"epoch": epoch, "step": 10 * epoch, "pulled": items * 2}
        facts.apply(Event("restored", f"node-{rank}", rank, 1, 0.0, fields))
    recovery = facts.first_recovery(2)
    assert [(event.rank, event.fields["epoch"]) for event in recovery] == [(0, 3), (1, 3)]
    assert facts.first_recovery(3) == []
    assert len(pulled(recovery)) == 2, "one object on each of two nodes"


def test_nonsense_options_are_refused_by_the_type_too() -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        DemoOptions(nodes=17)
