"""`replicator-agent`: the command line of the daemon. Every setting of `AgentConfig` is a flag."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, get_type_hints

from replicator.config import AgentConfig, load_config
from replicator.errors import ConfigError, ReplicatorError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(ConfigError.exit_code, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The flags: one per field of AgentConfig, `--config FILE` and `--version`."""
    result = _Parser(
        prog="replicator-agent",
        description="Keeps checkpoints of this node's training processes in memory, and copies of other nodes'.",
        epilog="Settings come from the file, then REPLICATOR_<NAME> in the environment, then flags; the later wins. "
        "Exit status: 0 after SIGTERM, 2 wrong settings, 5 the store's root cannot be used.",
        allow_abbrev=False,
    )
    result.add_argument("--config", metavar="FILE", help="TOML file; default: the value of REPLICATOR_AGENT_CONFIG")
    result.add_argument("--version", action="store_true", help="print the version and end")
    types = get_type_hints(AgentConfig)
    for item in dataclasses.fields(AgentConfig):
        flag = "--" + item.name.replace("_", "-")
        help_text = str(item.metadata.get("help", "")).replace("%", "%%")
        if types[item.name] is bool:
            result.add_argument(flag, dest=item.name, action=argparse.BooleanOptionalAction, help=help_text)
        else:
            result.add_argument(flag, dest=item.name, metavar=_metavar(types[item.name], item.metadata), help=help_text)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until it is told to stop. Returns the exit status; an error is one line on stderr."""
    given = vars(parser().parse_args(argv))
    if given.pop("version"):
        from replicator.version import version

        print(f"replicator-agent {version()}")
        return 0
    file = given.pop("config")
    try:
        config = load_config(flags=given, file=file)
        # Imported late: wrong settings are told at once, without loading gRPC.
        from replicator.agent.daemon import run

        return run(config)
    except ReplicatorError as error:
        print(f"replicator-agent: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code


def _metavar(kind: Any, metadata: Any) -> str:
    if "choices" in metadata:
        return "|".join(metadata["choices"])
    if "unit" in metadata:
        return str(metadata["unit"])
    if metadata.get("size"):
        return "SIZE"
    if "kind" in metadata:
        return {"labels": "LEVEL=VALUE,...", "names": "NAME,...", "map": "JSON"}[metadata["kind"]]
    return {int: "N", float: "SECONDS", str: "TEXT"}.get(kind, "HOST:PORT,...")


if __name__ == "__main__":
    sys.exit(main())
