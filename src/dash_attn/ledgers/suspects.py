"""Random number generators whose states differ: which one is to blame for a difference, and which changed nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .aligning import Bools

if TYPE_CHECKING:
    from .comparing import Moment

States = dict[str, int]


class Suspects:
    """A generator that differs is suspected until a step in which numbers are drawn from it. If that step agrees, it changes nothing."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[Moment, int]] = {}  # suspected, in the order of time
        self._seen: dict[str, str] = {}  # all that differed, and since when
        self._cleared: set[str] = set()
        self._before: tuple[States, States] = {}, {}  # the states at the moment before

    def look(self, moment: Moment, same: Bools) -> None:
        """At a moment that agrees in all but generators."""
        self._cleared |= {name for name in self._since if self._is_drawn(name, moment)}
        differing = {moment.aligned.pairs[place].entry.tensor: int(place) for place in np.flatnonzero(~same & moment.aligned.is_generator)}
        kept = {name: since for name, since in self._since.items() if name in differing}
        self._since = {name: since for name, since in kept.items() if name not in self._cleared}
        for name, place in differing.items():
            self._seen.setdefault(name, f"{'before' if moment.is_start else 'after'} step {moment.number + moment.is_start}")
            if name not in self._cleared:
                self._since.setdefault(name, (moment, place))
        self._before = moment.a.generators, moment.b.generators

    def blamed(self, moment: Moment, place: int) -> tuple[Moment, int] | None:
        """Where the generator differed first that explains a difference in this moment, if one does."""
        before = {pair.entry.phase for pair in moment.aligned.pairs[:place]}
        kept = moment.aligned.pairs[place].entry.role in ("parameter", "buffer")
        if moment.is_start or kept or before & {"loss", "backward", "gradient"}:  # a forward that agrees drew nothing that matters
            return None
        return next((since for name, since in self._since.items() if self._is_drawn(name, moment)), None)

    def notes(self, blamed: tuple[Moment, int] | None = None) -> list[str]:
        """Of the others."""
        names = [name for name in self._seen if blamed is None or self._since.get(name) != blamed]
        return [f"the generator {name} has another state since {self._seen[name]}" for name in names]

    def _is_drawn(self, name: str, moment: Moment) -> bool:
        """Whether a run drew from it since the moment before."""
        if moment.is_start:
            return False
        return any(before.get(name) != step.generators.get(name) for before, step in zip(self._before, (moment.a, moment.b), strict=True))
