"""How a difference spreads: per step and module, how many tensors were compared and how many differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .aligning import Alignment, Alignments
from .entries import Entry
from .framing import LedgerError
from .rank_pairs import RankPair, read_runs
from .reading import Layout, RankLedger

DIRECTIONS = ("forward", "backward", "update")
DIRECTION_OF = {"batch": 0, "forward": 0, "loss": 0, "recompute": 1, "backward": 1, "gradient": 1, "weight": 2, "optimizer": 2}
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Spread:
    """Of one rank. Modules are in the order in which they ran, each behind those that contain it, and contain what is inside of them.

    compared, differing: [direction, module, step]. 0 compared: nothing was recorded there. Random number generators are left out.
    """

    rank: int
    modules: tuple[str, ...]  # "" is the model itself
    steps: tuple[int, ...]
    compared: Counts
    differing: Counts


def spread(path_a: str | Path, path_b: str | Path, rank: int | None = None) -> Spread:
    """`rank`: by default the first that both runs have. Raises LedgerError where they have no step in common."""
    return _of_rank(read_runs(path_a, path_b, rank).pairs[0])


def _of_rank(ranks: RankPair) -> Spread:
    a, b = ranks.a, ranks.b
    steps = sorted(set(a.steps) & set(b.steps))
    if not steps:
        raise LedgerError("the runs have no step in common")
    modules = _modules_of(a, b)
    shape = len(DIRECTIONS), len(modules), len(steps)
    compared, differing = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    alignments, places = Alignments(ranks.weights_only), _Places(modules)
    for place, step in enumerate(steps):
        aligned = alignments.of(a.steps[step], b.steps[step])
        where, size = places.of(aligned), len(DIRECTIONS) * len(modules)
        differs = ~aligned.same(a.steps[step], b.steps[step])
        compared[:, :, place] = np.bincount(where[where >= 0], minlength=size).reshape(shape[:2])
        differing[:, :, place] = np.bincount(where[(where >= 0) & differs], minlength=size).reshape(shape[:2])
    return Spread(ranks.rank, modules, tuple(steps), _rolled_up(compared, modules), _rolled_up(differing, modules))


class _Places:
    """Direction and module of every tensor, as one number; -1: not counted. Most steps share an alignment, which is looked at once."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._number = {module: place for place, module in enumerate(modules)}
        self._last: tuple[Alignment | None, Counts] = None, np.zeros(0, dtype=np.int64)

    def of(self, aligned: Alignment) -> Counts:
        if self._last[0] is not aligned:
            self._last = aligned, np.array([self._place(pair.entry) for pair in aligned.pairs], dtype=np.int64)
        return self._last[1]

    def _place(self, entry: Entry) -> int:
        direction = DIRECTION_OF.get(entry.phase)
        return -1 if direction is None else direction * len(self._number) + self._number[entry.module]


def _modules_of(a: RankLedger, b: RankLedger) -> tuple[str, ...]:
    """All modules, and all that contain them. Those seen in a forward come as they ran, the others as they were recorded."""
    found: dict[str, None] = {"": None}
    layouts = {id(step.layout): step.layout for run in (a, b) for step in run.steps.values()}.values()
    for layout in sorted(layouts, key=_has_no_forward):
        for entry in layout.entries:
            parts = entry.module.split(".")
            for end in range(1, len(parts) + 1):
                found.setdefault(".".join(parts[:end]))
    return tuple(_as_tree(list(found)))


def _has_no_forward(layout: Layout) -> bool:
    return not any(entry.phase == "forward" for entry in layout.entries)


def _as_tree(modules: list[str]) -> list[str]:
    """Children right behind their parents, in the order in which they were found."""
    children: dict[str, list[str]] = {}
    for module in modules:
        if module:
            children.setdefault(module.rpartition(".")[0], []).append(module)
    found, left = [], [""]
    while left:
        module = left.pop()
        found.append(module)
        left += reversed(children.get(module, []))
    return found


def _rolled_up(counts: Counts, modules: tuple[str, ...]) -> Counts:
    """With what is inside of each module."""
    number = {module: place for place, module in enumerate(modules)}
    for module in sorted(modules, key=lambda name: -name.count(".")):
        if module:
            counts[:, number[module.rpartition(".")[0]]] += counts[:, number[module]]
    return counts
