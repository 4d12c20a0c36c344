"""Network faults between agents in network namespaces. All of them: `make faults`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_net import why_not
from fault_network import CASES, Faults, NetworkCase

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
QUICK = [case for case in CASES if case.name == "network/half-open-connections"]


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with Faults() as made:
        yield made


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_network_fault_is_noticed_in_time_and_nothing_is_lost(faults: Faults, case: NetworkCase) -> None:
    """F15, F16, F19, F34, F45: who is away is named in time, no save waits for it, and nothing is deleted for it."""
    line = faults.run(case)
    assert line.ok, line.outcome
