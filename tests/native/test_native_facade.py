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


@pytest.mark.parametrize(
    ("function", "arguments", "error", "text"),
    [
        ("copy_parts", ([(None, b"data")], 0, 0, 0, 1), ValueError, "block_size: expected a positive number"),
        ("copy_parts", ([(None, b"data")], 10, 0, 10, 1), ValueError, r"prefix_size: expected 0\.\.9, found 10"),
        ("copy_parts", ([()], 10, 0, 0, 1), TypeError, "a target .or None. and a source"),
        ("copy_parts", ([(None,)], 10, 0, 0, 1), TypeError, "a target .or None. and a source"),
        ("copy_parts", ([(None, b"a", b"b")], 10, 0, 0, 1), TypeError, "a target .or None. and a source"),
        ("copy_parts", ([None], 10, 0, 0, 1), TypeError, "a target .or None. and a source"),
        ("copy_parts", ([(bytearray(3), b"data")], 10, 0, 0, 1), ValueError, "at least 4 bytes, found 3"),
        ("block_crcs", (b"data", 0), ValueError, "block_size: expected a positive number"),
        ("recv_blocks", (-1, bytearray(4), 0, 1.0, 1.0, -1, 0, 0), ValueError, "block_size: expected a positive"),
        ("recv_blocks", (-1, bytearray(4), 10, 1.0, 1.0, -1, 0, 11), ValueError, r"0\.\.9, found 11"),
        ("crc32c_by", ("none", b"data", 0), KeyError, "none"),
    ],
)
def test_a_wrong_call_past_the_facade_is_an_error(
    function: str, arguments: tuple[object, ...], error: type[Exception], text: str
) -> None:
    """It would divide by zero, read past a tuple, or fill the memory."""
    with pytest.raises(error, match=text):
        getattr(_native, function)(*arguments)
