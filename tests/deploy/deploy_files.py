"""The files of deploy/, parsed, and the agent processes that they describe."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replicator.client.launch import AgentRecord, find_agent

SOURCE = Path(__file__).parents[2]
DEPLOY = SOURCE / "deploy"
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How one of the files starts the agent, and how it asks whether the agent is well."""

    command: list[str]
    environ: dict[str, str]
    probe: list[str] | None


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) in order, continuation lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split(None, 1)[0].upper(), line.split(None, 1)[1].strip()) for line in lines if line.strip()]


def final_stage() -> list[tuple[str, str]]:
    """The instructions after the last FROM."""
    instructions = dockerfile()
    last = max(index for index, (name, _) in enumerate(instructions) if name == "FROM")
    return instructions[last:]


def docker_launch() -> Launch:
    """What `docker run` of the image does without arguments."""
    environ: dict[str, str] = {}
    command: list[str] = []
    probe = None
    for name, rest in final_stage():
        if name == "ENV":
            environ |= dict(item.split("=", 1) for item in shlex.split(rest))
        elif name in ("ENTRYPOINT", "CMD"):
            command += json.loads(rest)
        elif name == "HEALTHCHECK":
            probe = json.loads(rest[rest.index("CMD") + 3 :])
    environ.pop("PATH")
    return Launch(command, environ, probe)


def unit(name: str) -> dict[str, dict[str, list[str]]]:
    """A systemd unit: section -> key -> all values in order."""
    sections: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / name).read_text().splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), {})
        elif line.strip() and not line.startswith("#"):
            key, value = line.split("=", 1)
            current.setdefault(key, []).append(value)
    return sections


def systemd_launch() -> Launch:
    """What systemd does to start the service."""
    service = unit("replicator-agent.service")["Service"]
    environ = dict(item.split("=", 1) for value in service["Environment"] for item in shlex.split(value))
    (start,) = service["ExecStart"]
    return Launch(shlex.split(start), environ, None)


def manifests(name: str) -> list[dict[str, Any]]:
    """All documents of one of the Kubernetes files."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def manifest(kind: str, name: str = "agent.yaml") -> dict[str, Any]:
    """The only document of a kind."""
    (found,) = (one for one in manifests(name) if one["kind"] == kind)
    return found


def kubernetes_launch(fields: dict[str, str]) -> Launch:
    """What the kubelet does on a node; `fields` are what it knows of the pod (status.podIP and so on)."""
    (container,) = manifest("DaemonSet")["spec"]["template"]["spec"]["containers"]
    image = docker_launch()
    environ = dict(image.environ)
    for variable in container["env"]:
        value = variable.get("value")
        if value is None:
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        environ[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], value)
    return Launch([*image.command, *container["args"]], environ, container["livenessProbe"]["exec"]["command"])


def substituted(launch: Launch, replace: dict[str, str]) -> Launch:
    """The same with texts replaced that cannot be on this machine, each of which must occur."""
    text = json.dumps([launch.command, launch.environ, launch.probe])
    for old, new in replace.items():
        assert old in text, f"{old} is not in {text}"
        text = text.replace(old, new)
    command, environ, probe = json.loads(text)
    return Launch(command, environ, probe)


def _program(command: list[str]) -> list[str]:
    """A command line with the programs of this environment for those of the image or of /opt."""
    return [str(Path(sys.executable).with_name(Path(command[0]).name)), *command[1:]]


@contextmanager
def running(launch: Launch, root: Path) -> Iterator[AgentRecord]:
    """The agent as the file starts it, ready; afterwards it must end by itself with status 0 on SIGTERM."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("REPLICATOR_")} | launch.environ
    process = subprocess.Popen(_program(launch.command), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while (record := find_agent(root)) is None:
            assert process.poll() is None, process.communicate()[0].decode()
            assert time.monotonic() < deadline, "the agent was not ready in time"
            time.sleep(0.02)
        yield record
        process.terminate()
        output, _ = process.communicate(timeout=START_S)
        assert process.returncode == 0, output.decode()
    finally:
        process.kill()
        process.wait()


def run_probe(launch: Launch) -> subprocess.CompletedProcess[str]:
    """The health command of the file, in the environment that the file gives."""
    assert launch.probe is not None
    environ = {key: value for key, value in os.environ.items() if not key.startswith("REPLICATOR_")} | launch.environ
    return subprocess.run(_program(launch.probe), env=environ, capture_output=True, text=True, timeout=30)
