"""How a difference spreads: per step and module, how many tensors were compared and how many differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .aligning import pairs
from .entries import Entry
from .framing import LedgerError
from .reading import Layout, RankLedger, Step, read_run
from .surroundings import share_alike

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
    a, b = read_run(path_a), read_run(path_b)
    both = sorted(set(a) & set(b))
    if not both or (rank is not None and rank not in both):
        raise LedgerError(f"both runs must have rank {'0' if rank is None else rank}: A has {sorted(a)}, B has {sorted(b)}")
    chosen = both[0] if rank is None else rank
    return _of_rank(chosen, a[chosen], b[chosen])


def _of_rank(rank: int, a: RankLedger, b: RankLedger) -> Spread:
    steps = sorted(set(a.steps) & set(b.steps))
    if not steps:
        raise LedgerError("the runs have no step in common")
    modules = _modules_of(a, b)
    number = {module: place for place, module in enumerate(modules)}
    shape = len(DIRECTIONS), len(modules), len(steps)
    compared, differing = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    compare = _Compare(number, share_alike(a, b))
    for place, step in enumerate(steps):
        direction, module, same = compare(a.steps[step], b.steps[step])
        where, size = direction * len(modules) + module, len(DIRECTIONS) * len(modules)
        counted = direction >= 0
        compared[:, :, place] = np.bincount(where[counted], minlength=size).reshape(shape[:2])
        differing[:, :, place] = np.bincount(where[counted & ~same], minlength=size).reshape(shape[:2])
    return Spread(rank, modules, tuple(steps), _rolled_up(compared, modules), _rolled_up(differing, modules))


class _Compare:
    """(direction, module, whether it is the same) of every tensor of a step. Most steps share a layout, which is looked at once."""

    def __init__(self, number: dict[str, int], complete: bool) -> None:
        self.number, self.complete = number, complete
        self._known: dict[tuple[int, int], tuple[Counts, Counts] | None] = {}  # None: their layouts differ

    def __call__(self, a: Step, b: Step) -> tuple[Counts, Counts, NDArray[np.bool_]]:
        key = id(a.layout), id(b.layout)
        if key not in self._known:
            self._known[key] = self._places(a.layout.entries) if a.layout.entries == b.layout.entries else None
        known = self._known[key]
        return (*known, a.sums == b.sums) if known is not None else self.one_by_one(a, b)

    def one_by_one(self, a: Step, b: Step) -> tuple[Counts, Counts, NDArray[np.bool_]]:
        found = pairs(a, b, self.complete)
        return (*self._places(tuple(pair.entry for pair in found)), np.array([pair.same for pair in found], dtype=bool))

    def _places(self, entries: tuple[Entry, ...]) -> tuple[Counts, Counts]:
        """Direction -1: not counted."""
        direction = np.array([DIRECTION_OF.get(entry.phase, -1) for entry in entries], dtype=np.int64)
        return direction, np.array([self.number[entry.module] for entry in entries], dtype=np.int64)


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
