"""What the text or TOML value of a setting means: sizes, addresses, CPUs, tables."""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from replicator.errors import ConfigError, InvalidIdError
from replicator.ids import Labels, validate_node_id

BuddyMap = tuple[tuple[str, tuple[str, ...]], ...]
"""Nodes and their buddies, sorted by node."""
AUTO_BYTES = -1
"""Of a size that may be `auto`."""
_SIZE_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
# What DNS can be asked for: parts of 1 to 63 characters. Looking up anything else is no mere failure of the lookup.
HOST = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
_ADDRESS = re.compile(rf"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>{HOST.pattern})):(?P<port>[0-9]{{1,5}})")
_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?P<unit>[KMGT]I?)?B?")


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[v6]:port`; ConfigError for anything else."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= 65535 or (match["v6"] and not is_ip(match["v6"])):
        raise ConfigError(f"expected an address like 10.0.0.1:7070, found {text[:300]!r}")
    return match["v6"] or match["host"], int(match["port"])


def is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def parse_size(text: str) -> int:
    """Bytes of `1500`, `64Mi`, `2G`, `2GB` or `2GiB`; ConfigError for anything else."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise ConfigError(f"expected a size like 512Mi or 2G, found {text[:80]!r}")
    number, unit = match["number"], _SIZE_UNITS[match["unit"] or ""]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def parse_cpus(text: str) -> frozenset[int]:
    """CPU numbers of a list like `0-3,8`; ConfigError for anything else."""
    cpus: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"cpu_affinity: expected CPU numbers and ranges like 0-3,8, found {text[:80]!r}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def _labels(key: str, value: Any, origin: str) -> Labels:
    """Of a table, or of text like zone=a,rack=r7. What has no value is left out: a launcher may not know it."""
    if isinstance(value, str):
        pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
        found = [(level.strip(), text.strip()) for level, _, text in pairs]
        wrong = any(not sign for _, sign, _ in pairs)
    else:
        wrong = not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values())
        found = [] if wrong else list(value.items())
    if wrong:
        raise ConfigError(f"{origin}: {key} expects a table, or text like zone=a,rack=r7, found {value!r}")
    return tuple((level, text) for level, text in found if text)


def _map(key: str, value: Any, origin: str) -> BuddyMap:
    """Of a table, or of a JSON object."""
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else {}
        except json.JSONDecodeError:
            value = None
    rows = list(value.items()) if isinstance(value, Mapping) else [("", None)]
    for node_id, chosen in rows:
        if not isinstance(chosen, list) or not all(isinstance(one, str) for one in chosen):
            raise ConfigError(
                f'{origin}: {key} expects a table or JSON object like {{"n0": ["n1"]}}, found {given!r}'[:300]
            )
        for one in (node_id, *chosen):
            try:
                validate_node_id(one)
            except InvalidIdError as error:
                raise ConfigError(f"{origin}: {key}: {error}") from None
    return tuple((node_id, tuple(chosen)) for node_id, chosen in sorted(rows))


TABLES: Mapping[str, Callable[[str, Any, str], Any]] = {"labels": _labels, "map": _map}


def coerce(key: str, value: Any, kind: Any, metadata: Mapping[str, Any], origin: str) -> Any:
    def wrong(expected: str) -> ConfigError:
        return ConfigError(f"{origin}: {key} expects {expected}, found {value!r}")

    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"):
            return True
        if isinstance(value, str) and value.lower() in ("false", "0", "no", "off"):
            return False
        raise wrong("true or false")
    if metadata.get("size") and isinstance(value, str):
        try:
            return parse_size(value)
        except ConfigError:
            raise wrong("a size like 512Mi or 2G") from None
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise wrong("a number")
        try:
            number = kind(value)
        except ValueError:
            raise wrong("a number") from None
        except OverflowError:
            raise wrong("a finite number") from None
        if not math.isfinite(number):
            raise wrong("a finite number")
        if kind is int and isinstance(value, float) and number != value:
            raise wrong("a whole number")
        return number
    if kind is str:
        if not isinstance(value, str):
            raise wrong("text")
        return value
    items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise wrong(f"a list of {metadata.get('kind', 'addresses')}")
    return tuple(item for item in items if item)
