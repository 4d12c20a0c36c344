"""Ids: whatever is valid survives a round trip, whatever is not is refused with the reason (F37, F38)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.errors import InvalidIdError
from replicator.ids import (
    MAX_ATTEMPT,
    MAX_EPOCH,
    MAX_JOB_CHARS,
    MAX_NAME_CHARS,
    MAX_NAME_PARTS,
    MAX_NODE_CHARS,
    MAX_STEP,
    CheckpointContainerId,
    CheckpointObjectId,
    ContainerVersion,
    NodeAddress,
    NodeIdentity,
    ObjectVersion,
    make_generation,
    parse_step_name,
    split_generation,
    validate_job,
    validate_node_id,
    validate_object_name,
    validate_step,
)

ALPHABET = "abzAZ09_.-+=@:~,"
PARTS = st.text(ALPHABET, min_size=1, max_size=20).filter(lambda text: text not in (".", ".."))
STEPS = st.integers(0, MAX_STEP)
NAMES = st.lists(PARTS, min_size=1, max_size=MAX_NAME_PARTS).map("/".join).filter(lambda n: len(n) <= MAX_NAME_CHARS)
CONTAINERS = st.builds(CheckpointContainerId, PARTS, STEPS)
EPOCHS, ATTEMPTS = st.integers(0, MAX_EPOCH), st.integers(0, MAX_ATTEMPT)

# Each of these must never come to be a part of an id, whoever sends it.
HOSTILE_PARTS = [
    "",
    ".",
    "..",
    "a\0b",
    "\0",
    "a b",
    "a\n",
    "\n",
    "a\\b",
    "a%2fb",
    "a*",
    "a;b",
    "ä",
    "\udc80",
    "\u202e",
    "a\x7f",
]


@given(CONTAINERS)
def test_container_round_trip(container: CheckpointContainerId) -> None:
    assert CheckpointContainerId.parse(str(container)) == container
    assert CheckpointContainerId.parse(f"{container.job}/step-{container.step}") == container
    assert parse_step_name(container.step_name) == container.step
    assert pickle.loads(pickle.dumps(container)) == container


@given(CONTAINERS, NAMES)
def test_object_round_trip(container: CheckpointContainerId, name: str) -> None:
    item = CheckpointObjectId(container, name)
    assert CheckpointObjectId.parse(str(item)) == item
    assert ObjectVersion(ContainerVersion(container, 5), name).object_id == item


@given(EPOCHS, ATTEMPTS)
def test_generation_round_trip(epoch: int, attempt: int) -> None:
    generation = make_generation(epoch, attempt)
    assert split_generation(generation) == (epoch, attempt)
    assert generation < 2**64
    assert ContainerVersion(CheckpointContainerId("j", 0), generation).epoch == epoch


@given(st.tuples(EPOCHS, ATTEMPTS), st.tuples(EPOCHS, ATTEMPTS))
def test_generations_are_ordered_by_epoch_then_attempt(a: tuple[int, int], b: tuple[int, int]) -> None:
    """F11: a later epoch is greater, whatever the attempts."""
    assert (make_generation(*a) < make_generation(*b)) == (a < b)


@given(st.text() | st.text("ab/.0123-_") | st.from_regex(r"a/step-[0-9]{1,3}(_ckpt)?(/[ab./]{0,9})?", fullmatch=True))
def test_any_text_is_an_id_or_a_reason(text: str) -> None:
    """F38: no text gets through that is not what it is parsed to, and nothing but InvalidIdError is raised."""
    for parse in (CheckpointContainerId.parse, CheckpointObjectId.parse):
        try:
            parsed = str(parse(text))
        except InvalidIdError:
            continue
        assert text in (parsed, parsed.replace("_ckpt", "", 1))
        assert not {"", ".", ".."} & set(text.split("/"))


@pytest.mark.parametrize("part", HOSTILE_PARTS)
def test_hostile_parts_are_refused_everywhere(part: str) -> None:
    """F37, F38."""
    for check in (
        validate_job,
        validate_node_id,
        validate_object_name,
        lambda text: CheckpointContainerId(text, 1),
        lambda text: NodeIdentity(text, 1),
        lambda text: CheckpointObjectId(CheckpointContainerId("j", 1), text),
        lambda text: CheckpointObjectId(CheckpointContainerId("j", 1), f"ok/{text}"),
        lambda text: ObjectVersion(ContainerVersion(CheckpointContainerId("j", 1), 0), f"{text}/ok"),
        lambda text: CheckpointContainerId.parse(f"{text}/step-1_ckpt"),
        lambda text: CheckpointObjectId.parse(f"j/step-1_ckpt/{text}"),
    ):
        with pytest.raises(InvalidIdError):
            check(part)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../../etc/passwd", "path traversal"),
        ("a/../b", "path traversal"),
        ("/etc/passwd", "is empty"),
        ("a//b", "is empty"),
        ("a/", "is empty"),
        ("a\0", "NUL character"),
        ("a b", "contains ' '"),
        ("/".join("abcdefghi"), "9 parts, at most 8"),
        ("x" * 201, "201 characters, at most 200"),
    ],
)
def test_reasons_of_object_names(name: str, reason: str) -> None:
    with pytest.raises(InvalidIdError, match=reason):
        validate_object_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "job",
        "job/",
        "/step-1_ckpt",
        "job/step-1_ckpt/x/..",
        "job/step-_ckpt",
        "job/step-01_ckpt",
        "job/step--1_ckpt",
        "job/step-+1_ckpt",
        "job/step-1",
        "job/step-1.5_ckpt",
        "job/step-1_ckptx",
        "job/step-\uff11_ckpt",
        "job/Step-1_ckpt",
        "job/step-1_ckpt\n",
        f"job/step-{MAX_STEP + 1}_ckpt",
        "job/step-99999999999999999999_ckpt",
    ],
)
def test_wrong_object_ids(text: str) -> None:
    with pytest.raises(InvalidIdError):
        CheckpointObjectId.parse(text)
    if text != "job/step-1":
        with pytest.raises(InvalidIdError):
            CheckpointContainerId.parse(text)


def test_limits_are_inclusive() -> None:
    assert validate_job("j" * MAX_JOB_CHARS)
    assert validate_node_id("n" * MAX_NODE_CHARS)
    assert validate_object_name("o" * MAX_NAME_CHARS)
    assert validate_step(MAX_STEP) == MAX_STEP
    for check, length in ((validate_job, MAX_JOB_CHARS), (validate_node_id, MAX_NODE_CHARS)):
        with pytest.raises(InvalidIdError, match=f"at most {length}"):
            check("x" * (length + 1))


def test_overlong_text_is_not_repeated_in_full() -> None:
    for text in ("x" * 10**6, "/" * 10**6, " " * 10**6):
        for check in (validate_job, validate_object_name, CheckpointObjectId.parse, CheckpointContainerId.parse):
            with pytest.raises(InvalidIdError) as caught:
                check(text)
            assert len(str(caught.value)) < 500


def test_step_zero_is_a_step() -> None:
    """F14."""
    assert validate_step(0) == 0
    assert CheckpointContainerId.parse("j/step-0_ckpt") == CheckpointContainerId("j", 0)


@pytest.mark.parametrize("step", [-1, MAX_STEP + 1, True, 1.0, "1", None])
def test_wrong_steps(step: Any) -> None:
    with pytest.raises(InvalidIdError, match="step must"):
        CheckpointContainerId("j", step)


@pytest.mark.parametrize("value", [None, 5, b"job", ["job"]])
def test_wrong_types_are_id_errors(value: Any) -> None:
    for check in (validate_job, validate_object_name, CheckpointContainerId.parse, CheckpointObjectId.parse):
        with pytest.raises(InvalidIdError):
            check(value)


@pytest.mark.parametrize("value", [-1, 2**64, True, "1", None, 1.5])
def test_wrong_incarnations_and_generations(value: Any) -> None:
    with pytest.raises(InvalidIdError):
        NodeIdentity("n", value)
    with pytest.raises(InvalidIdError):
        ContainerVersion(CheckpointContainerId("j", 1), value)


@pytest.mark.parametrize(
    ("epoch", "attempt"), [(-1, 0), (MAX_EPOCH + 1, 0), (0, -1), (0, MAX_ATTEMPT + 1), ("1", 0), (True, 0), (0, None)]
)
def test_wrong_epochs_and_attempts(epoch: Any, attempt: Any) -> None:
    with pytest.raises(InvalidIdError):
        make_generation(epoch, attempt)


def test_forms_for_people() -> None:
    version = ContainerVersion(CheckpointContainerId("j", 7), make_generation(2, 1))
    assert str(version.object("a/b")) == "j/step-7_ckpt@2.1/a/b"
    assert str(NodeIdentity("n1", 255)) == "n1#00000000000000ff"
    assert NodeAddress(NodeIdentity("n1", 1), "h:1").node_id == "n1"
