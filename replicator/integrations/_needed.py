"""What is said where a framework is not installed, or another version than an integration is made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata


def not_there(requirement: str) -> ModuleNotFoundError:
    """The error to raise: what is expected, what is installed, and what to install.

    Args:
        requirement: as pip takes it, for instance `torchtitan>=0.3.0`.
    """
    package = requirement.partition("=")[0].rstrip("<>~")
    try:
        found = f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        found = "none"
    return ModuleNotFoundError(f"expected {requirement}, found {found}; pip install '{requirement}'", name=package)


@contextmanager
def needed(requirement: str) -> Iterator[None]:
    """Around imports of a framework. Raises `not_there` in place of an ImportError that is the framework's."""
    try:
        yield
    except ImportError as error:
        wanted = not_there(requirement)
        if (error.name or "").partition(".")[0] != wanted.name:
            raise
        raise wanted from error
