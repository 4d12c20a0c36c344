"""The agent as a process: start, publication, signals, crashes, restarts, and errors at the start."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from agent_harness import AgentProcess, environment, running_agent, trainer, wait_until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from replicator.store.paths import open_root
from replicator.v1 import admin_pb2, admin_pb2_grpc


def health_of(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return int(reply.status)


def status_of(target: str) -> admin_pb2.StatusReply:
    with grpc.insecure_channel(target) as channel:
        return admin_pb2_grpc.AdminServiceStub(channel).Status(admin_pb2.StatusRequest(), timeout=10)


def one_line_error(root: Path, *flags: str) -> tuple[int, str]:
    """Exit status and the one line on stderr (beside log lines) of an agent that cannot start."""
    agent = AgentProcess(root, *flags)
    try:
        status = agent.wait()
    finally:
        agent.close()
    lines = [line for line in agent.output if not line.startswith("{")]
    assert len(lines) == 1, agent.output
    assert lines[0].startswith("replicator-agent: ")
    assert "Traceback" not in "".join(agent.output)
    return status, lines[0]


def test_a_ready_agent_is_published_and_serves(shm_root: Path) -> None:
    """F35: what agent.json says was bound. F33: the interface that its address belongs to is logged."""
    with running_agent(shm_root, "--node-id", "n1") as agent:
        told = "peers reach this agent through lo"
        if not any(told in line["message"] for line in agent.lines):
            agent.wait_log(told)
        record = agent.record
        assert record["pid"] == agent.process.pid
        assert record["node_id"] == "n1"
        assert record["socket"] == str(shm_root / "agent.sock")
        for target in (f"unix:{record['socket']}", record["grpc_address"]):
            assert health_of(target) == health_pb2.HealthCheckResponse.SERVING
            status = status_of(target)
            assert status.node.identity.node_id == "n1"
            assert status.node.identity.incarnation == record["incarnation"]
            assert status.node.grpc_address == record["grpc_address"]
            assert status.bulk_address == record["bulk_address"]
            assert status.root == str(shm_root)
            assert status.filesystem == "tmpfs"
        assert stat.S_IMODE(os.stat(record["socket"]).st_mode) == 0o600
        with socket.create_connection(record["bulk_address"].rsplit(":", 1), timeout=10):
            pass
        assert agent.process.stdout is not None
        assert agent.terminate() == 0
        assert agent.process.stdout.read() == ""


def test_local_service_is_not_served_to_peers(shm_root: Path) -> None:
    """What a trainer may ask (reserve, seal, commit) is no business of other nodes."""
    with running_agent(shm_root) as agent, grpc.insecure_channel(agent.record["grpc_address"]) as channel:
        begin = channel.unary_unary("/replicator.v1.LocalService/Begin")
        with pytest.raises(grpc.RpcError) as caught:
            begin(b"", timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_leaves_a_tidy_root(shm_root: Path, number: signal.Signals) -> None:
    with running_agent(shm_root) as agent, trainer(shm_root) as one:
        one.attach(agent)
        agent.signal(number)
        ending = one.do("wait_end")
        assert "stopping" in ending
        assert agent.wait() == 0
        assert not (shm_root / "agent.json").exists()
        assert not (shm_root / "agent.sock").exists()
        assert "Traceback" not in "".join(agent.output)


def test_killed_agent_is_replaced_on_the_same_root(shm_root: Path) -> None:
    with running_agent(shm_root) as agent:
        before = agent.record
        agent.kill()
        assert agent.record == before
    with running_agent(shm_root) as agent:
        assert agent.record["incarnation"] != before["incarnation"]
        assert health_of(f"unix:{agent.socket}") == health_pb2.HealthCheckResponse.SERVING


def test_long_root_gets_a_short_socket_in_a_private_directory(shm_root: Path, tmp_path: Path) -> None:
    """The path of a unix socket has at most 107 bytes; what a killed agent left in the temp directory goes too."""
    root = shm_root / ("x" * 100)
    temporary = Path("/tmp") / f"replicator-test-{os.getpid()}"
    temporary.mkdir()
    env = environment(TMPDIR=str(temporary))
    try:
        with running_agent(root, env=env) as agent:
            path = Path(agent.socket)
            assert path.is_relative_to(temporary)
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert health_of(f"unix:{path}") == health_pb2.HealthCheckResponse.SERVING
            agent.kill()
            assert path.exists()
        with running_agent(root, env=env) as agent:
            assert not path.parent.exists()
            assert agent.terminate() == 0
        assert list(temporary.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", str(temporary)], check=True)


def test_root_in_use_by_another_agent(shm_root: Path) -> None:
    with running_agent(shm_root) as agent:
        status, line = one_line_error(shm_root)
        assert status == 5
        assert "another agent uses" in line
        assert health_of(f"unix:{agent.socket}") == health_pb2.HealthCheckResponse.SERVING
        assert agent.record["pid"] == agent.process.pid


def test_root_with_something_in_the_way(shm_root: Path) -> None:
    (shm_root / "segments").write_text("")
    status, line = one_line_error(shm_root)
    assert status == 5
    assert str(shm_root) in line


def test_soft_limit_of_descriptors_is_raised(shm_root: Path) -> None:
    """A thousand nodes are a thousand connections; the soft limit that a shell gives is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What this process has open must fit.
    least = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, max(1024, least)), hard))
    try:
        agent = AgentProcess(shm_root)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        agent.wait_ready()
        limits = Path(f"/proc/{agent.process.pid}/limits").read_text()
        found = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3]
        assert int(found) == (min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536)
    finally:
        agent.close()


def test_taken_port(shm_root: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        status, line = one_line_error(shm_root, "--port", str(other.getsockname()[1]))
        assert status == 2
        assert "Address already in use" in line
        status, line = one_line_error(shm_root, "--bulk-port", str(other.getsockname()[1]))
        assert status in (2, 5)
        assert "ddress already in use" in line
    assert not (shm_root / "agent.json").exists()


def test_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, line = one_line_error(tmp_path / "file" / "root")
    assert status == 5
    assert "--root" in line


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--bind", "0.0.0.0"], "insecure = true"),
        (["--lane", "pigeon"], "expected one of auto, bulk, grpc"),
        (["--prot", "1"], "unrecognized arguments: --prot"),
        (["--config", "/nonexistent.toml"], "cannot read the configuration file"),
        (["--tls-cert", "/a", "--tls-key", "/b", "--tls-ca", "/c"], "tls_ca: cannot read /c"),
    ],
)
def test_wrong_settings(shm_root: Path, flags: list[str], text: str) -> None:
    status, line = one_line_error(shm_root, *flags)
    assert status == 2
    assert text in line


def test_root_on_a_disk_is_allowed_with_a_warning(tmp_path: Path) -> None:
    filesystem = subprocess.run(
        ["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    if filesystem == "tmpfs":
        pytest.skip("the temp directory is a tmpfs")
    agent = AgentProcess(tmp_path / "root")
    try:
        assert agent.wait_log("not on a tmpfs")["level"] == "warning"
        agent.wait_ready()
    finally:
        agent.close()


def test_idle_agent_ends_once_no_trainer_lives(shm_root: Path) -> None:
    """An agent that a job started for itself does not outlive the job for ever; a trainer keeps it."""
    open_root(shm_root, create=True)
    with trainer(shm_root) as one:
        # Before the agent starts: it must not be idle however long the trainer takes.
        one.do("hold")
        agent = AgentProcess(shm_root, "--idle-exit-s", "0.5")
        try:
            agent.wait_ready()
            one.do("attach", socket=agent.socket)
            one.do("detach")
            with pytest.raises(subprocess.TimeoutExpired):
                agent.process.wait(1.2)
            one.kill()
            agent.wait_log("the agent ends")
            assert agent.wait() == 0
            assert not (shm_root / "agent.json").exists()
        finally:
            agent.close()


def test_second_signal_does_not_wait_for_calls(shm_root: Path) -> None:
    with running_agent(shm_root) as agent:
        agent.signal(signal.SIGTERM)
        agent.wait_log("told to stop")
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 0


def test_the_agent_never_imports_torch(shm_root: Path) -> None:
    code = (
        "import sys, pkgutil, importlib, replicator.agent as a\n"
        "for m in pkgutil.iter_modules(a.__path__): importlib.import_module(f'replicator.agent.{m.name}')\n"
        "heavy = {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
    times = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import replicator.agent"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert "torch" not in times
    assert "grpc" not in times


def test_flags_are_the_settings() -> None:
    """A setting without its flag would have to be found out by reading code."""
    import dataclasses

    from replicator.agent.__main__ import parser
    from replicator.config import AgentConfig

    flags = set(parser().format_help().replace(",", " ").split())
    for item in dataclasses.fields(AgentConfig):
        assert f"--{item.name.replace('_', '-')}" in {flag.strip("[]") for flag in flags}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from replicator.agent.__main__ import main

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("replicator-agent ")


def test_trainers_are_counted(shm_root: Path) -> None:
    with running_agent(shm_root) as agent, trainer(shm_root) as one:
        target = f"unix:{agent.socket}"
        assert status_of(target).clients == 0
        one.attach(agent)
        assert status_of(target).clients == 1
        one.kill()
        wait_until(lambda: status_of(target).clients == 0, "the dead trainer is noticed")


def test_agents_with_tls_speak_to_each_other_only(shm_root: Path, certificates: Path) -> None:
    """Mutual TLS: no bulk lane in the clear, and no call without a certificate of the authority."""
    files = {
        name: str(certificates / file) for name, file in (("ca", "ca.pem"), ("cert", "node.pem"), ("key", "node.key"))
    }
    flags = [word for name, file in files.items() for word in (f"--tls-{name}", file)]
    with (
        running_agent(shm_root / "n1", "--node-id", "n1", *flags) as first,
        running_agent(shm_root / "n2", "--node-id", "n2", *flags, "--peers", first.record["grpc_address"]) as second,
        trainer(shm_root / "n2") as rank,
    ):
        assert first.record["bulk_address"] == ""
        rank.attach(second)
        request = {"job": "job", "epoch": 1, "members": [], "replicas": 1}
        assert rank.do("call", method="JoinJob", request=request) == {"buddy_node_ids": ["n1"]}
        with pytest.raises(grpc.RpcError) as caught:
            status_of(first.record["grpc_address"])
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        credentials = grpc.ssl_channel_credentials(*(Path(files[name]).read_bytes() for name in ("ca", "key", "cert")))
        with grpc.secure_channel(first.record["grpc_address"], credentials) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            assert stub.Status(admin_pb2.StatusRequest(), timeout=10).node.identity.node_id == "n1"
