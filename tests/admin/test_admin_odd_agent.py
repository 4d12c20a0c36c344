"""replicator-admin against an agent that lies, stalls, or is of another kind. Nothing half-written, ever."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from admin_cli import OddAgent, admin, admin_json, command, environment, one_error_line, source_of

from replicator.v1 import admin_pb2, types_pb2

DATA = {".metadata": b"meta", "__0_0.distcp": bytes(range(256)) * 9000, "empty": b"", "loader/state.0": b"x"}


@pytest.fixture
def agent(shm_root: Path) -> Iterator[OddAgent]:
    with OddAgent(shm_root) as odd:
        yield odd


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_pull_writes_the_bytes_and_nothing_else(agent: OddAgent, out: Path) -> None:
    agent.offer(DATA)
    status, found = admin_json("pull", "job/step-10", out, "--root", agent.root)
    assert status == 0, found
    assert tree(out) == DATA
    assert entries(out.parent) == ["out"]
    assert {oct(path.stat().st_mode & 0o777) for path in out.rglob("*") if path.is_file()} == {"0o600"}
    assert (found["container"], found["epoch"], found["objects"]) == ("job/step-10_ckpt", 1, 4)
    assert found["size_bytes"] == sum(map(len, DATA.values()))
    assert found["read_from"] == {"n1": 4}


def test_pull_into_an_empty_directory_keeps_its_mode(agent: OddAgent, out: Path) -> None:
    out.mkdir()
    out.chmod(0o750)
    agent.offer(DATA)
    assert admin("pull", "job/step-10", out, "--root", agent.root).returncode == 0
    assert tree(out) == DATA
    assert out.stat().st_mode & 0o777 == 0o750


def test_pull_takes_the_next_source_when_one_gives_other_bytes(agent: OddAgent, out: Path) -> None:
    """F01: wrong bytes, too few, too many, and an error in the middle; the next source is good."""
    agent.offer(DATA, sources=("flips", "short", "long", "fails", "good"))
    right = agent.streams["ReadObject"]

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        node = source_of(request)
        pieces = list(right(request, context))
        if node == "flips":
            pieces = [piece[:-1] + bytes([piece[-1] ^ 1]) for piece in pieces]
        if node == "short":
            pieces = pieces[:-1]
        if node == "long":
            pieces.append(b"more")
        yield from pieces[:1]
        if node == "fails":
            context.set_trailing_metadata((("replicator-error-kind", "PeerUnavailableError"),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "node fails went away")
        yield from pieces[1:]

    agent.streams["ReadObject"] = read
    status, found = admin_json("pull", "job/step-10", out, "--root", agent.root)
    assert status == 0, found
    assert tree(out) == DATA
    # The empty object has no bytes to flip, and none to cut.
    assert found["read_from"] == {"flips": 1, "good": 3}


def test_pull_that_finds_no_good_copy_leaves_nothing(agent: OddAgent, out: Path) -> None:
    """F01, F05: every source is named with its reason."""
    agent.offer(DATA)
    agent.streams["ReadObject"] = lambda request, context: iter([b"junk"])
    done = admin("pull", "job/step-10", out, "--root", agent.root)
    assert done.returncode == 6
    message = one_error_line(done)
    assert ".metadata could not be read from any of its sources: n1: expected CRC32C" in message
    assert "n2: expected CRC32C" in message
    assert entries(out.parent) == []


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\0b", "", "a//b"])
def test_names_from_the_agent_are_never_paths(agent: OddAgent, out: Path, name: str) -> None:
    """F38."""
    agent.offer({name: b"evil"})
    done = admin("pull", "job/step-10", out, "--root", agent.root)
    assert done.returncode == 2
    assert "object name" in one_error_line(done)
    assert entries(out.parent) == []


def test_names_that_exclude_each_other(agent: OddAgent, out: Path) -> None:
    agent.offer({"a": b"file", "a/b": b"needs a directory"})
    done = admin("pull", "job/step-10", out, "--root", agent.root)
    assert done.returncode == 5
    one_error_line(done)
    assert entries(out.parent) == []


@pytest.mark.parametrize("count", [0, 1])
def test_stream_that_stalls_is_given_up(agent: OddAgent, out: Path, count: int) -> None:
    """F15, F47: no piece within the deadline, at the start or in the middle."""
    agent.offer(DATA, sources=("n1",))
    released = threading.Event()

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from [b"m"][:count]
        context.add_callback(released.set)
        released.wait(30)

    agent.streams["ReadObject"] = read
    done = admin("pull", "job/step-10", out, "--root", agent.root, "--deadline", "0.5")
    assert done.returncode == 9
    assert "waited 0.5 s for the bytes of .metadata from the agent of" in one_error_line(done)
    assert entries(out.parent) == []
    assert released.wait(10), "the abandoned call was not cancelled"


def test_slow_stream_that_goes_on_is_not_given_up(agent: OddAgent, out: Path) -> None:
    """F47: the deadline is for progress, not for the whole."""
    data = b"0123456789"
    agent.offer({"a": data})

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for byte in data:
            threading.Event().wait(0.15)
            yield bytes([byte])

    agent.streams["ReadObject"] = read
    assert admin("pull", "job/step-10", out, "--root", agent.root, "--deadline", "1").returncode == 0
    assert tree(out) == {"a": data}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_in_the_middle_of_a_pull_leaves_nothing(
    agent: OddAgent, out: Path, number: signal.Signals, status: int
) -> None:
    """F05."""
    agent.offer(DATA)
    reading, released = threading.Event(), threading.Event()

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"m"
        context.add_callback(released.set)
        reading.set()
        released.wait(30)

    agent.streams["ReadObject"] = read
    with subprocess.Popen(
        command("pull", "job/step-10", out, "--root", agent.root),
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert reading.wait(30)
        assert entries(out.parent) == [f"out.partial-{process.pid}"]
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert errors.count("\n") == 1
    assert errors.startswith("replicator-admin: error: ")
    assert output == ""
    assert entries(out.parent) == []


def test_target_that_comes_to_be_while_pulling_is_not_touched(agent: OddAgent, out: Path) -> None:
    agent.offer({"a": b"data"})
    right = agent.streams["ReadObject"]

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        out.mkdir()
        (out / "precious").write_text("mine")
        yield from right(request, context)

    agent.streams["ReadObject"] = read
    done = admin("pull", "job/step-10", out, "--root", agent.root)
    assert done.returncode == 5
    assert f"cannot write {out}: Directory not empty" in one_error_line(done)
    assert tree(out.parent) == {"out/precious": b"mine"}


def test_no_room_is_told_before_the_first_byte(agent: OddAgent, out: Path) -> None:
    agent.offer({"a": b"data"})
    plan = types_pb2.Plan.FromString(agent.unary["Recover"](b"", None))  # type: ignore[arg-type]
    plan.sources[0].size_bytes = 1 << 60
    agent.unary["Recover"] = lambda request, context: plan.SerializeToString()
    done = admin("pull", "job/step-10", out, "--root", agent.root)
    assert done.returncode == 5
    assert f"bytes free and {1 << 60} are needed" in one_error_line(done)
    assert entries(out.parent) == []


def test_plan_for_another_step_is_refused(agent: OddAgent, out: Path) -> None:
    """F09: a plan is for what was asked."""
    agent.offer(DATA)
    done = admin("pull", "job/step-11", out, "--root", agent.root)
    assert done.returncode == 1
    assert "expected a plan for job/step-11_ckpt, found one for job/step-10_ckpt" in one_error_line(done)
    assert entries(out.parent) == []


def test_nothing_recoverable_is_not_found_with_the_reason(agent: OddAgent, out: Path) -> None:
    plan = types_pb2.Plan(reason="Step 0 of job job cannot be restored: no node answered.")
    asked: list[admin_pb2.RecoverRequest] = []

    def recover(request: bytes, context: grpc.ServicerContext) -> bytes:
        asked.append(admin_pb2.RecoverRequest.FromString(request))
        return plan.SerializeToString()

    agent.unary["Recover"] = recover
    done = admin("pull", "job/step-0", out, "--root", agent.root)
    assert done.returncode == 3
    assert plan.reason in one_error_line(done)
    assert (asked[0].has_step, asked[0].step) == (True, 0)
    status, found = admin_json("recover", "job", "--dry-run", "--root", agent.root)
    assert (status, found["found"], found["chosen"], found["reason"]) == (3, False, None, plan.reason)
    assert not asked[1].has_step
    admin("recover", "job", "--dry-run", "--step", "0", "--root", agent.root)
    assert (asked[2].has_step, asked[2].step) == (True, 0)
    assert admin("ls", "job/step-0", "--root", agent.root).returncode == 3


@pytest.mark.parametrize(
    ("kind", "status"),
    [("NotFoundError", 3), ("StaleEpochError", 8), ("CorruptObjectError", 6), ("OfTheFutureError", 1)],
)
def test_error_of_the_agent_keeps_its_kind(agent: OddAgent, kind: str, status: int) -> None:
    def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("replicator-error-kind", kind),))
        context.abort(grpc.StatusCode.ABORTED, "so it is\nand so on")
        raise AssertionError

    agent.unary["ListContainers"] = fail
    done = admin("ls", "--root", agent.root)
    assert done.returncode == status
    assert one_error_line(done) == "so it is and so on"


def test_service_that_is_no_agent(agent: OddAgent) -> None:
    done = admin("status", "--root", agent.root)
    assert done.returncode == 2
    assert "is it an older version?" in one_error_line(done)


def test_text_from_nodes_cannot_steer_the_terminal(agent: OddAgent) -> None:
    reply = admin_pb2.ListContainersReply()
    reply.containers.add(
        container=types_pb2.ContainerRef(job="job", step=1, generation=1),
        reason="\x1b[2Jgone\r[red]not red[/red]\n\x07",
    )
    reply.unanswered.add(node_id="n\x1b]0;title\x07", reason="\u202eslow")
    agent.unary["ListContainers"] = lambda request, context: reply.SerializeToString()
    done = admin("ls", "--root", agent.root)
    assert done.returncode == 0, done
    assert "job/step-1_ckpt@0.1: ?[2Jgone [red]not red[/red] ?" in done.stdout
    assert not set("\x1b\x07\r\u202e") & set(done.stdout)


def read_all(descriptor: int) -> str:
    data = b""
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:
            break
        if not piece:
            break
        data += piece
    return data.decode(errors="replace")


def test_progress_bar_on_a_terminal_when_it_takes_longer(agent: OddAgent, out: Path) -> None:
    agent.offer({"a": b"ab"})

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"a"
        threading.Event().wait(1.2)
        yield b"b"

    agent.streams["ReadObject"] = read
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command("pull", "job/step-10", out, "--root", agent.root, "--json"),
        env=environment(TERM="xterm-256color", COLUMNS="120"),
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    ) as process:
        os.close(theirs)
        shown = read_all(ours)
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["objects"] == 1
    os.close(ours)
    assert process.returncode == 0
    assert "pulling job/step-10_ckpt" in shown


def test_long_wait_says_what_for_on_a_terminal(agent: OddAgent) -> None:
    """F15: nobody stares at a silent terminal."""

    def slow(request: bytes, context: grpc.ServicerContext) -> bytes:
        threading.Event().wait(1.3)
        return admin_pb2.NodesReply().SerializeToString()

    agent.unary["Nodes"] = slow
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command("nodes", "--root", agent.root),
        env=environment(TERM="xterm", COLUMNS="200"),
        stderr=theirs,
        stdout=subprocess.DEVNULL,
    ) as process:
        os.close(theirs)
        shown = read_all(ours)
    os.close(ours)
    assert process.returncode == 0
    assert "waiting for the status of all nodes from the agent of" in shown


def test_terminal_gets_frames_and_a_pipe_plain_rows(agent: OddAgent) -> None:
    name = "n" * 100
    reply = admin_pb2.NodesReply()
    reply.nodes.add(node=types_pb2.NodeAddress(identity=types_pb2.NodeIdentity(node_id=name), grpc_address="h:1"))
    agent.unary["Nodes"] = lambda request, context: reply.SerializeToString()
    assert any(line.split()[:2] == [name, "h:1"] for line in admin("nodes", "--root", agent.root).stdout.splitlines())
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command("nodes", "--root", agent.root), env=environment(TERM="xterm", COLUMNS="100"), stdout=theirs
    ) as process:
        os.close(theirs)
        shown = read_all(ours)
    os.close(ours)
    assert process.returncode == 0
    assert "╭" in shown


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=False, capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield path
    subprocess.run(["umount", path], check=True)


def test_disk_that_fills_up_in_the_middle(agent: OddAgent, small_disk: Path) -> None:
    """F22: an error with its reason, and the space that was taken is given back."""
    agent.offer({"a": bytes(800_000)})
    filler = small_disk / "filler"

    def read(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield bytes(400_000)
        filler.write_bytes(bytes(500_000))
        yield bytes(400_000)

    agent.streams["ReadObject"] = read
    done = admin("pull", "job/step-10", small_disk / "out", "--root", agent.root)
    assert done.returncode == 5
    assert "No space left on device" in one_error_line(done)
    assert entries(small_disk) == ["filler"]


def test_mount_point_is_refused_before_copying(agent: OddAgent, small_disk: Path) -> None:
    agent.offer(DATA)
    done = admin("pull", "job/step-10", small_disk, "--root", agent.root)
    assert done.returncode == 2
    assert "is a mount point" in one_error_line(done)


def test_output_in_a_narrow_encoding(agent: OddAgent) -> None:
    reply = admin_pb2.ListContainersReply()
    reply.unanswered.add(node_id="n1", reason="d\u00e9lai \u2192")
    agent.unary["ListContainers"] = lambda request, context: reply.SerializeToString()
    done = admin("ls", "--root", agent.root, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done
    assert "No answer from n1: d\\xe9lai \\u2192" in done.stdout
