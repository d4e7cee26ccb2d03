"""Every schedule under its own name. To add one: write a file, list it here, record a golden file (CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from ..problem import Problem
from ..schedule import GENERATED_BY, Schedule
from ..validate import TooFewWorkers
from .alternating import alternating
from .arrival import arrival
from .auto import auto
from .one_kind import ascending, descending, spt
from .shift import shift, shift_blocks
from .symmetric_shift import symmetric_shift
from .weave import weave

Generator = Callable[[Problem, int], Schedule]

_ALL = (ascending, descending, spt, shift, shift_blocks, symmetric_shift, alternating, arrival, weave)
GENERATORS: dict[str, Generator] = {generator.__name__: generator for generator in _ALL}
ScheduleName = Literal[
    "auto", "ascending", "descending", "spt", "shift", "shift_blocks", "symmetric_shift", "alternating", "arrival", "weave"
]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
GENERATED_BY.update(GENERATORS)


def generate(name: str, problem: Problem, workers: int) -> Schedule:
    """The schedule called `name` (or `auto`) for a problem on `workers` workers."""
    if name == "auto":
        try:
            return auto(problem, workers)
        except TooFewWorkers as error:
            raise error.asked_for_as(f"auto (here {error.name})") from None
    if name not in GENERATORS:
        raise ValueError(f"unknown schedule {name!r}; choose from {', '.join(SCHEDULES)}")
    return GENERATORS[name](problem, workers)


__all__ = ["GENERATORS", "SCHEDULES", "Generator", "ScheduleName", "auto", "generate", *GENERATORS]
