"""An object that a save writes again, with other content: under another name, because sealed bytes never change.

Of what was sealed first copies may be anywhere, and more on their way: by its name each node knows one content, so that
old and new bytes are never mixed (F01). The manifest lists the last writing alone; others go with their container.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from replicator.decide.types import ManifestEntry

_NAME = re.compile(r"(.*_src[0-9]+)(?:\.([0-9]+))?\.distcp")


def last_name(name: str, exists: Callable[[str], bool]) -> str:
    """The name of the last writing that there is of an object that was called `name` at first."""
    while (after := next_name(name)) is not None and exists(after):
        name = after
    return name


def next_name(name: str) -> str | None:
    """What the object is called when it is written once more; None for one that no saver named."""
    match = _NAME.fullmatch(name)
    return None if match is None else f"{match[1]}.{int(match[2] or 0) + 1}.distcp"


def last_ones(entries: Iterable[ManifestEntry]) -> list[ManifestEntry]:
    """Without those that were written again."""
    found = {entry.name: entry for entry in entries}
    return [entry for name, entry in found.items() if next_name(name) not in found]
