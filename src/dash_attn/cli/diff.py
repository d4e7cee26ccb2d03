"""`dash-attn diff`: do two runs agree, and where they part first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..formats import COMPARISONS
from .parser import whole
from .table import aligned

if TYPE_CHECKING:
    from ..ledgers.comparing import Comparison, FirstDifference

CODES = {
    "agree": (0, "both runs ended well, have files of all their ranks, the same steps and phases, and every tensor that both have agrees"),
    "differ": (1, "they differ"),
    "error": (2, "they cannot be compared"),
    "incomplete": (3, "they agree as far as both go, and one of them lacks an end, steps, phases or ranks"),
}
HELP = "compare the ledgers of two training runs"
TEXT = f"""Compares the ledgers of two runs (dash_attn.ledger), and names the first difference in execution order.

exit code:
{chr(10).join(f"  {code}  {meaning}" for code, meaning in CODES.values())}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="folder of a run, or the file of one rank")
    parser.add_argument("b", metavar="B", help="the run to compare it with")
    partial_help = "accept a run that is shorter or has less detail (exit code 0): a job that still runs, a window recorded again"
    parser.add_argument("--partial", action="store_true", help=partial_help)
    parser.add_argument("--rank", type=whole(0), metavar="N", help="compare this rank alone; the verdict is for it alone")
    parser.add_argument("--first", action="store_true", help="stop at the first difference: quicker, and later steps are not counted")
    parser.add_argument("--json", action="store_true", help="print the comparison, and errors, as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..ledgers.comparing import compare_runs

    try:
        found = compare_runs(arguments.a, arguments.b, partial=arguments.partial, rank=arguments.rank, stop=arguments.first)
    except Exception as error:  # of any kind: an exit code of 1 would say that they differ
        message = str(error) if isinstance(error, (ValueError, OSError)) else repr(error)
        if not arguments.json:
            raise ValueError(message) from error
        return print_error(message)
    if arguments.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        show(found)
    return CODES[found.verdict][0]


def print_error(message: str) -> int:
    """As JSON. The exit code."""
    code = CODES["error"][0]
    print(json.dumps({**COMPARISONS.mark, "verdict": "error", "exit_code": code, "agree": False, "error": message}, indent=2))
    return code


def as_json(found: Comparison) -> dict[str, Any]:
    kept = ("lacking", "taken_as_partial", "steps", "steps_that_differ", "tensors", "ranks", "stopped", "notes")
    return {
        **COMPARISONS.mark,
        "verdict": found.verdict,
        "exit_code": CODES[found.verdict][0],
        "agree": found.agree,
        "first": None if found.first is None else _first_as_json(found.first),
        **{name: list(value) if isinstance(value := getattr(found, name), tuple) else value for name in kept},
        "environment": [dict(zip(("name", "a", "b"), row, strict=True)) for row in found.environment],
        "attention": [dict(zip(("name", "a", "b"), row, strict=True)) for row in found.attention],
    }


def _first_as_json(first: FirstDifference) -> dict[str, Any]:
    entry, element = first.pair.entry, first.pair.element
    return {
        "rank": first.rank,
        "step": first.step,
        "before_it": first.before_it,
        **asdict(first.culprit),
        "phase": entry.phase,
        "tensor": {"module": entry.module, "role": entry.role, "name": entry.tensor, "call": entry.call},
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "how": first.pair.how,
        "element": None if element is None else asdict(element),
        "differing": {phase: {"differ": count, "of": total} for phase, (count, total) in first.differing.items()},
    }


def show(found: Comparison) -> None:
    print(verdict(found))
    if found.first is None:
        for lack in found.lacking:
            print(f"  {lack}")
    else:
        _print(("", ""), rows_of(found.first))
        differing = f"Steps that differ: {len(found.steps_that_differ)} of {len(found.steps)}."
        print("Later steps were not compared (--first)." if found.stopped else differing)
    if found.attention:
        print("\nAttention plans differ:")
        _print(("call", "A", "B"), found.attention)
    if found.environment:
        print("\nEnvironments differ:")
        _print(("", "A", "B"), found.environment)
    for note in (*(found.lacking if found.first is not None else ()), *found.taken_as_partial, *found.notes):
        print(f"note: {note}")


def verdict(found: Comparison) -> str:
    """In one line."""
    from ..ledgers.remarks import numbers

    steps = _in_words(found.steps)
    compared = f"{found.tensors:,} tensors of {steps}, {_plural('rank', found.ranks)} {numbers(found.ranks)}"
    if found.first is not None:
        where = f"{'before' if found.first.before_it else 'in'} step {found.first.step} on rank {found.first.rank}"
        return f"The runs differ, first {where}. Compared: {compared}."
    if found.lacking:
        return f"Not complete: the runs agree only as far as both go, {_in_words(found.steps_of_all)}. Compared: {compared}."
    return f"The runs agree{' as far as both go' * bool(found.taken_as_partial)}: {compared}."


def _in_words(steps: Sequence[int]) -> str:
    if not steps:
        return "the states they start with"
    return f"{_plural('step', steps)} {' to '.join(map(str, (*steps[:1], *steps[1:][-1:])))}"


def _plural(word: str, of: Sequence[int]) -> str:
    return word if len(of) == 1 else f"{word}s"


def rows_of(first: FirstDifference) -> list[tuple[str, str]]:
    from ..ledgers.aligning import BITS
    from ..ledgers.remarks import name_of

    entry, element, judged = first.pair.entry, first.pair.element, first.culprit
    agreed = {True: "yes", False: "no", None: "not recorded"}[judged.inputs_agreed]
    rows = [
        ("direction", judged.direction),
        ("module", "-" if judged.module is None else name_of(judged.module)),
        ("its inputs agreed", agreed),
        ("why", judged.why),
        ("tensor", entry_in_words(first)),
        ("differs in", first.pair.how),
    ]
    if element is not None:
        rows += [("first element", str(list(element.index))), ("in A", element.a), ("in B", element.b)]
    elif entry.kept and first.pair.how == BITS:
        rows.append(("first element", f"beyond the {entry.kept:,} that were kept"))
    counts = ", ".join(f"{count} of {total} {phase}" for phase, (count, total) in first.differing.items() if count)
    return [*rows, ("tensors that differ", counts)]


def entry_in_words(first: FirstDifference) -> str:
    entry = first.pair.entry
    what = "gradient of " if entry.phase == "backward" else f"{entry.phase}: " if not entry.role else ""
    role = f"{entry.role} " if entry.role else ""
    owner = f" of {entry.module}" if entry.module else ""
    call = f", call {entry.call}" if entry.call else ""
    return f"{what}{role}{entry.tensor}".strip() + f"{owner}{call}, {entry.dtype} {entry.shape}"


def _print(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Flush left: the cells are words. The last column is not cut off, so that nothing is hidden in a pipe."""
    for line in aligned([columns, *rows] if any(columns) else rows, flush_left=True):
        print(f"  {line.rstrip()}")
