"""Merging file, environment and command line into one AgentConfig."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from replicator.config.agent import AgentConfig
from replicator.config.values import AUTO_BYTES, TABLES, coerce
from replicator.errors import ConfigError

ENV_PREFIX = "REPLICATOR_"
# No settings of the agent: read by the trainer's library (replicator.client) or, the last, by `faultpoints`.
CLIENT_ENV = frozenset(
    {
        "REPLICATOR_JOB",
        "REPLICATOR_AGENT_CONFIG",
        "REPLICATOR_SOCKET",
        "REPLICATOR_FAULTPOINT",
        "REPLICATOR_PARENT_SESSION",
    }
)


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> AgentConfig:
    """Merge file, environment and flags into one AgentConfig.

    Args:
        flags: field name -> value or text; None values are left out.
        environ: REPLICATOR_* variables are read from it; default os.environ.
        file: a TOML file; default the value of REPLICATOR_AGENT_CONFIG, else none.

    Raises:
        ConfigError: unknown key, wrong type, or values that contradict each other; names the key and its origin.
    """
    environ = os.environ if environ is None else environ
    file = file or environ.get("REPLICATOR_AGENT_CONFIG") or None
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def take(raw: Mapping[str, Any], origin: str) -> None:
        values.update(_convert(raw, origin))
        origins.update(dict.fromkeys(raw, origin))

    if file is not None:
        take(_from_file(Path(file)), str(file))
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and name not in CLIENT_ENV:
            take({name[len(ENV_PREFIX) :].lower(): text}, f"environment variable {name}")
    take({k: v for k, v in (flags or {}).items() if v is not None}, "command line")
    try:
        return AgentConfig(**values)
    except ConfigError as error:
        # The first setting that it names is the one to look at; a default has no origin.
        named = next((word for word in re.findall(r"\w+", str(error)) if word in origins), None)
        if named is None:
            raise
        raise ConfigError(f"{origins[named]}: {error}") from None


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return table


def _convert(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    known = {item.name: item for item in dataclasses.fields(AgentConfig)}
    types = get_type_hints(AgentConfig)
    result: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"{origin}: unknown setting {key!r}{hint}")
        if value == "auto" and known[key].metadata.get("auto"):
            result[key] = AUTO_BYTES
            continue
        kind = known[key].metadata.get("kind")
        if isinstance(kind, str) and kind in TABLES:
            result[key] = TABLES[kind](key, value, origin)
            continue
        result[key] = coerce(key, value, types[key], known[key].metadata, origin)
    return result
