"""Ledgers as they were written: a run has ranks, a rank has segments (one per start of the process), a segment has steps.

`read_runs` says which file of one run is compared with which of the other.
Files are read record by record, and sums when they are asked for: a long run need not fit in memory.
"""

from __future__ import annotations

import re
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .entries import Entry
from .format import END, FRAME_BYTES, HEAD, IS_DETAILED, IS_START, LAYOUT, PLAN, STEP_FIELDS, LedgerError, Record, from_json, records

if TYPE_CHECKING:
    from .attention_plans import Plan

FILE_NAME = re.compile(r"rank-(\d+)\.ledger")


@dataclass(frozen=True, eq=False)  # known by its identity: one may have many entries
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
    is_start: bool
    is_detailed: bool
    layout: Layout
    generators: dict[str, int]  # states of random number generators, as sums
    world_size: int | None
    path: Path
    place: int  # of the sums in the file; the elements that were kept come after them

    @property
    def sums(self) -> NDArray[np.uint64]:
        return np.frombuffer(self._read(0, 8 * len(self.layout.entries)), dtype=np.dtype("<u8"))

    def kept_of(self, place: int) -> bytes:
        ends, kept = self.layout.kept_ends, 8 * len(self.layout.entries)
        return self._read(kept + ends[place], kept + ends[place + 1])

    def _read(self, start: int, end: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.place + start)
            data = file.read(end - start)
        if len(data) < end - start:
            raise LedgerError(f"{self.path} became shorter while it was read")
        return data


@dataclass
class Segment:
    path: Path
    head: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    end: dict[str, Any] | None = None  # None: it did not end by itself
    _layouts: list[Layout] = field(default_factory=list)

    @property
    def first_step(self) -> int:
        return int(self.head["first_step"])

    @property
    def next_step(self) -> int:
        """Behind the last that was recorded."""
        return max((step.number for step in self.steps), default=self.first_step - 1) + 1

    @property
    def world_size(self) -> int | None:
        """None: it was not recorded. A rank beyond it was numbered by hand, and nobody said how many there are."""
        size = self.head["world_size"]
        return None if size is None or int(size) <= int(self.head["rank"]) else int(size)

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
            self.steps.append(self._step(record))

    def _step(self, record: Record) -> Step:
        number, _, flags, layout_number = STEP_FIELDS.unpack_from(record.payload)
        layout = self._layouts[layout_number]
        sums = np.frombuffer(record.payload, dtype=np.dtype("<u8"), count=len(layout.entries), offset=STEP_FIELDS.size)
        states = {name: int(sums[place]) for name, place in layout.generators.items()}
        place = record.place + FRAME_BYTES + STEP_FIELDS.size
        return Step(number, bool(flags & IS_START), bool(flags & IS_DETAILED), layout, states, self.world_size, self.path, place)


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
        """The states that segments began with, by the step they came after; without those that were given up."""
        found: dict[int, Step] = {}
        for segment in self.segments:
            found = {number: step for number, step in found.items() if number < segment.first_step - 1}
            found.update({step.number: step for step in segment.steps if step.is_start})
        return found

    @cached_property
    def idle_generators(self) -> frozenset[str]:
        """Random number generators whose state never changed while a process ran: nobody drew from them."""
        found: dict[str, list[list[int]]] = {}  # by segment
        for segment in self.segments:
            for name in {name for step in segment.steps for name in step.generators}:
                found.setdefault(name, []).append([step.generators[name] for step in segment.steps if name in step.generators])
        seen = {name: states for name, states in found.items() if any(len(each) > 1 for each in states)}
        return frozenset(name for name, states in seen.items() if all(len(set(each)) == 1 for each in states))

    @property
    def world_sizes(self) -> set[int | None]:
        return {segment.world_size for segment in self.segments}

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
            return "has no end: the process was killed, its disk was full, or it is still running"
        if end["reason"]:
            return f"ended by {end['reason']}"
        return "" if end["next_step"] == self.segments[-1].next_step else "ended before its last step was written"


def read_rank(path: Path) -> RankLedger:
    """One file. Raises LedgerError where it is damaged, or not a ledger."""
    segments: list[Segment] = []
    end = 0
    try:
        size = path.stat().st_size  # before more is written
        for record in records(path):
            _take(path, segments, record)
            end = record.end
    except OSError as error:
        raise LedgerError(f"cannot read {path}: {error.strerror}") from None
    if not segments:
        raise LedgerError(f"{path} is cut off before its first record was whole")
    return RankLedger(path, segments, max(0, size - end))


def _take(path: Path, segments: list[Segment], record: Record) -> None:
    try:
        if record.kind == HEAD:
            segments.append(Segment(path, from_json(record.payload)))
        else:
            segments[-1].take(record)
    except (KeyError, IndexError, ValueError, TypeError, struct.error, zlib.error) as error:
        raise LedgerError(f"{path} is damaged: the record at byte {record.place:,} makes no sense ({error!r})") from None


Run = dict[int, RankLedger]  # by rank


def read_run(path: str | Path, rank: int | None = None) -> Run:
    """The ledgers of a run: all files of a folder, or one file. rank: this one alone, if it is there."""
    path = Path(path)
    if path.is_file():
        found = read_rank(path)
        return {int(found.segments[-1].head["rank"]): found}
    if not path.is_dir():
        raise LedgerError(f"there is no ledger {path}: neither a folder nor a file has that name")
    files = {int(match[1]): file for file in path.iterdir() if (match := FILE_NAME.fullmatch(file.name))}
    if not files:
        raise LedgerError(f"there is no ledger in {path}: a folder of a run has files rank-0.ledger, rank-1.ledger, ...")
    run = {number: read_rank(file) for number, file in sorted(files.items()) if rank not in files or number == rank}
    if rank in files and 0 in files and rank != 0:
        with suppress(LedgerError):  # it says whether the rank took part to the end; its own faults are not asked for
            run[0] = read_rank(files[0])
    for number, ledger in run.items():
        if number != (own := int(ledger.segments[-1].head["rank"])):
            raise LedgerError(f"{ledger.path} is the file of rank {own}, under the name of another")
    _leave_out_ranks_that_left(run)
    return {number: ledger for number, ledger in run.items() if rank not in files or number == rank}


def _leave_out_ranks_that_left(run: Run) -> None:
    """A run that resumed on fewer ranks gave up what the others had recorded from there on. Rank 0 is always there, and knows."""
    for rank, ledger in run.items():
        for steps, until in ((ledger.steps, 0), (ledger.starts, 1)):  # a start belongs to the step after it
            for number in [number for number in steps if not took_part(run, rank, number + until)]:
                del steps[number]


def took_part(run: Run, rank: int, number: int) -> bool:
    """Whether a rank was there in a step, as far as rank 0 knows."""
    step = run[0].steps.get(number) if 0 in run else None
    return step is None or step.world_size is None or rank < step.world_size


def world_size_of(run: Run) -> int | None:
    """The most ranks that took part; None where that was not recorded."""
    last = {ledger.segments[-1].world_size for ledger in run.values()}
    sizes = last | {step.world_size for step in run[min(run)].steps.values()}
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None


class RankPair(NamedTuple):
    """weights_only: a rank that one run alone has, beside one of the other that shares its weights, but not its work."""

    rank: int
    a: RankLedger
    b: RankLedger
    weights_only: bool = False


class Runs(NamedTuple):
    """one_rank: a rank was chosen, or a file was named in place of a folder. The other ranks are left out then."""

    a: Run
    b: Run
    pairs: list[RankPair]
    one_rank: bool


def read_runs(path_a: str | Path, path_b: str | Path, rank: int | None = None) -> Runs:
    """rank: this one alone."""
    a, b = read_run(path_a, rank), read_run(path_b, rank)
    if rank is not None and set(a) != set(b):
        a, b = read_run(path_a), read_run(path_b)  # a rank that one of them has not: compared with another one
    alone = [Path(path).is_file() or world_size_of(run) in (1, None) for path, run in ((path_a, a), (path_b, b))]
    named = Path(path_a).is_file() or Path(path_b).is_file()
    pairs = _same_ranks(a, b, named and all(alone)) + ([] if named else _other_ranks(a, b))
    chosen = [pair for pair in pairs if rank is None or pair.rank == rank]
    if not chosen:
        raise LedgerError(f"no rank {rank} can be compared: A has {sorted(a)}, B has {sorted(b)}")
    if one_rank := named or rank is not None:
        a = {number: ledger for number, ledger in a.items() if any(ledger is pair.a for pair in chosen)}
        b = {number: ledger for number, ledger in b.items() if any(ledger is pair.b for pair in chosen)}
    return Runs(a, b, chosen, one_rank)


def _same_ranks(a: Run, b: Run, one_by_one: bool) -> list[RankPair]:
    if one_by_one and len(a) == len(b) == 1:  # whatever their numbers are
        return [RankPair(next(iter(a)), next(iter(a.values())), next(iter(b.values())))]
    both = sorted(set(a) & set(b))
    if not both:
        raise LedgerError(f"no rank is in both runs: A has {sorted(a)}, B has {sorted(b)}")
    return [RankPair(rank, a[rank], b[rank]) for rank in both]


def _other_ranks(a: Run, b: Run) -> list[RankPair]:
    """Ranks of the run that had more. On as many ranks, a rank without its like has lost its file, and others may hold other shards."""
    sizes = world_size_of(a), world_size_of(b)
    if None not in sizes and sizes[0] == sizes[1]:
        return []
    both = sorted(set(a) & set(b))
    beside = {rank: both[rank % len(both)] for rank in sorted(set(a) ^ set(b))}
    return [RankPair(rank, a.get(rank, a[like]), b.get(rank, b[like]), weights_only=True) for rank, like in beside.items()]
