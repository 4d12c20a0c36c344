"""The version of the installed package."""

from __future__ import annotations

import functools


@functools.cache
def version() -> str:
    """The version from the package's metadata, or "unknown" when it runs from a tree that was never installed."""
    from importlib import metadata

    try:
        return metadata.version("replicator")
    except metadata.PackageNotFoundError:
        return "unknown"
