"""The promises, each as a test of one case. The control must fail to keep them, or the tests have shown nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from ...attention.explain import explain
from ...attention.functions import flash_attn_func
from ...backends import ALWAYS_ORDERED, has_cache, resolve
from ...call.explain import Explanation
from ...call.kv_cache import DECODE_EQUALS_TRAINING
from ...execution.interleaving import interleaving
from ...scheduling.order import WORKER_INVARIANT, promises
from ...scheduling.ranks.sharding import SHARDINGS
from ...scheduling.validate import TooFewWorkers
from .cases import Case, Extras, Inputs, Results, attend, difference, make_extras, make_inputs, not_a_number
from .surroundings import other_work
from .ways import DETAIL, PAGE_SIZES, added_up, can_decode, name_of, on_ranks, recombined_halves, through_caches

Status = Literal["pass", "fail", "inconclusive"]
WORKERS = (1, 2, 7, 16, 33)
POSITIONS = 3  # of the sequence that is followed through batches of this size
CONTROL_TRIES = 50


@dataclass(frozen=True)
class Outcome:
    guarantee: str
    status: Status
    detail: str


Compared = Iterator[tuple[str, Results, Results]]  # what it is, as it came out, as it should


@dataclass
class CaseTest:
    """One case, its inputs, and the first result, which every other one is compared with.

    `tick` is called after every comparison. `ranks`: numbers of ranks that shall share the sequence.
    """

    case: Case
    device: str
    runs: int
    tick: Callable[[], None] | None = None
    ranks: Sequence[int] = ()
    backend: str = "auto"

    def __post_init__(self) -> None:
        self.inputs = make_inputs(self.case, self.device)
        self.reference = self._run()

    def _run(self, inputs: Inputs | None = None, accumulation: str = "ordered") -> Results:
        function = partial(flash_attn_func, accumulation=accumulation, backend=self.backend)
        return attend(self.case, self.inputs if inputs is None else inputs, function)

    def explain(self) -> Explanation:
        q, k, v, _ = self.inputs
        options = {"mask": self.case.read_mask(), "schedule": self.case.schedule, "backend": self.backend}
        told: Explanation = explain(flash_attn_func, q, k, v, predict_time=False, **options)
        return told

    def outcomes(self, fresh: dict[str, Results]) -> Iterator[Outcome]:
        """`fresh`: what other processes computed, by their description; empty if none was asked."""
        seeds = range(1, self.runs + 1)
        yield self._judge("same bits in repeated runs", self._inside((f"run {run}", nullcontext()) for run in seeds[1:]))
        if self.device == "cpu":  # a GPU interleaves by itself
            ways = [(seed, threads, " in threads" if threads else "") for seed in seeds for threads in (False, True)]
            interleaved = ((f"interleaving {seed}{how}", interleaving(seed, threads)) for seed, threads, how in ways)
            yield self._judge("same bits in any interleaving", self._inside(interleaved))
            if promises(self.explain().guarantees, WORKER_INVARIANT):
                yield self._worker_counts()
        yield self._judge("same bits while other work runs", self._loaded())
        yield self._judge("same bits whatever else is in the batch", self._batches())
        if fresh:
            yield self._judge("same bits in fresh processes", iter([(what, found, self.reference) for what, found in fresh.items()]))
        yield self._control()
        if can_decode(self.case, self.device) and has_cache(resolve(self.backend, torch.device(self.device))):
            yield self._judge(DECODE_EQUALS_TRAINING, self._decoded(), f": {DETAIL}; with and without sinks")
            yield self._control_of_decoding()
        if self.ranks:
            detail = f"{' and '.join(SHARDINGS)}, with and without sinks and a gradient of the LSE; one process played all ranks"
            yield self._judge(name_of(self.ranks), self._shared(), f": {detail}")
            yield self._control_of_ranks()

    def _judge(self, guarantee: str, pairs: Compared, about: str = "") -> Outcome:
        """Fail at the first pair of results that differs. `about`: what a pass was about."""
        count = 0
        for what, actual, expected in pairs:
            count += 1
            if self.tick is not None:
                self.tick()
            found = difference(actual, expected) or not_a_number(actual)
            if found:
                return Outcome(guarantee, "fail", f"{what}: {found}")
        return Outcome(guarantee, "pass", f"{count} compared{about}")

    def _inside(self, named: Iterable[tuple[str, AbstractContextManager[Any]]]) -> Compared:
        """A run inside of each context."""
        for what, context in named:
            with context:
                result = self._run()
            yield what, result, self.reference

    def _worker_counts(self) -> Outcome:
        """Equal bits on every number of workers. A refusal breaks the promise, too."""
        promise = "same bits on any number of workers"
        try:
            return self._judge(promise, self._inside((f"{count} workers", interleaving(count, workers=count)) for count in WORKERS))
        except TooFewWorkers as error:
            return Outcome(promise, "fail", f"refused on {error.workers} workers: {error}".splitlines()[0])

    def _loaded(self) -> Compared:
        with other_work(self.device):
            for run in range(1, loaded_runs(self.runs) + 1):
                yield f"run {run} beside other work", self._run(), self.reference

    def _batches(self) -> Compared:
        """The first sequence alone, then among others, at every position."""
        expected = self.reference.sequence(0)
        alone = Inputs(*(x[:1] for x in self.inputs))
        yield "alone", self._run(alone), expected
        for position in range(POSITIONS):
            mates = make_inputs(self.case, self.device, seed=position + 1, batch=POSITIONS - 1)
            batch = Inputs(*(torch.cat([m[:position], x, m[position:]]) for x, m in zip(alone, mates, strict=True)))
            yield f"at position {position} of {POSITIONS}", self._run(batch).sequence(position), expected

    def _shared(self) -> Compared:
        """The sequence on every number of ranks."""
        return self._with_and_without_extras(lambda _, extras: on_ranks(self.case, self.inputs, self.ranks, extras))

    def _decoded(self) -> Compared:
        """Every token through every kind of cache."""
        return self._with_and_without_extras(partial(through_caches, self.case, self.inputs))

    def _with_and_without_extras(self, run: Callable[[Results, Extras | None], Iterator[tuple[str, Results]]]) -> Compared:
        """As it is, and with sinks and a gradient of the LSE. `run` gets what is expected."""
        extras = make_extras(self.case, self.device)
        with_extras = attend(self.case, self.inputs, extras=extras)
        for how, expected, given in (("", self.reference, None), (", with sinks", with_extras, extras)):
            for what, result in run(expected, given):
                yield f"{what}{how}", result, expected

    def _control_of_decoding(self) -> Outcome:
        """A split of the keys must be seen to differ."""
        found = difference(recombined_halves(self.case, self.inputs, self.reference), self.reference) if self.case.seqlen > 1 else None
        otherwise = "halves, recombined, have the bits of the whole; take a longer sequence"
        return _seen_to_differ("halves of the keys, recombined, differ", found, otherwise)

    def _control_of_ranks(self) -> Outcome:
        """What an all-reduce adds up must be seen to differ."""
        most = max(self.ranks)
        found = difference(added_up(self.case, self.inputs, most, self.reference), self.reference)
        otherwise = f"dK and dV of {most} ranks, added up, have the bits of one, so equal bits prove nothing here; take a longer sequence"
        return _seen_to_differ("sums per rank, added up, differ", found and f"{most} ranks: {found}", otherwise)

    def _control(self) -> Outcome:
        """Unordered sums must be seen to differ. Each try arrives differently, on the CPU by its seed."""
        if resolve(self.backend, torch.device(self.device)) in ALWAYS_ORDERED:
            return self._control_of_channels()
        first = self._unordered(0)
        tries = (difference(self._unordered(attempt), first) for attempt in range(1, CONTROL_TRIES + 1))
        agree = f"{CONTROL_TRIES} unordered runs agree, so equal bits prove nothing here"
        otherwise = f"{agree}; take a longer sequence (three KV tiles or more)"
        return _seen_to_differ("unordered runs differ", next(filter(None, tries), None), otherwise)

    def _control_of_channels(self) -> Outcome:
        """Where nothing can be unordered: the same sums in another order, with the channels of queries and keys reversed."""
        q, k, v, dout = self.inputs
        turned = self._run(Inputs(q.flip(-1), k.flip(-1), v, dout))
        found = difference(turned._replace(dq=turned.dq.flip(-1), dk=turned.dk.flip(-1)), self.reference)
        otherwise = "reversed channels give the same bits, so equal bits prove nothing here; take a longer sequence"
        return _seen_to_differ("another order of sums differs", found, otherwise)

    def _unordered(self, seed: int) -> Results:
        with interleaving(seed):
            return self._run(accumulation="unordered")


def loaded_runs(runs: int) -> int:
    return max(2, runs // 2)


def comparisons(device: str, runs: int, processes: int, ranks: Sequence[int] = ()) -> int:
    """How many results of a case are compared, for a progress bar; a few less where a schedule promises less or a mask has no cache."""
    on_cpu = 2 * runs + len(WORKERS) if device == "cpu" else 0
    decoded = 2 * len(PAGE_SIZES)
    return runs - 1 + on_cpu + loaded_runs(runs) + 1 + POSITIONS + processes + decoded + 2 * len(SHARDINGS) * len(ranks)


def _seen_to_differ(what: str, found: str | None, otherwise: str) -> Outcome:
    """Of a control. `found`: the difference, if any."""
    return Outcome(f"control: {what}", "pass", found) if found else Outcome(f"control: {what}", "inconclusive", otherwise)


def worst(found: Sequence[str | None]) -> Status:
    """What is not known to be a pass or inconclusive is a failure."""
    if not all(status in ("pass", "inconclusive") for status in found):  # a file may have anything there
        return "fail"
    return "inconclusive" if "inconclusive" in found else "pass"
