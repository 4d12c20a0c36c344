"""All that parses bytes which a peer, or an earlier life of this node, wrote."""

from __future__ import annotations

import fuzz_lane
import fuzz_store
import fuzz_wire
from fuzz_engine import Target


def all_targets() -> list[Target]:
    makers = [*fuzz_lane.targets(), *fuzz_store.targets(), *fuzz_wire.targets()]
    return [make() for make in makers]
