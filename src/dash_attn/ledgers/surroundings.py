"""What is different about two runs besides what they computed: environments, attention plans, lengths, how they ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .aligning import Pair, pairs
from .culprit import name_of
from .environment import ALWAYS_DIFFERENT
from .reading import RankLedger

Change = tuple[str, str, str]  # what, in A, in B


def environment_changes(a: RankLedger, b: RankLedger) -> list[Change]:
    changes = _changes(dict(_flat(a.environment)), dict(_flat(b.environment)))
    return [change for change in changes if change[0] not in ALWAYS_DIFFERENT]


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def share_alike(a: RankLedger, b: RankLedger) -> bool:
    """Whether a rank has the same part of the work in both runs. On another number of ranks it has other micro-batches."""
    return a.world_sizes == b.world_sizes and len(a.world_sizes) == 1


def attention_changes(a: RankLedger, b: RankLedger) -> list[Change]:
    """The calls of the first step in which they differ."""
    for number in sorted(set(a.steps) & set(b.steps)):
        calls_a, calls_b = a.steps[number].layout.attention, b.steps[number].layout.attention
        if [plan for _, plan in calls_a] == [plan for _, plan in calls_b]:
            continue
        if len(calls_a) != len(calls_b) and share_alike(a, b):
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


def notes_on(a: dict[int, RankLedger], b: dict[int, RankLedger], ranks: list[int]) -> list[str]:
    found: list[str] = []
    if not all(share_alike(a[rank], b[rank]) for rank in ranks):
        found.append("the numbers of ranks differ, so a rank may have other micro-batches: what both recorded under one name is compared")
    for name, run, other in (("A", a, b), ("B", b, a)):
        if alone := sorted(set(run) - set(other) - set(ranks)):
            found.append(f"ranks {', '.join(map(str, alone))} are in {name} alone")
        for rank in ranks:
            mine, theirs = run[rank], other[rank]
            if alone := sorted(set(mine.steps) - set(theirs.steps)):
                found.append(f"rank {rank}: {span(alone)} of {name} alone")
            if ending := mine.ending():
                found.append(f"rank {rank}: {name} {ending}")
            found += [f"rank {rank}: {name} {fault}" for fault in _resume_faults(mine)]
    return found


def _resume_faults(run: RankLedger) -> Iterator[str]:
    """A run that resumed starts with what it had when the checkpoint was written; that shows without another run."""
    for number, start in run.starts.items():
        if number not in run.steps:
            continue
        lost = [pair.entry for pair in pairs(run.steps[number], start) if not pair.same and generator_of(pair) not in run.idle_generators]
        if lost:
            names = ", ".join(" ".join(filter(None, (entry.phase, entry.module, entry.tensor))) for entry in lost[:3])
            yield f"resumed at step {number + 1} from another state than it had after step {number}: {names}{', ...' * (len(lost) > 3)}"


def generator_of(pair: Pair) -> str:
    """The name of the random number generator, "" of other tensors."""
    return pair.entry.tensor if pair.entry.phase == "rng" else ""


def span(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {min(steps)} to {max(steps)}"
