"""How a difference spreads: per step and module, how many tensors were compared and how many differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import LedgerError
from .aligning import Alignment, aligner
from .reading import RankLedger, read_runs

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
    ranks = read_runs(path_a, path_b, rank).pairs[0]
    a, b, align = ranks.a, ranks.b, aligner(ranks.weights_only)
    steps = sorted(set(a.steps) & set(b.steps))
    if not steps:
        raise LedgerError("the runs have no step in common")
    modules = _modules_of(a, b)
    shape = len(DIRECTIONS), len(modules), len(steps)
    compared, differing = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    places_in = lru_cache(maxsize=1)(partial(_places, {module: place for place, module in enumerate(modules)}))
    for place, step in enumerate(steps):
        aligned = align(a.steps[step], b.steps[step])
        where, size = places_in(aligned), len(DIRECTIONS) * len(modules)
        differs = ~aligned.same(a.steps[step], b.steps[step])
        compared[:, :, place] = np.bincount(where[where >= 0], minlength=size).reshape(shape[:2])
        differing[:, :, place] = np.bincount(where[(where >= 0) & differs], minlength=size).reshape(shape[:2])
    return Spread(ranks.rank, modules, tuple(steps), _rolled_up(compared, modules), _rolled_up(differing, modules))


def _places(number_of: dict[str, int], aligned: Alignment) -> Counts:
    """Direction and module of every tensor, as one number; -1: not counted. Most steps share an alignment, which is looked at once."""
    entries = [pair.entry for pair in aligned.pairs]
    directions = [DIRECTION_OF.get(entry.phase) for entry in entries]
    found = [-1 if way is None else way * len(number_of) + number_of[entry.module] for way, entry in zip(directions, entries, strict=True)]
    return np.array(found, dtype=np.int64)


def _modules_of(a: RankLedger, b: RankLedger) -> tuple[str, ...]:
    """All modules, and all that contain them. Those seen in a forward come as they ran, the others as they were recorded."""
    found: dict[str, None] = {"": None}
    layouts = {id(step.layout): step.layout for run in (a, b) for step in run.steps.values()}.values()
    for layout in sorted(layouts, key=lambda layout: not any(entry.phase == "forward" for entry in layout.entries)):
        for entry in layout.entries:
            found.update(dict.fromkeys(_lineage(entry.module)))
    number = {module: place for place, module in enumerate(found)}
    return tuple(sorted(found, key=lambda module: [number[each] for each in _lineage(module)]))  # children right behind their parents


def _lineage(module: str) -> list[str]:
    """The module, behind all that contain it but the model itself."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _rolled_up(counts: Counts, modules: tuple[str, ...]) -> Counts:
    """With what is inside of each module."""
    number = {module: place for place, module in enumerate(modules)}
    for module in sorted(modules, key=lambda name: -name.count(".")):
        if module:
            counts[:, number[module.rpartition(".")[0]]] += counts[:, number[module]]
    return counts
