"""Virtual environments of peers: made and filled by pip on first use, kept in the cache directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Settings

INSTALL_DEADLINE_S = 1200.0
PROBE_DEADLINE_S = 60.0


class NotAvailableError(RuntimeError):
    """A peer that cannot be installed or run here; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """How a peer is installed.

    Attributes:
        requirements: what pip installs, without their own dependencies: those that the probe needs are listed too.
        probe: a Python statement that succeeds when the peer can be used.
        options: more of pip's.
        libraries: Debian packages with shared libraries that the wheel expects from the system. When the probe fails
            and `apt-get` is there, they are unpacked beside the environment; nothing is installed in the system.
        builds: the peer is compiled on installation, which takes minutes; not done for a quick run.
    """

    name: str
    requirements: Sequence[str]
    probe: str
    options: Sequence[str] = ()
    libraries: Sequence[str] = ()
    builds: bool = False


@dataclass(frozen=True)
class Environment:
    """An installed peer: its interpreter, what its processes need in their environment, and versions."""

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def ensure(recipe: Recipe, settings: Settings) -> Environment:
    """The peer's environment, installed now if it is not there.

    Raises:
        NotAvailableError: with pip's or the probe's last words.
    """
    directory = settings.cache / f"{recipe.name}-py{sys.version_info.major}.{sys.version_info.minor}"
    stamp = directory / "installed.json"
    wanted = {"requirements": list(recipe.requirements), "options": list(recipe.options)}
    if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
        if recipe.builds and settings.quick:
            raise NotAvailableError("is compiled when installed, which a quick run does not wait for")
        settings.log(f"  installing {recipe.name} into {directory}")
        shutil.rmtree(directory, ignore_errors=True)
        _install(recipe, directory)
        stamp.write_text(json.dumps(wanted))
    python = directory / "bin" / "python"
    variables = _probed(recipe, directory, python)
    return Environment(python, variables, _versions(recipe, python))


def _install(recipe: Recipe, directory: Path) -> None:
    _checked([sys.executable, "-m", "venv", "--without-pip", str(directory)], "making a virtual environment")
    _checked(
        [
            *(sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python")),
            *("install", "--quiet", "--no-deps", "--disable-pip-version-check"),
            *([] if recipe.builds else ["--only-binary=:all:"]),
            *recipe.options,
            *recipe.requirements,
        ],
        "pip",
    )


def _checked(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise NotAvailableError(f"{what} did not end within {INSTALL_DEADLINE_S:.0f} s") from None
    except OSError as error:
        raise NotAvailableError(f"{what}: {error}") from None
    if done.returncode:
        raise NotAvailableError(f"{what} failed: {_telling_line(done.stdout + done.stderr)}")


def _telling_line(output: str) -> str:
    """The line of a failed installation that says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for word in ("fatal:", "Could not", "No matching", "rror:", "ERROR"):
        for line in lines:
            if word in line:
                return line[:300]
    return lines[-1][:300] if lines else "no output"


def _probed(recipe: Recipe, directory: Path, python: Path) -> dict[str, str]:
    """Environment variables with which the probe succeeds."""
    libraries = directory / "libraries"
    variables = _library_path(libraries)
    reason = _probe(recipe.probe, python, variables)
    if reason and recipe.libraries and not variables and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        _unpack(recipe.libraries, libraries)
        variables = _library_path(libraries)
        reason = _probe(recipe.probe, python, variables)
    if reason:
        raise NotAvailableError(f"installed, but {recipe.probe!r} fails: {reason}")
    return variables


def _probe(statement: str, python: Path, variables: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            [str(python), "-c", statement],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            env={**os.environ, **variables},
        )
    except subprocess.TimeoutExpired:
        return f"no end within {PROBE_DEADLINE_S:.0f} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


def _unpack(packages: Sequence[str], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", *packages], cwd=target, capture_output=True, timeout=120, check=True)
        for archive in target.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return


def _library_path(libraries: Path) -> dict[str, str]:
    directories = sorted({str(path.parent) for path in libraries.glob("**/*.so.*")})
    if not directories:
        return {}
    return {"LD_LIBRARY_PATH": ":".join([*directories, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def _versions(recipe: Recipe, python: Path) -> dict[str, str]:
    names = [requirement.partition("=")[0].partition("[")[0] for requirement in recipe.requirements]
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    done = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, timeout=PROBE_DEADLINE_S)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}
