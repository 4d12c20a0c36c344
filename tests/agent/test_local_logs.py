"""Log lines: one record is one line, with its fields, whatever is in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from replicator.agent import logs
from replicator.ids import CheckpointContainerId, ContainerVersion, make_generation

OBJECT = ContainerVersion(CheckpointContainerId("job", 0), make_generation(3, 2)).object("a/b.distcp")
log = logging.getLogger("replicator.agent.test")


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.raiseExceptions)
    yield
    root.handlers[:], level, logging.raiseExceptions = before
    root.setLevel(level)
    logging.getLogger("replicator").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("restored_logging")
def test_json_line_has_the_fields_of_the_object() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", "node-1", stream)
    log.debug("not written")
    log.info("sealed %d bytes", 5, extra=logs.fields(OBJECT, lane="bulk"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert {key: line[key] for key in ("level", "message", "node", "job", "step", "object", "generation", "lane")} == {
        "level": "info",
        "message": "sealed 5 bytes",
        "node": "node-1",
        "job": "job",
        "step": 0,
        "object": "a/b.distcp",
        "generation": "3.2",
        "lane": "bulk",
    }


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("style", ["text", "json"])
def test_a_record_stays_one_line(style: str) -> None:
    stream = io.StringIO()
    logs.configure("info", style, "node-1", stream)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("from a peer: %s", "x\ninjected\r\u2028line", extra={"reason": "y\nz w"})
    assert len(stream.getvalue().splitlines()) == 1
    assert "ValueError" in stream.getvalue()


@pytest.mark.usefixtures("restored_logging")
def test_text_line_quotes_values_with_spaces() -> None:
    stream = io.StringIO()
    logs.configure("warning", "text", "n", stream)
    log.info("not written")
    log.warning("trouble", extra={"reason": "no answer", "peer": "n2"})
    assert stream.getvalue().rstrip().endswith('WARNING agent.test trouble node=n reason="no answer" peer=n2')


@pytest.mark.usefixtures("restored_logging")
def test_a_broken_stream_does_not_disturb() -> None:
    stream = io.StringIO()
    logs.configure("info", "text", "n", stream)
    stream.close()
    log.info("nobody reads this")
