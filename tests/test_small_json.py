"""Small files of JSON: what is not proper JSON is one kind of error."""

from __future__ import annotations

import pytest

from replicator.small_json import parse_json


def test_what_is_json() -> None:
    assert parse_json(b'{"a": [1, -2.5, "\xc3\xa9", null, true]}') == {"a": [1, -2.5, "é", None, True]}


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"Infinity", b"-Infinity", b"NaN", b"1e999", b"9" * 5000, b"[" * 100_000]
)
def test_what_is_not(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
