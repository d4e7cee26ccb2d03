"""Ledgers as they were written: a run has ranks, a rank has stints (one per start of the process), a stint has steps.

`read_runs` says which file of one run is compared with which of the other.
Files are read record by record, and sums when they are asked for: a long run need not fit in memory.
"""

import re
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import LedgerError
from .format import END, FRAME_BYTES, HEAD, IS_START, LAYOUT, PLAN, STEP, STEP_FIELDS, Entry, Plan, Record, from_json, records

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
        return list(accumulate((entry.kept * entry.itemsize for entry in self.entries), initial=0))


@dataclass(frozen=True)
class Step:
    """`is_start`: the state that a stint began with, which is that after step `number`."""

    number: int
    is_start: bool
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
class RankLedger:
    """The file of one rank. A stint begins with each start of its process, which wrote a head.

    steps: by number. What a stint recorded past the step that a later one resumed from was given up, and is left out.
    starts: the states that stints began with, by the step they came after; without those that were given up.
    """

    path: Path
    heads: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    starts: dict[int, Step] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    unfinished: int = 0  # bytes at its end that are no whole record
    # Of the last stint:
    _end: dict[str, Any] | None = None  # None: it did not end by itself
    _next_step: int = 0  # behind the last that was recorded
    _layouts: list[Layout] = field(default_factory=list)
    _states: dict[str, int] = field(default_factory=dict)  # of random number generators
    # Of all:
    _compared: set[str] = field(default_factory=set)  # random number generators with two states of one process
    _drawn: set[str] = field(default_factory=set)  # those of them that changed

    @property
    def rank(self) -> int:
        return int(self.heads[-1]["rank"])

    @property
    def world_size(self) -> int | None:
        """Of the last stint. None: it was not recorded."""
        return _world_size(self.heads[-1])

    @property
    def world_sizes(self) -> set[int | None]:
        return set(map(_world_size, self.heads))

    @property
    def environment(self) -> dict[str, Any]:
        """Of the last start of the process."""
        return {"world_size": self.heads[-1]["world_size"], **self.heads[-1]["environment"]}

    @property
    def idle_generators(self) -> set[str]:
        """Random number generators whose state never changed while a process ran: nobody drew from them."""
        return self._compared - self._drawn

    def ending(self) -> str:
        """How the file ends, in words; empty where the run ended by itself."""
        if self.unfinished:
            return f"ends in the middle of a record, as after a crash: its last {self.unfinished:,} bytes are left out"
        if self._end is None:
            return "has no end: the process was killed, its disk was full, or it is still running"
        if self._end["reason"]:
            return f"ended by {self._end['reason']}"
        return "" if self._end["next_step"] == self._next_step else "ended before its last step was written"

    def take(self, record: Record) -> None:
        """The next record of the file."""
        if record.kind != STEP:
            value = from_json(record.payload)
        if record.kind == HEAD:
            self._begin(value)
        elif not self.heads:
            raise ValueError("it comes before any head")
        elif record.kind == LAYOUT:
            calls = tuple((module, plan) for module, plan in value["attention"])
            self._layouts.append(Layout(tuple(map(Entry.from_json, value["entries"])), calls))
        elif record.kind == PLAN:
            self.plans[value.pop("name")] = value
        elif record.kind == END:
            self._end = value
        else:
            self._add(self._step(record))

    def _begin(self, head: dict[str, Any]) -> None:
        first = int(head["first_step"])
        self.heads.append(head)
        self.steps = {number: step for number, step in self.steps.items() if number < first}
        self.starts = {number: step for number, step in self.starts.items() if number < first - 1}
        self._end, self._next_step, self._layouts, self._states = None, first, [], {}

    def _step(self, record: Record) -> Step:
        number, _, flags, layout_number = STEP_FIELDS.unpack_from(record.payload)
        layout = self._layouts[layout_number]
        sums = np.frombuffer(record.payload, dtype=np.dtype("<u8"), count=len(layout.entries), offset=STEP_FIELDS.size)
        states = {name: int(sums[place]) for name, place in layout.generators.items()}
        place = record.place + FRAME_BYTES + STEP_FIELDS.size
        return Step(number, bool(flags & IS_START), layout, states, self.world_size, self.path, place)

    def _add(self, step: Step) -> None:
        (self.starts if step.is_start else self.steps)[step.number] = step
        self._next_step = max(self._next_step, step.number + 1)
        self._compared |= self._states.keys() & step.generators.keys()
        self._drawn |= {name for name, state in step.generators.items() if self._states.get(name, state) != state}
        self._states.update(step.generators)


def _world_size(head: dict[str, Any]) -> int | None:
    """None: it was not recorded. A rank beyond it was numbered by hand, and nobody said how many there are."""
    size = head["world_size"]
    return None if size is None or int(size) <= int(head["rank"]) else int(size)


def read_rank(path: Path) -> RankLedger:
    """One file. Raises LedgerError where it is damaged, or not a ledger."""
    ledger, end = RankLedger(path), 0
    try:
        size = path.stat().st_size  # before more is written
        for record in records(path):
            try:
                ledger.take(record)
            except (KeyError, IndexError, ValueError, TypeError, struct.error, zlib.error) as error:
                raise LedgerError(f"{path} is damaged: the record at byte {record.place:,} makes no sense ({error!r})") from None
            end = record.end
    except OSError as error:
        raise LedgerError(f"cannot read {path}: {error.strerror}") from None
    if not ledger.heads:
        raise LedgerError(f"{path} is cut off before its first record was whole")
    ledger.unfinished = max(0, size - end)
    return ledger


Run = dict[int, RankLedger]  # by rank


def read_run(path: str | Path, rank: int | None = None) -> Run:
    """The ledgers of a run: all files of a folder, or one file. rank: this one alone, if it is there."""
    path = Path(path)
    if path.is_file():
        found = read_rank(path)
        return {found.rank: found}
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
        if number != ledger.rank:
            raise LedgerError(f"{ledger.path} is the file of rank {ledger.rank}, under the name of another")
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
    last = {ledger.world_size for ledger in run.values()}
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
    if named and all(alone) and len(a) == len(b) == 1:  # whatever their numbers are
        pairs = [RankPair(next(iter(a)), next(iter(a.values())), next(iter(b.values())))]
    else:
        pairs = _pairs(a, b, others=not named)
    chosen = [pair for pair in pairs if rank is None or pair.rank == rank]
    if not chosen:
        raise LedgerError(f"no rank {rank} can be compared: A has {sorted(a)}, B has {sorted(b)}")
    if one_rank := named or rank is not None:
        a = {number: ledger for number, ledger in a.items() if any(ledger is pair.a for pair in chosen)}
        b = {number: ledger for number, ledger in b.items() if any(ledger is pair.b for pair in chosen)}
    return Runs(a, b, chosen, one_rank)


def _pairs(a: Run, b: Run, others: bool) -> list[RankPair]:
    """others: also ranks of the run that had more. On as many ranks, a rank without its like has lost its file, and others may hold other
    shards."""
    both, sizes = sorted(set(a) & set(b)), (world_size_of(a), world_size_of(b))
    if not both:
        raise LedgerError(f"no rank is in both runs: A has {sorted(a)}, B has {sorted(b)}")
    alike = None not in sizes and sizes[0] == sizes[1]
    beside = {rank: both[rank % len(both)] for rank in sorted(set(a) ^ set(b)) if others and not alike}
    more = [RankPair(rank, a.get(rank, a[like]), b.get(rank, b[like]), weights_only=True) for rank, like in beside.items()]
    return [RankPair(rank, a[rank], b[rank]) for rank in both] + more
