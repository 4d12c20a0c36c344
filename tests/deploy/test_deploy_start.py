"""The real agent starts with exactly the flags and environment of each deployment file, and answers its probes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from deploy_files import (
    DEPLOY,
    Launch,
    docker_launch,
    kubernetes_launch,
    manifest,
    run_probe,
    running,
    substituted,
    systemd_launch,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from replicator.client.local_agent import LocalAgent
from replicator.config import parse_size


def health(address: str) -> int:
    """What the health service says of the whole server, as a gRPC probe asks it."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return int(reply.status)


SERVING = int(health_pb2.HealthCheckResponse.SERVING)


def test_docker(shm_root: Path) -> None:
    """The image without arguments; only the store's place and, against other agents here, the address are others."""
    launch = substituted(docker_launch(), {"/replicator": str(shm_root)})
    launch.environ["REPLICATOR_BIND"] = "127.0.73.1"
    with running(launch, shm_root) as record:
        assert record.grpc_address == "127.0.73.1:7070"
        assert record.bulk_address == "127.0.73.1:7071"
        assert health(record.grpc_address) == SERVING
        probed = run_probe(launch)
        assert probed.returncode == 0, probed.stderr
    assert run_probe(launch).returncode == 4, "the health check is content with an agent that is gone"


def test_systemd(shm_root: Path, tmp_path: Path) -> None:
    """The unit's ExecStart and Environment with the example configuration."""
    example = (DEPLOY / "systemd" / "agent.toml").read_text()
    store = shm_root / "store"
    for old, new in {"/run/replicator/store": str(store), "10.0.0.17": "127.0.73.2"}.items():
        assert old in example
        example = example.replace(old, new)
    config = tmp_path / "agent.toml"
    config.write_text(example)
    store.mkdir(mode=0o700)
    launch = substituted(systemd_launch(), {"/etc/replicator/agent.toml": str(config)})
    with running(launch, store) as record:
        assert record.grpc_address == "127.0.73.2:7070"
        assert health(record.grpc_address) == SERVING


@pytest.fixture
def large_mount(shm_root: Path) -> Iterator[None]:
    """The store is on a tmpfs as large as the budget asks for, whatever this machine has; nothing of it is used."""
    (container,) = manifest("DaemonSet")["spec"]["template"]["spec"]["containers"]
    budget = next(one["value"] for one in container["env"] if one["name"] == "REPLICATOR_BUDGET_BYTES")
    size = parse_size(budget)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(shm_root)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield
    subprocess.run(["umount", "-l", str(shm_root)], check=True)


@pytest.fixture
def pod(shm_root: Path, large_mount: None) -> Launch:
    """The DaemonSet's container on a node "worker.example". Cluster DNS does not exist here; that must not matter."""
    launch = kubernetes_launch({"status.podIP": "127.0.73.3", "spec.nodeName": "worker.example"})
    return substituted(launch, {'"/replicator"': f'"{shm_root}"'})


def test_kubernetes(pod: Launch, shm_root: Path) -> None:
    """Starts although the service's name does not resolve (F34), and both probes pass."""
    assert "svc.cluster.local" in pod.environ["REPLICATOR_DNS_NAME"]
    with running(pod, shm_root) as record:
        assert record.node_id == "worker.example"
        assert record.grpc_address == "127.0.73.3:7070"
        assert record.bulk_address == "127.0.73.3:7071"
        (container,) = manifest("DaemonSet")["spec"]["template"]["spec"]["containers"]
        assert health(f"127.0.73.3:{container['readinessProbe']['grpc']['port']}") == SERVING
        probed = run_probe(pod)
        assert probed.returncode == 0, probed.stderr


def test_trainer_pod_finds_the_agent(pod: Launch, shm_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example pod's REPLICATOR_SOCKET names the agent of its node; nothing is started for it."""
    (container,) = manifest("Pod", "trainer-example.yaml")["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "REPLICATOR_SOCKET"
    with running(pod, shm_root) as record:
        assert record.socket == variable["value"].replace("/replicator", str(shm_root))
        agent = LocalAgent(Path(record.socket).parent, auto_start=False)
        try:
            assert agent.node.node_id == "worker.example"
        finally:
            agent.close()


def test_console_scripts_are_the_programs_of_the_files() -> None:
    """What the files call by name is what the package installs."""
    for launch in (docker_launch(), systemd_launch()):
        name = Path(launch.command[0]).name
        assert os.access(Path(sys.executable).with_name(name), os.X_OK), name
