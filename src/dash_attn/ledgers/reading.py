"""Ledgers as they were written: a run has ranks, a rank has segments (one per start of the process), a segment has steps."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .attention_plans import Plan
from .entries import Entry
from .framing import END, HEAD, IS_DETAILED, IS_START, LAYOUT, PLAN, STEP_FIELDS, LedgerError, Record, from_json, records

FILE_NAME = re.compile(r"rank-(\d+)\.ledger")


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]
    attention: tuple[tuple[str | None, str], ...]  # (module, name of the plan) of every call

    @cached_property
    def generators(self) -> dict[str, int]:
        """Places of the random number generators."""
        return {entry.tensor: place for place, entry in enumerate(self.entries) if entry.phase == "rng"}

    @cached_property
    def kept_ends(self) -> list[int]:
        return list(accumulate((entry.kept_bytes for entry in self.entries), initial=0))


@dataclass(frozen=True)
class Step:
    """`is_start`: the state that a segment began with, which is that after step `number`."""

    number: int
    time: float
    is_start: bool
    is_detailed: bool
    layout: Layout
    sums: NDArray[np.uint64]
    kept: bytes

    def kept_of(self, place: int) -> bytes:
        ends = self.layout.kept_ends
        return self.kept[ends[place] : ends[place + 1]]


@dataclass
class Segment:
    head: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    end: dict[str, Any] | None = None  # None: it did not end by itself
    _layouts: list[Layout] = field(default_factory=list)

    @property
    def first_step(self) -> int:
        return int(self.head["first_step"])

    def generator_states(self) -> dict[str, list[int]]:
        """The states of each random number generator, as sums, one after the other."""
        found: dict[str, list[int]] = {}
        for step in self.steps:
            for name, place in step.layout.generators.items():
                found.setdefault(name, []).append(int(step.sums[place]))
        return found

    def take(self, record: Record) -> None:
        if record.kind == LAYOUT:
            value = from_json(record.payload)
            calls = tuple((module, plan) for module, plan in value["attention"])
            self._layouts.append(Layout(tuple(map(Entry.from_json, value["entries"])), calls))
        elif record.kind == PLAN:
            plan = from_json(record.payload)
            self.plans[plan.pop("name")] = plan
        elif record.kind == END:
            self.end = from_json(record.payload)
        else:
            self.steps.append(self._step(record.payload))

    def _step(self, payload: bytes) -> Step:
        number, when, flags, layout_number = STEP_FIELDS.unpack_from(payload)
        layout = self._layouts[layout_number]
        ends = STEP_FIELDS.size, STEP_FIELDS.size + 8 * len(layout.entries)
        sums = np.frombuffer(payload[ends[0] : ends[1]], dtype=np.dtype("<u8"))
        return Step(number, when, bool(flags & IS_START), bool(flags & IS_DETAILED), layout, sums, payload[ends[1] :])


@dataclass
class RankLedger:
    """The file of one rank. `unfinished`: bytes at its end that are no whole record."""

    path: Path
    segments: list[Segment]
    unfinished: int

    @cached_property
    def steps(self) -> dict[int, Step]:
        """Steps by number. What a segment recorded past the step that a later one resumed from was given up, and is left out."""
        found: dict[int, Step] = {}
        for segment in self.segments:
            found = {number: step for number, step in found.items() if number < segment.first_step}
            found.update({step.number: step for step in segment.steps if not step.is_start})
        return found

    @cached_property
    def starts(self) -> dict[int, Step]:
        """The states that segments began with, by the step they came after; of several the last."""
        return {step.number: step for segment in self.segments for step in segment.steps if step.is_start}

    @cached_property
    def idle_generators(self) -> frozenset[str]:
        """Random number generators whose state never changed while a process ran: nobody drew from them."""
        states = [segment.generator_states() for segment in self.segments]
        names = {name for found in states for name in found if len(found[name]) > 1}
        return frozenset(name for name in names if all(len(set(found.get(name, ()))) <= 1 for found in states))

    @property
    def world_sizes(self) -> set[int]:
        return {int(segment.head["world_size"]) for segment in self.segments}

    @property
    def plans(self) -> dict[str, Plan]:
        return {name: plan for segment in self.segments for name, plan in segment.plans.items()}

    @property
    def environment(self) -> dict[str, Any]:
        """Of the last start of the process."""
        found: dict[str, Any] = {"world_size": self.segments[-1].head["world_size"], **self.segments[-1].head["environment"]}
        return found

    def ending(self) -> str:
        """How the file ends, in words; empty where the run ended by itself."""
        if self.unfinished:
            return f"ends in the middle of a record, as after a crash: its last {self.unfinished:,} bytes are left out"
        end = self.segments[-1].end
        if end is None:
            return "has no end: the process was killed, or is still running"
        return f"ended by {end['reason']}" if end["reason"] else ""


def read_rank(path: Path) -> RankLedger:
    """One file. Raises LedgerError where it is damaged, or not a ledger."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"cannot read {path}: {error.strerror}") from None
    segments: list[Segment] = []
    end = 0
    for record in records(path, data):
        try:
            if record.kind == HEAD:
                segments.append(Segment(from_json(record.payload)))
            else:
                segments[-1].take(record)
        except (KeyError, IndexError, ValueError, TypeError, zlib.error) as error:
            raise LedgerError(f"{path} is damaged: the record at byte {record.place:,} makes no sense ({error!r})") from None
        end = record.end
    if not segments:
        raise LedgerError(f"{path} is cut off before its first record was whole")
    return RankLedger(path, segments, len(data) - end)


def read_run(path: str | Path) -> dict[int, RankLedger]:
    """The ledgers of a run by rank: all files of a folder, or one file."""
    path = Path(path)
    if path.is_file():
        found = read_rank(path)
        return {int(found.segments[-1].head["rank"]): found}
    if not path.is_dir():
        raise LedgerError(f"there is no ledger {path}: neither a folder nor a file has that name")
    files = {int(match[1]): file for file in path.iterdir() if (match := FILE_NAME.fullmatch(file.name))}
    if not files:
        raise LedgerError(f"there is no ledger in {path}: a folder of a run has files rank-0.ledger, rank-1.ledger, ...")
    return {rank: read_rank(files[rank]) for rank in sorted(files)}
