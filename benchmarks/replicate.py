"""Moving an object to another node: replication, and the pull by an empty node; against raw TCP and peers."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness import Series, Settings, closing_all, combine_validity, measure, rate_result
from benchmarks.limits import InTurn, Tcp
from benchmarks.peers.registry import TRANSFER_PEERS, Peers, start_transfer_peers, title
from benchmarks.product import Pull, Trainer
from benchmarks.results import Bar, Result, ratio_at_least, value_at_most

PEER_BARS: dict[str, Bar] = {"mooncake": ratio_at_least(2.0), "nixl": ratio_at_least(2.0)}
SEGMENTS_IN_TURN = 3
"""Of one object that is saved again and again with one checkpoint kept: it, the next one, and what is written again."""


def measure_replicate(settings: Settings) -> list[Result]:
    """One object from the owner's store to its buddy's, from offer to verified seal; pools are warm."""
    size = settings.size
    with closing_all() as contenders:
        contenders += [
            Tcp(_raw_name(settings), settings.directory, size, settings.connections, settings.congestion),
            Trainer("our replication", "trainer:ObjectsRole", settings, nodes=2, size=size, replicas=1),
        ]
        series = measure(contenders, settings)
        raw, own = (series[contender.name] for contender in contenders)
        rows = [
            rate_result(
                "replicate", "replicate, offer to verified seal, CRC included", size, own, raw, bar=ratio_at_least(0.85)
            ),
            _cpu_row(size, own, raw),
        ]
        # Ours again beside each peer, one after the other: all of their buffers together would be too much memory.
        replication = contenders[1]
        for key in TRANSFER_PEERS:
            peers = start_transfer_peers(settings, (key,))
            with closing_all() as pair:
                pair += peers.pairs.values()
                beside = measure([replication, *pair], settings) if pair else {}
            rows.append(_peer_row(key, size, beside.get(replication.name, own), beside, peers))
    return rows


def measure_pull(settings: Settings) -> list[Result]:
    """A checkpoint brought to a node that has none of it, into recycled segments."""
    size = settings.size
    with closing_all() as contenders:
        pull = Pull("our pull", settings, size)
        tcp = Tcp(
            _raw_name(settings),
            settings.directory,
            size,
            settings.connections,
            settings.congestion,
            files=SEGMENTS_IN_TURN,
        )
        contenders += [tcp, InTurn(f"the same over {SEGMENTS_IN_TURN} segments in turn", tcp), pull]
        series = measure(contenders, settings)
    raw, in_turn, own = (series[contender.name] for contender in contenders)
    return [
        rate_result(
            "pull_warm",
            "pull by an empty node with a warm pool, CRC included",
            size,
            own,
            raw,
            bar=ratio_at_least(0.85),
        ),
        rate_result("pull_warm_in_turn", "the same, against as many segments in use", size, own, in_turn),
    ]


def _raw_name(settings: Settings) -> str:
    return f"raw TCP, {settings.connections} connections, no CRC"


def _cpu_row(size: int, own: Series, raw: Series) -> Result:
    valid, reason = combine_validity(own, raw)
    return Result(
        name="replicate_cpu",
        what="CPU of replicating, both sides and the trainer",
        unit="CPU s/GB",
        value=None if own.error else own.total_cpu_s_per_gb(size),
        limit_name=f"{raw.name}, both sides",
        limit=raw.total_cpu_s_per_gb(size),
        cpu_s_per_gb=own.total_cpu_s_per_gb(size),
        bar=value_at_most(0.30),
        valid=valid,
        reason=reason,
        failed=bool(own.error),
        runs=len(own.cpu),
        cpu_by_process=own.cpu_s_per_gb(size),
    )


def _peer_row(key: str, size: int, own: Series, series: dict[str, Series], peers: Peers) -> Result:
    """Ours against a peer's; without a value when the peer is not there."""
    name, words = f"replicate_vs_{key}", f"replicate against {title(key)}"
    if key not in peers.pairs:
        return Result(name=name, what=words, unit="GB/s", bar=PEER_BARS.get(key), reason=peers.missing[key])
    peer = series[title(key)]
    row = rate_result(name, words, size, own, peer, bar=PEER_BARS.get(key))
    details = {**peers.details(key), "peer_cpu_s_per_gb": peer.total_cpu_s_per_gb(size)}
    if peer.error and not own.error:
        # Not our failure: the row says that there is nothing to compare with.
        return replace(row, value=None, failed=False, reason=f"{title(key)} failed: {peer.error}", details=details)
    return replace(row, details=details)
