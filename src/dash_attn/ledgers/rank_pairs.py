"""Which file of one run is compared with which of the other."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .framing import LedgerError
from .reading import RankLedger, Run, read_run, world_size_of


class RankPair(NamedTuple):
    """weights_only: a rank that one run alone has, beside one of the other that shares its weights, but not its work."""

    rank: int
    a: RankLedger
    b: RankLedger
    weights_only: bool = False


class Runs(NamedTuple):
    """one_rank: a rank was chosen, or a file was named in place of a folder. The other ranks are left out then."""

    a: Run
    b: Run
    pairs: list[RankPair]
    one_rank: bool


def read_runs(path_a: str | Path, path_b: str | Path, rank: int | None = None) -> Runs:
    """rank: this one alone."""
    a, b = read_run(path_a, rank), read_run(path_b, rank)
    if rank is not None and set(a) != set(b):
        a, b = read_run(path_a), read_run(path_b)  # a rank that one of them has not: compared with another one
    alone = [Path(path).is_file() or world_size_of(run) in (1, None) for path, run in ((path_a, a), (path_b, b))]
    named = Path(path_a).is_file() or Path(path_b).is_file()
    pairs = _same_ranks(a, b, named and all(alone)) + ([] if named else _other_ranks(a, b))
    chosen = [pair for pair in pairs if rank is None or pair.rank == rank]
    if not chosen:
        raise LedgerError(f"no rank {rank} can be compared: A has {sorted(a)}, B has {sorted(b)}")
    if one_rank := named or rank is not None:
        a = {number: ledger for number, ledger in a.items() if any(ledger is pair.a for pair in chosen)}
        b = {number: ledger for number, ledger in b.items() if any(ledger is pair.b for pair in chosen)}
    return Runs(a, b, chosen, one_rank)


def _same_ranks(a: Run, b: Run, one_by_one: bool) -> list[RankPair]:
    if one_by_one and len(a) == len(b) == 1:  # whatever their numbers are
        return [RankPair(next(iter(a)), next(iter(a.values())), next(iter(b.values())))]
    both = sorted(set(a) & set(b))
    if not both:
        raise LedgerError(f"no rank is in both runs: A has {sorted(a)}, B has {sorted(b)}")
    return [RankPair(rank, a[rank], b[rank]) for rank in both]


def _other_ranks(a: Run, b: Run) -> list[RankPair]:
    """Ranks of the run that had more. On as many ranks, a rank without its like has lost its file, and others may hold other shards."""
    sizes = world_size_of(a), world_size_of(b)
    if None not in sizes and sizes[0] == sizes[1]:
        return []
    both = sorted(set(a) & set(b))
    beside = {rank: both[rank % len(both)] for rank in sorted(set(a) ^ set(b))}
    return [RankPair(rank, a.get(rank, a[like]), b.get(rank, b[like]), weights_only=True) for rank, like in beside.items()]
