"""`dash-attn diff`: do two runs agree, and where they part first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ledgers.comparing import Comparison, FirstDifference

CODES = "Exit code 0: they agree in all that both recorded; 1: they differ; 2: they cannot be compared."


def add_command(commands: Any) -> None:
    text = f"Compares the ledgers of two runs (dash_attn.ledger), and names the first difference in execution order. {CODES}"
    parser = commands.add_parser("diff", help="compare the ledgers of two training runs", description=text)
    parser.add_argument("a", metavar="A", help="folder of a run, or the file of one rank")
    parser.add_argument("b", metavar="B", help="the run to compare it with")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..ledgers.comparing import compare_runs

    found = compare_runs(arguments.a, arguments.b)
    if arguments.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        show(found)
    return 0 if found.agree else 1


def as_json(found: Comparison) -> dict[str, Any]:
    return {
        "agree": found.agree,
        "first": None if found.first is None else _first_as_json(found.first),
        "steps": list(found.steps),
        "steps_that_differ": list(found.steps_that_differ),
        "tensors": found.tensors,
        "ranks": list(found.ranks),
        "environment": [dict(zip(("name", "a", "b"), row, strict=True)) for row in found.environment],
        "attention": [dict(zip(("name", "a", "b"), row, strict=True)) for row in found.attention],
        "notes": found.notes,
    }


def _first_as_json(first: FirstDifference) -> dict[str, Any]:
    entry, element = first.pair.entry, first.pair.element
    return {
        "rank": first.rank,
        "step": first.step,
        "before_it": first.before_it,
        "direction": first.culprit.direction,
        "module": first.culprit.module,
        "inputs_agreed": first.culprit.inputs_agreed,
        "why": first.culprit.why,
        "phase": entry.phase,
        "tensor": {"module": entry.module, "role": entry.role, "name": entry.tensor, "call": entry.call},
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "how": first.pair.how,
        "element": None if element is None else asdict(element),
        "differing": {phase: {"differ": count, "of": total} for phase, (count, total) in first.differing.items()},
    }


def show(found: Comparison) -> None:
    if found.first is None:
        print(verdict(found))
    else:
        _print(verdict(found), ("", ""), rows_of(found.first))
        print(f"Steps that differ: {len(found.steps_that_differ)} of {len(found.steps)}.")
    if found.attention:
        _print("\nAttention plans differ:", ("call", "A", "B"), found.attention)
    if found.environment:
        _print("\nEnvironments differ:", ("", "A", "B"), found.environment)
    for note in found.notes:
        print(f"note: {note}")


def verdict(found: Comparison) -> str:
    steps = f"steps {found.steps[0]} to {found.steps[-1]}" if found.steps else "the states they start with"
    compared = f"{found.tensors:,} tensors of {steps}, {'rank' if len(found.ranks) == 1 else 'ranks'} {', '.join(map(str, found.ranks))}"
    if found.first is None:
        return f"The runs agree: {compared}."
    return f"The runs differ, first {'before' if found.first.before_it else 'in'} step {found.first.step}. Compared: {compared}."


def rows_of(first: FirstDifference) -> list[tuple[str, str]]:
    from ..ledgers.aligning import BITS
    from ..ledgers.culprit import name_of

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


def _print(header: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Flush left: the cells are words. The last column is not cut off, so that nothing is hidden in a pipe."""
    print(header)
    lines = [columns, *rows] if any(columns) else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
