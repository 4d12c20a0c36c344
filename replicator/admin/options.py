"""The options that every command has, before or behind the command's name."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from replicator.errors import ConfigError

DEFAULT_DEADLINE_S = 10.0


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigErrors, reported like all others: one line, or JSON."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def add_global_options(parser: argparse.ArgumentParser, *, for_command: bool, asks_agent: bool = True) -> None:
    """Add the options to the main parser, or (without defaults of their own) to a command's parser.

    Args:
        asks_agent: False leaves out what says which agent to ask, and how.
    """
    group = parser.add_argument_group("options of all commands")

    def add(flag: str, default: object, **kwargs: object) -> None:
        value = argparse.SUPPRESS if for_command else default
        group.add_argument(flag, default=value, **kwargs)  # type: ignore[arg-type]

    add("--json", False, action="store_true", help="print one JSON object (schema: docs/admin.md)")
    add("--debug", False, action="store_true", help="show a traceback with an internal error")
    if not asks_agent:
        return
    add("--agent", None, metavar="ADDRESS", help="host:port or unix:PATH of an agent; default: the one of --root")
    add(
        "--root",
        None,
        metavar="DIR",
        help="store of this node's agent; default: REPLICATOR_SOCKET's, REPLICATOR_ROOT, else the user's",
    )
    add(
        "--deadline",
        DEFAULT_DEADLINE_S,
        metavar="SECONDS",
        type=_seconds,
        help=f"wait no longer for an answer, or for the next piece of one (default {DEFAULT_DEADLINE_S:g})",
    )
    add("--tls-ca", None, metavar="FILE", help="PEM file of the authority that agents' certificates have")
    add("--tls-cert", None, metavar="FILE", help="PEM file of the certificate to show to the agent")
    add("--tls-key", None, metavar="FILE", help="PEM file of its private key")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"expected 0.1..86400 seconds, found {text!r}")
    return value
