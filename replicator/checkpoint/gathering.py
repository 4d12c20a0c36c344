"""What the ranks of a save tell the coordinator before it commits: which objects their nodes sealed.

It goes through the ranks' common store, so it needs no collective, and the coordinator can say who did not come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from replicator.client.agreement import Ranks
from replicator.decide.types import ManifestEntry
from replicator.errors import DeadlineExceededError, ReplicatorError, SaveError
from replicator.ids import ContainerVersion, split_generation

# So many saves are kept apart in the common store; older words are written over.
_SLOTS = 8
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Sealed:
    """The word of one rank: it has finished, and its node has sealed these objects (maybe more since then)."""

    rank: int
    version: ContainerVersion
    node_id: str
    entries: Sequence[ManifestEntry]


def report(ranks: Ranks, sealed: Sealed) -> None:
    """Leave this rank's word, before the barrier."""
    rows = [[entry.name, entry.size, entry.crc32c, entry.owner_node_id] for entry in sealed.entries]
    word = json.dumps({"version": str(sealed.version), "node_id": sealed.node_id, "entries": rows})
    ranks.post(_key(sealed.version, sealed.rank), word.encode())


def collect(ranks: Ranks, mine: Sealed, deadline_s: float) -> list[ManifestEntry]:
    """On the coordinator, after the barrier: the objects of all nodes, each once.

    Raises:
        SaveError: two nodes sealed different objects of one name, or a rank saves something else; with names.
        DeadlineExceededError: a rank (named) that said nothing.
    """
    found: dict[str, tuple[ManifestEntry, Sealed]] = {}
    for rank in range(ranks.world_size):
        word = mine if rank == mine.rank else _word(ranks, mine.version, rank, deadline_s)
        for entry in word.entries:
            known, of = found.setdefault(entry.name, (entry, word))
            if (known.size, known.crc32c) != (entry.size, entry.crc32c):
                raise SaveError(
                    f"{mine.version.container}: rank {of.rank} on {of.node_id} and rank {rank} on {word.node_id} wrote "
                    f"different objects called {entry.name!r}; names must be unique in the job: see that "
                    "global_rank_getter differs from rank to rank, and that all nodes write the same metadata"
                )
    return [entry for entry, _ in found.values()]


def missing_ranks(ranks: Ranks, mine: Sealed) -> str:
    """In words: who has not left a word. Does not wait."""
    missing = []
    try:
        for rank in range(ranks.world_size):
            if rank == mine.rank:
                continue
            try:
                _word(ranks, mine.version, rank, 0.0)
            except (DeadlineExceededError, SaveError):
                missing.append(str(rank))
    except ReplicatorError as error:
        return str(error)
    if not missing:
        return "all ranks had finished"
    rest = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return f"rank {', '.join(missing[:_SHOWN])}{rest} had not finished"


def _word(ranks: Ranks, version: ContainerVersion, rank: int, deadline_s: float) -> Sealed:
    try:
        word = json.loads(ranks.read(_key(version, rank), deadline_s))
    except DeadlineExceededError:
        raise DeadlineExceededError.of(f"the objects of {version}", f"rank {rank}", deadline_s) from None
    if word["version"] != str(version):
        raise SaveError(f"{version} is being saved, and rank {rank} was last heard of with {word['version']}")
    return Sealed(rank, version, word["node_id"], [ManifestEntry(*row) for row in word["entries"]])


def _key(version: ContainerVersion, rank: int) -> str:
    _, attempt = split_generation(version.generation)
    return f"sealed by rank {rank} in slot {attempt % _SLOTS}"
