"""Bad input to replicator-admin: one clear line, the documented exit status, never a traceback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from admin_cli import admin, admin_json, command, environment, one_error_line

from replicator.errors import KINDS
from replicator.version import version

MANUAL = Path(__file__).parents[2] / "docs" / "admin.md"


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        ((), 2, "required: COMMAND"),
        (("stats",), 2, "invalid choice: 'stats'"),
        (("status", "--bogus"), 2, "unrecognized arguments: --bogus"),
        (("status", "--deadline", "soon"), 2, "expected 0.1..86400 seconds, found 'soon'"),
        (("--deadline", "nan", "status"), 2, "expected 0.1..86400 seconds, found 'nan'"),
        (("status", "--deadline", "-1"), 2, "argument --deadline"),
        (("--agent", "nowhere", "status"), 2, "--agent: expected host:port or unix:PATH, found 'nowhere'"),
        (("--agent", "h:99999", "status"), 2, "--agent: expected host:port or unix:PATH"),
        (("--agent", "unix:/" + "x" * 200, "status"), 2, "a unix socket's path has at most 107 bytes"),
        (("--agent", "127.0.0.1:1", "--tls-ca", "/nowhere", "status"), 2, "must be given together"),
        (("ls", "a b"), 2, "job id contains ' '"),
        (("ls", "../etc"), 2, "expected a step like 'step-100_ckpt'"),
        (("ls", "job/step-x"), 2, "expected a step like 'step-100_ckpt'"),
        (("inspect", "job/step-10"), 2, "expected an object id like 'my-job/step-100_ckpt/__0_0.distcp'"),
        (("inspect", "job/step-10/../../x"), 2, "path traversal"),
        (("inspect",), 2, "required: OBJECT"),
        (("recover", "job"), 2, "add --dry-run"),
        (("recover", "job/x", "--dry-run"), 2, "job id contains '/'"),
        (("recover", "job", "--dry-run", "--step", "-1"), 2, "--step"),
        (("recover", "job", "--dry-run", "--step", "x"), 2, "expected a step from 0 to"),
        (("pull", "job/step-1_ckpt"), 2, "required: DIR"),
        (("pull", "job", "/tmp/x"), 2, "expected a container id like 'my-job/step-100_ckpt'"),
        (("pull", "job/step-1", ""), 2, "expected a directory to write to"),
        (("pull", "job/step-1", "/dev/null"), 2, "/dev/null exists and is not a directory"),
        (("pull", "job/step-1", "/nowhere/below"), 2, "/nowhere is not a directory; create it first"),
        (("pull", "job/step-1", "/etc"), 2, "/etc is not empty"),
    ],
)
def test_wrong_usage(args: tuple[str, ...], status: int, message: str) -> None:
    done = admin(*args)
    assert done.returncode == status
    assert message in one_error_line(done)
    assert done.stdout == ""


def test_error_is_an_object_with_json() -> None:
    status, found = admin_json("inspect", "job")
    assert status == 2
    assert found["error"].pop("message").startswith("expected an object id like")
    assert found == {"schema_version": 1, "command": "inspect", "error": {"kind": "InvalidIdError", "exit_code": 2}}
    status, found = admin_json("status", "--bogus")
    assert (status, found["error"]["kind"]) == (2, "ConfigError")


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"socket": 1}', '{"socket": "/s", "pid": "x", "node_id": "n"}']
)
def test_no_agent_in_the_root(shm_root: Path, content: str | None) -> None:
    if content is not None:
        (shm_root / "agent.json").write_text(content)
    for done in (admin("--root", shm_root, "status"), admin("status", REPLICATOR_ROOT=str(shm_root))):
        assert done.returncode == 4
        assert f"start one with: replicator-agent --root {shm_root}" in one_error_line(done)


def test_agent_that_is_gone_but_left_its_record(shm_root: Path) -> None:
    (shm_root / "agent.json").write_text(f'{{"socket": "{shm_root}/agent.sock", "pid": 7, "node_id": "n1"}}')
    done = admin("--root", shm_root, "ls")
    assert done.returncode == 4
    assert f"the agent of {shm_root} (n1, pid 7) does not answer" in one_error_line(done)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    done = admin("--agent", address, "nodes")
    assert done.returncode == 4
    assert f"the agent at {address} does not answer" in one_error_line(done)


def test_an_interrupt_while_the_command_is_loaded() -> None:
    """One line and status 130, also before anything of the command runs."""
    program = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'replicator.admin.printers': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from replicator.admin.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "version"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 130
    assert done.stdout == ""
    assert one_error_line(done) == "interrupted; nothing was begun"


def test_listener_that_is_mute() -> None:
    """F15: accepts and never says anything; the error names who was awaited and for how long."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = admin("--agent", address, "--deadline", "0.5", "status")
    assert done.returncode == 9
    assert one_error_line(done) == (
        f"waited 0.5 s for its status from the agent at {address}, in vain; "
        "see that it runs and is not stopped, or allow more time"
    )


def test_host_that_does_not_exist() -> None:
    done = admin("--agent", "no-such-host.invalid:7070", "--deadline", "5", "status")
    assert done.returncode in (4, 9)
    one_error_line(done)


def test_version_is_light_and_needs_no_agent() -> None:
    """Start-up matters: neither gRPC nor rich nor protobuf nor torch is loaded to print a version."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "replicator.admin", "version", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "replicator" in loaded
    assert not loaded & {"grpc", "google", "rich", "torch", "numpy"}
    assert f'"version": "{version()}"' in done.stdout


def test_commands_do_not_load_torch() -> None:
    script = (
        "import sys; from replicator.admin.cli import main; main(['status']); main(['ls', 'demo']); "
        "import grpc, replicator.wire; from replicator.admin import connection, printers, views, progress; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), timeout=60, check=False, capture_output=True
    )
    assert done.returncode == 0, done


def test_options_may_stand_on_either_side_of_the_command(shm_root: Path) -> None:
    assert one_error_line(admin("--root", shm_root, "status")) == one_error_line(admin("status", "--root", shm_root))


# The second fails already, and its error object cannot be printed either.
@pytest.mark.parametrize("arguments", [("version",), ("ls", "a b", "--json"), ("version", "--json")])
def test_output_without_a_reader_is_no_traceback(arguments: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command(*arguments), stdout=write_end, stderr=subprocess.PIPE, env=environment(), timeout=60, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("arguments", [("version",), ("version", "--json"), ("ls", "a b", "--json")])
@pytest.mark.parametrize(
    ("output", "reason"),
    [("> /dev/full", b"No space left on device"), (">&-", b"it is closed")],
    ids=["full", "closed"],
)
def test_output_that_takes_nothing_is_one_line(arguments: tuple[str, ...], output: str, reason: bytes) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {output}', "sh", *command(*arguments)],
        stderr=subprocess.PIPE,
        env=environment(),
        timeout=60,
        check=False,
    )
    expected = b"replicator-admin: error: the result cannot be written to stdout: " + reason + b"\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_help_of_every_command() -> None:
    names = re.findall(r"^    ([a-z]+) +\w", admin("--help").stdout, re.MULTILINE)
    assert set(names) >= {"status", "nodes", "ls", "inspect", "recover", "pull", "demo", "version"}
    for name in names:
        assert admin(name, "--help").returncode == 0


def test_manual_lists_every_error_with_its_exit_status() -> None:
    rows = re.findall(r"^\| (\d) \|.*\|(.*)\|$", MANUAL.read_text(), re.MULTILINE)
    listed = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+Error)`", names)}
    # The rest never reaches an operator: local to the trainer, or between agents.
    hidden = {"ReplicatorError", "ObjectExistsError", "SegmentError", "TicketError", "ForkedClientError"}
    assert {**listed, "InternalError": 1} == {
        "InternalError": 1,
        **{name: kind.exit_code for name, kind in KINDS.items() if name not in hidden},
    }
