"""What is different about two runs besides what they computed: environments, attention plans, lengths, how they ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .aligning import Alignments, share_alike
from .culprit import name_of
from .rank_pairs import Runs
from .reading import RankLedger

Change = tuple[str, str, str]  # what, in A, in B
ALWAYS_DIFFERENT = ("time", "pid")  # of environments: says nothing about why two runs differ


def environment_changes(a: RankLedger, b: RankLedger) -> list[Change]:
    changes = _changes(dict(_flat(a.environment)), dict(_flat(b.environment)))
    return [change for change in changes if change[0] not in ALWAYS_DIFFERENT]


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def attention_changes(a: RankLedger, b: RankLedger) -> list[Change]:
    """The calls of the first step in which they differ."""
    for number in sorted(set(a.steps) & set(b.steps)):
        calls_a, calls_b = a.steps[number].layout.attention, b.steps[number].layout.attention
        if [plan for _, plan in calls_a] == [plan for _, plan in calls_b]:
            continue
        if len(calls_a) != len(calls_b) and share_alike(a.steps[number], b.steps[number]):
            return [(f"step {number}: calls", str(len(calls_a)), str(len(calls_b)))]
        found: dict[tuple[str, str, str], list[str]] = {}
        for place, ((module_a, plan_a), (module_b, plan_b)) in enumerate(zip(calls_a, calls_b, strict=False)):
            for what in _changes(a.plans.get(plan_a, {}), b.plans.get(plan_b, {})):
                found.setdefault(what, []).append(_where(module_a, module_b, place))
        if found:
            return [(f"step {number}, {_some(modules)}: {name}", one, other) for (name, one, other), modules in found.items()]
    return []


def _where(module_a: str | None, module_b: str | None, place: int) -> str:
    module = module_b if module_a is None else module_a
    return f"call {place}" if module is None else name_of(module)


def _changes(one: dict[str, Any], other: dict[str, Any]) -> list[Change]:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return [(name, str(one.get(name, "-")), str(other.get(name, "-"))) for name in names]


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def notes_on(runs: Runs) -> list[str]:
    found: list[tuple[int | None, str]] = []
    sizes = [{size for ledger in run.values() for size in ledger.world_sizes} - {None} for run in (runs.a, runs.b)]
    if sizes[0] != sizes[1] and all(sizes):
        told = "the numbers of ranks differ, so a rank may have other micro-batches: what both recorded under one name is compared"
        found.append((None, told))
    for name, run in (("A", runs.a), ("B", runs.b)):
        found += [(pair.rank, f"in {name} alone; weights are compared") for pair in runs.pairs if pair.weights_only and pair.rank in run]
        found += [(rank, f"{name} {fault}") for rank, ledger in run.items() for fault in _resume_faults(ledger)]
    return by_ranks(found)


def _resume_faults(run: RankLedger) -> Iterator[str]:
    """A run that resumed starts with what it had when the checkpoint was written; that shows without another run."""
    for number, start in run.starts.items():
        if number not in run.steps:
            continue
        aligned = Alignments().of(run.steps[number], start)
        differing = [pair.entry for pair, same in zip(aligned.pairs, aligned.same(run.steps[number], start), strict=True) if not same]
        lost = [entry for entry in differing if entry.phase != "rng" or entry.tensor not in run.idle_generators]
        if lost:
            names = ", ".join(" ".join(filter(None, (entry.phase, entry.module, entry.role, entry.tensor))) for entry in lost[:3])
            yield f"resumed at step {number + 1} from another state than it had after step {number}: {names}{', ...' * (len(lost) > 3)}"


def span(steps: Iterable[int]) -> str:
    found = sorted(steps)
    if not found:
        return "no step"
    return f"step {found[0]}" if len(found) == 1 else f"{len(found)} steps from {found[0]} to {found[-1]}"


def by_ranks(told: Iterable[tuple[int | None, str]]) -> list[str]:
    """One line for all ranks of which the same is told."""
    ranks: dict[str, list[int]] = {}
    for rank, what in told:
        ranks.setdefault(what, []).extend(() if rank is None else (rank,))
    return [f"{'rank' if len(found) == 1 else 'ranks'} {numbers(found)}: {what}" if found else what for what, found in ranks.items()]


def numbers(ranks: Iterable[int]) -> str:
    found = [str(rank) for rank in sorted(ranks)]
    return ", ".join(found) if len(found) <= 8 else f"{', '.join(found[:3])} and {len(found) - 3} others"
