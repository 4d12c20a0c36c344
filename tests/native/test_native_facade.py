"""Which implementation is chosen, and that both have the same functions."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from replicator import _fallback, _native, native

FUNCTIONS = ("crc32c", "crc32c_combine", "copy_crc32c", "copy_parts", "block_crcs", "recv_blocks")


def test_the_native_core_is_used_and_no_reason_given() -> None:
    assert native.IMPLEMENTATION == "native"
    assert native.FALLBACK_REASON == ""


@pytest.mark.parametrize("native", ["python"], indirect=True)
def test_the_fallback_says_why(native: ModuleType) -> None:
    assert "install g++" in native.FALLBACK_REASON


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_number_of_arguments(name: str) -> None:
    expected = len(inspect.signature(getattr(_fallback, name)).parameters)
    assert getattr(_native, name).__doc__.split(")")[0].count(": ") == expected


def test_a_part_that_is_no_pair_is_an_error() -> None:
    """The native core takes the second item of what it is given."""
    with pytest.raises(ValueError, match="unpack"):
        native.copy_parts([(None,)])  # type: ignore[list-item]
