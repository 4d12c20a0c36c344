"""What rank 0 concludes from what all ranks say before a save. Pure functions, for `Ranks.agree`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from replicator.errors import ConfigError, SaveFailedError, StaleEpochError, from_wire
from replicator.integrations._cosmos_pointer import iteration_name

_SHOWN = 4


def all_succeeded(answers: Sequence[bytes]) -> bytes:
    """Of [whether the process runs, kind and message of what the save before raised or null] of each rank.

    Returns:
        Whether all processes run, as JSON.

    Raises:
        SaveFailedError: the save failed somewhere; the process that ended is named first, for others failed with it.
        StaleEpochError: because a newer incarnation of the job exists.
    """
    states = [json.loads(answer) for answer in answers]
    failures = sorted(((alive, rank, *error) for rank, (alive, error) in enumerate(states) if error is not None))
    if failures:
        messages = [message for *_, message in failures]
        more = f"; {len(messages) - _SHOWN} more ranks failed" if len(messages) > _SHOWN else ""
        stale = StaleEpochError.__name__
        kind = stale if any(kind == stale for *_, kind, _ in failures) else SaveFailedError.__name__
        raise from_wire(kind, "; ".join(messages[:_SHOWN]) + more)
    return json.dumps(all(alive for alive, _ in states)).encode()


def same_on_all(answers: Sequence[bytes]) -> bytes:
    """Of [iteration, keys] of each rank. Raises ConfigError, with the rank, when they differ."""
    first, first_keys = json.loads(answers[0])
    for rank, answer in enumerate(answers):
        iteration, keys = json.loads(answer)
        if (iteration, keys) != (first, first_keys):
            raise ConfigError(
                f"rank 0 saves {iteration_name(first)} with the keys {', '.join(first_keys)}, and rank {rank} "
                f"{iteration_name(iteration)} with {', '.join(keys)}; all ranks must save the same"
            )
    return b""
