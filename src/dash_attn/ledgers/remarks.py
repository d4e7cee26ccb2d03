"""What a first difference of two runs means: which module computed it, in which direction, and from what.

And what is different about them besides what they computed: environments, attention plans, how they resumed, what they lack.

A run that lacks an end, files of ranks, steps or phases agrees with another at most as far as both go.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .aligning import Pair, aligner, share_alike
from .format import COUNT, DETAIL, SETTING, Entry
from .reading import RankLedger, RankPair, Run, Runs, took_part, world_size_of

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
        found: dict[Change, list[str]] = {}
        for place, ((module_a, plan_a), (module_b, plan_b)) in enumerate(zip(calls_a, calls_b, strict=False)):
            module = module_b if module_a is None else module_a
            for what in _changes(a.plans.get(plan_a, {}), b.plans.get(plan_b, {})):
                found.setdefault(what, []).append(f"call {place}" if module is None else name_of(module))
        if found:
            return [(f"step {number}, {_some(modules)}: {name}", one, other) for (name, one, other), modules in found.items()]
    return []


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
        aligned = aligner()(run.steps[number], start)
        differing = [pair.entry for pair, same in zip(aligned.pairs, aligned.same(run.steps[number], start), strict=True) if not same]
        if lost := [entry for entry in differing if entry.phase != "rng" or entry.tensor not in run.idle_generators]:
            names = ", ".join(" ".join(filter(None, (entry.phase, entry.module, entry.role, entry.tensor))) for entry in lost[:3])
            yield f"resumed at step {number + 1} from another state than it had after step {number}: {names}{', ...' * (len(lost) > 3)}"


class Lack(NamedTuple):
    """is_shorter: a run that is only shorter than it could be, or has less detail."""

    what: str
    is_shorter: bool
    rank: int | None = None


def lacks(runs: Runs, has_step: bool, alone: Mapping[int, Mapping[tuple[str, str], int]]) -> Iterator[Lack]:
    """has_step: whether any is in both. alone: by rank, in how many steps one run alone has a phase."""
    if not runs.one_rank:
        yield from _lacks_of_files(runs.a, runs.b)
    if not has_step:
        yield Lack("no step is in both", False)
    for name, run in (("A", runs.a), ("B", runs.b)):
        yield from _lacks_of_steps(name, run)
    for pair in runs.pairs:
        if not pair.weights_only:
            yield from _lacks_of_pair(pair, runs)
        for (name, phase), steps in alone[pair.rank].items():
            yield Lack(f"{name} alone has {phase}, in {steps} {'step' if steps == 1 else 'steps'}", phase in DETAIL, pair.rank)


def _lacks_of_files(a: Run, b: Run) -> Iterator[Lack]:
    """Every rank of a run must have a file. Where nobody recorded how many there are, those of the other run are asked for, too."""
    for name, run, other in (("A", a, b), ("B", b, a)):
        expected = world_size_of(run) or max(*run, *other) + 1
        if missing := set(range(expected)) - set(run):
            yield Lack(f"{name} has no file of {'rank' if len(missing) == 1 else 'ranks'} {numbers(missing)} of {expected}", False)


def _lacks_of_steps(name: str, run: Run) -> Iterator[Lack]:
    """Of one run. Its first rank says which steps there are, the others have those in which they took part."""
    first = min(run)
    steps = set(run[first].steps)
    if gap := set(range(min(steps, default=0), max(steps, default=0))) - steps:
        yield Lack(f"{name} lacks {span(gap)} between others", True, first)
    for rank, ledger in run.items():
        own = {number for number in steps if took_part(run, rank, number)}
        left = steps and max(steps) not in own  # before the end: the run resumed without it
        if not left and (ending := ledger.ending()):
            yield Lack(f"{name} {ending}", True, rank)
        if missing := own - set(ledger.steps):
            yield Lack(f"{name} lacks {span(missing)} of its rank {first}", True, rank)


def _lacks_of_pair(pair: RankPair, runs: Runs) -> Iterator[Lack]:
    """Steps that one run alone has."""
    for name, own, others, other in (("A", pair.a, pair.b, runs.b), ("B", pair.b, pair.a, runs.a)):
        if alone := [number for number in own.steps if number not in others.steps and took_part(other, pair.rank, number)]:
            yield Lack(f"{span(alone)} of {name} alone", True, pair.rank)


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


BEFORE, FORWARD, BACKWARD, UPDATE = "before the forward", "forward", "backward", "update"
RECORD = "record this step again with `detail` from a checkpoint to see the module (docs/ledger.md)"


@dataclass(frozen=True)
class Culprit:
    """module: None where the difference is not inside of a module, or no module was recorded; "" is the model itself.

    inputs_agreed: whether what it computed from was the same in both runs; None where that was not recorded.
    """

    direction: str
    module: str | None
    inputs_agreed: bool | None
    why: str


def name_of(module: str) -> str:
    return module or "the model itself"


def culprit(found: list[Pair], place: int, is_start: bool) -> Culprit:
    """Of the first pair that differs. All before it are the same, so what was recorded of them agreed."""
    entry = found[place].entry
    before = [pair.entry for pair in found[:place]]
    if entry.role in (SETTING, COUNT):
        return Culprit(BEFORE if is_start else UPDATE, None, _gradients_agreed(before), _why_optimizer(entry, found[place:]))
    if is_start:
        return Culprit(BEFORE, entry.module or None, None, "the state that a run started or resumed from differs")
    return _in_step(entry, before)


def _in_step(entry: Entry, before: list[Entry]) -> Culprit:
    match entry.phase:
        case "batch":
            return Culprit(BEFORE, None, None, "the data differ, before any module ran")
        case "forward" | "recompute":
            return _of_forward(entry, before)
        case "loss" if any(each.phase == "forward" for each in before):
            return Culprit(FORWARD, None, True, "all modules agree: the loss is computed from their outputs by other code")
        case "loss":
            return Culprit(FORWARD, None, None, RECORD)
        case "backward":
            return _of_backward(entry)
        case "gradient":
            return _of_gradient(entry, before)
        case "weight":
            return Culprit(UPDATE, entry.module, _gradients_agreed(before), "the update of its weights differs")
        case "optimizer":
            return Culprit(UPDATE, entry.module or None, None, "the optimizer's state differs, weights do not yet")
    return Culprit("after the update", None, None, "random numbers were drawn differently, with no effect on this step yet")


def _of_forward(entry: Entry, before: list[Entry]) -> Culprit:
    direction = FORWARD if entry.phase == "forward" else "forward, repeated in the backward"
    module, why = entry.module, "its output differs"
    if entry.role in ("parameter", "buffer"):
        why = f"the {entry.role} changed between the record of the step before and this forward"
    elif entry.role != "output":
        if entry.caller is None:
            return Culprit(BEFORE, entry.module, None, "what the model is given differs, before any module ran")
        module, why = entry.caller, f"its own code computed {name_of(entry.module)}'s input, which differs"
    inputs = ((each.phase, each.module, each.role) == (entry.phase, module, "input") for each in before)
    return Culprit(direction, module, True if any(inputs) else None, why)


def _of_backward(entry: Entry) -> Culprit:
    """A gradient comes from whoever took the tensor; gradients of their outputs arrived earlier, and agree."""
    if entry.takers:
        why = f"the gradient of its input differs; taken by {', '.join(map(name_of, entry.takers))}"
        return Culprit(BACKWARD, entry.takers[0], True, why)
    if entry.caller is None:
        return Culprit(BACKWARD, None, True, "code outside of the model computed the gradient of its output, which differs")
    return Culprit(BACKWARD, entry.caller, True, f"its own code took the output of {name_of(entry.module)}, whose gradient differs")


def _of_gradient(entry: Entry, before: list[Entry]) -> Culprit:
    if any(each.phase == "backward" for each in before):
        return Culprit(BACKWARD, entry.module, True, "the gradient of its parameter differs, gradients between modules agree")
    if not _gradients_agreed(before):
        return Culprit(f"{FORWARD} or {BACKWARD}", None, None, f"already the gradient nearest to the loss differs; {RECORD}")
    why = f"the nearest to the loss of those that differ, or a module between it and the loss; {RECORD}"
    return Culprit(BACKWARD, entry.module, None, why)


def _gradients_agreed(before: list[Entry]) -> bool | None:
    return True if any(each.phase == "gradient" for each in before) else None


def _why_optimizer(entry: Entry, rest: list[Pair]) -> str:
    if entry.role == COUNT:
        return "the optimizer has lost its state, or has that of another step"
    names = [pair.entry.tensor for pair in rest if not pair.same and pair.entry.role == SETTING]
    return f"hyper-parameters of the optimizer differ: {', '.join(names)}"
