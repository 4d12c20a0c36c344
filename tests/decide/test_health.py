"""The rule by which a node is alive, suspect or dead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.decide.health import HealthSettings, NodeState, Observation, Standing, next_state
from replicator.ids import NodeIdentity

ALIVE, SUSPECT, DEAD = NodeState.ALIVE, NodeState.SUSPECT, NodeState.DEAD
ONE = NodeIdentity("n1", 1)
TWO = NodeIdentity("n1", 2)
SETTINGS = HealthSettings(dead_after_s=20.0, min_misses=3)
SILENCE = Observation(None, "waited 5.0 s for its health, in vain")


def standing(state: NodeState, since_s: float = 100.0, misses: int = 0) -> Standing:
    return Standing(ONE, state, "so far", since_s, misses)


@pytest.mark.parametrize("previous", [None, *(standing(state) for state in NodeState)])
def test_who_answers_is_alive_whatever_was_believed(previous: Standing | None) -> None:
    assert next_state(previous, Observation(ONE), 101.0, SETTINGS) == (ALIVE, "it answers")


@pytest.mark.parametrize("state", list(NodeState))
def test_another_incarnation_means_that_the_old_one_is_dead_at_once(state: NodeState) -> None:
    """F19: deadline plus incarnation."""
    found, reason = next_state(standing(state), Observation(TWO), 100.0, SETTINGS)
    assert found is DEAD
    assert str(TWO) in reason


@pytest.mark.parametrize("previous", [None, standing(ALIVE)])
def test_one_deadline_missed_makes_a_node_suspect_and_says_why(previous: Standing | None) -> None:
    assert next_state(previous, SILENCE, 100.0, SETTINGS) == (SUSPECT, SILENCE.problem)


@pytest.mark.parametrize(
    ("now_s", "misses", "expected"),
    [(119.9, 9, SUSPECT), (120.0, 1, SUSPECT), (120.0, 2, DEAD), (1e6, 0, SUSPECT)],
    ids=["not long enough", "not often enough", "both", "this agent did not run meanwhile"],
)
def test_a_suspect_is_dead_after_the_time_and_the_questions(now_s: float, misses: int, expected: NodeState) -> None:
    found, reason = next_state(standing(SUSPECT, misses=misses), SILENCE, now_s, SETTINGS)
    assert found is expected
    assert SILENCE.problem in reason
    if expected is DEAD:
        assert "20.0 s" in reason


def test_the_dead_stay_dead_for_the_reason_that_was_given() -> None:
    assert next_state(standing(DEAD), SILENCE, 1e9, SETTINGS) == (DEAD, "so far")


@given(st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans()), max_size=40))
def test_nobody_is_dead_who_answered_within_the_time(script: list[tuple[float, bool]]) -> None:
    """Whatever the order of answers and silences: dead means silent for at least that long, and asked that often."""
    known: Standing | None = None
    now = answered = 0.0
    silences = 0
    for pause, answers in script:
        now += pause
        state, reason = next_state(known, Observation(ONE) if answers else SILENCE, now, SETTINGS)
        silences = 0 if answers else silences + 1
        answered = now if answers else answered
        assert (state is ALIVE) == answers
        if state is DEAD:
            assert now - answered >= SETTINGS.dead_after_s
            assert silences >= SETTINGS.min_misses
        changed = known is None or known.state is not state
        known = Standing(ONE, state, reason, now if known is None or changed else known.since_s, silences)
