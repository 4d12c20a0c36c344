"""The deployment files agree with each other and with the promises made about them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from deploy_files import DEPLOY, SOURCE, docker_launch, dockerfile, final_stage, manifest, manifests, unit
from packaging.requirements import Requirement

from replicator.config import load_config


def pod_spec() -> dict[str, Any]:
    spec: dict[str, Any] = manifest("DaemonSet")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (only,) = pod_spec()["containers"]
    result: dict[str, Any] = only
    return result


def test_image_has_no_torch_and_no_root() -> None:
    needed = [Requirement(text) for text in metadata.requires("replicator") or []]
    always = {one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
    assert "grpcio" in always
    assert not always & {"torch", "numpy"}
    assert not [rest for _, rest in dockerfile() if "torch" in rest]
    (user,) = (rest for name, rest in final_stage() if name == "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that runAsNonRoot can be checked"
    assert not [rest for name, rest in final_stage() if name == "RUN" and "apt-get" in rest], "a compiler would stay"


def test_image_is_stopped_and_checked() -> None:
    names = [name for name, _ in final_stage()]
    assert "HEALTHCHECK" in names
    assert ("STOPSIGNAL", "SIGTERM") in final_stage()
    launch = docker_launch()
    ports = {launch.environ["REPLICATOR_PORT"], launch.environ["REPLICATOR_BULK_PORT"]}
    (exposed,) = (rest for name, rest in final_stage() if name == "EXPOSE")
    assert set(exposed.split()) == ports


@pytest.mark.timeout(300)
def test_what_the_image_copies_is_enough_to_build(tmp_path: Path) -> None:
    """The build stage, without Docker: only what COPY brings, less what the ignore file takes away."""
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for sources in (rest.split()[:-1] for name, rest in dockerfile() if name == "COPY" and "--from" not in rest):
        for source in sources:
            assert f"!{source}" in ignored
            if (SOURCE / source).is_dir():
                drop = shutil.ignore_patterns("v1", "__pycache__", "*.so") if source == "replicator" else None
                shutil.copytree(SOURCE / source, tmp_path / "src" / source, ignore=drop)
            else:
                (tmp_path / "src").mkdir(exist_ok=True)
                shutil.copy(SOURCE / source, tmp_path / "src")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    pip += ["--config-settings", "cmake.build-type=Debug"]  # optimising takes most of the time
    made = subprocess.run(
        [*pip, "--wheel-dir", str(tmp_path), str(tmp_path / "src")], capture_output=True, text=True, timeout=280
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert list(tmp_path.glob("replicator-*.whl"))


def test_service_selects_the_agents_and_is_headless() -> None:
    service = manifest("Service")["spec"]
    daemon_set = manifest("DaemonSet")
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"].items() <= labels.items()
    assert daemon_set["spec"]["selector"]["matchLabels"].items() <= labels.items()
    namespaces = {one["metadata"].get("namespace") for one in manifests("agent.yaml") if one["kind"] != "Namespace"}
    assert namespaces == {manifest("Namespace")["metadata"]["name"]}
    name = f"{manifest('Service')['metadata']['name']}.{namespaces.pop()}.svc"
    peers = next(one["value"] for one in container()["env"] if one["name"] == "REPLICATOR_DNS_NAME")
    assert peers.startswith(name)


def test_ports_agree_everywhere() -> None:
    args = container()["args"]
    flags = dict(zip(args[::2], args[1::2], strict=True))
    by_name = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert by_name == {"grpc": int(flags["--port"]), "bulk": int(flags["--bulk-port"])}
    service = manifest("Service")["spec"]["ports"]
    assert {port["targetPort"] for port in service} == set(by_name)
    assert {port["name"]: port["port"] for port in service} == by_name
    assert container()["readinessProbe"]["grpc"]["port"] == by_name["grpc"]
    first = manifest("NetworkPolicy", "networkpolicy.yaml")["spec"]["ingress"][0]
    assert {port["port"] for port in first["ports"]} == set(by_name.values())


def test_store_is_the_nodes_tmpfs_and_the_users_agree() -> None:
    volumes = {volume["name"]: volume["hostPath"] for volume in pod_spec()["volumes"]}
    assert volumes["store"]["path"].startswith("/dev/shm/")
    assert volumes["shm"]["path"] == "/dev/shm"
    (mount,) = container()["volumeMounts"]
    args = container()["args"]
    assert mount["mountPath"] == args[args.index("--root") + 1]
    (init,) = pod_spec()["initContainers"]
    user = pod_spec()["securityContext"]["runAsUser"]
    command = init["command"]
    assert command[command.index("-o") + 1] == str(user)
    assert command[-1] == "/shm/" + volumes["store"]["path"].removeprefix("/dev/shm/")
    trainer = manifest("Pod", "trainer-example.yaml")["spec"]
    assert trainer["securityContext"]["runAsUser"] == user
    assert trainer["volumes"][0]["hostPath"]["path"] == volumes["store"]["path"]
    assert trainer["containers"][0]["volumeMounts"][0]["mountPath"] == mount["mountPath"]
    (image_user,) = (rest for name, rest in final_stage() if name == "USER")
    assert image_user == f"{user}:{pod_spec()['securityContext']['runAsGroup']}"


def test_pod_is_confined_and_its_limit_is_above_the_budget() -> None:
    security = container()["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"]["drop"] == ["ALL"]
    assert pod_spec()["securityContext"]["runAsNonRoot"] is True
    budget = next(one["value"] for one in container()["env"] if one["name"] == "REPLICATOR_BUDGET_BYTES")
    limit = container()["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) > int(budget.removesuffix("GiB"))


def test_example_configuration_is_valid_and_matches_the_units() -> None:
    config = load_config(environ={}, file=DEPLOY / "systemd" / "agent.toml")
    mount = unit("run-replicator.mount")["Mount"]
    service = unit("replicator-agent.service")
    assert mount["Type"] == ["tmpfs"]
    assert {"nosuid", "nodev", "noexec", "huge=within_size"} <= set(mount["Options"][0].split(","))
    (where,) = mount["Where"]
    assert where.strip("/").replace("/", "-") == "run-replicator", "systemd derives the unit's name from the path"
    assert service["Unit"]["RequiresMountsFor"] == [where]
    assert Path(config.root).parent == Path(where)
    assert service["Service"]["ExecStartPre"][0].split()[-1] == config.root
    assert service["Service"]["ReadWritePaths"] == [where]
    assert service["Service"]["User"] != ["root"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not on this machine")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    """With programs that exist here in place of those that the units will find on their machine."""
    for source in (DEPLOY / "systemd").glob("*.*"):
        text = source.read_text().replace("/opt/replicator/bin/replicator-agent", "/bin/true")
        (tmp_path / source.name).write_text(text)
    units = [str(tmp_path / name) for name in ("run-replicator.mount", "replicator-agent.service")]
    told = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    ours = [line for line in told.stderr.splitlines() if "replicator" in line]
    assert told.returncode == 0, told.stderr
    assert not ours
