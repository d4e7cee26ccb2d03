"""The promises, each as a test of one case. The control must fail to keep them, or the tests have shown nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

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
from .bits import Results, attend, difference, not_a_number
from .cases import Case, Inputs, make_extras, make_inputs
from .decoding import DETAIL, PAGE_SIZES, can_decode, recombined_halves, through_caches
from .other_work import other_work
from .ranks import added_up, name_of, on_ranks

Status = Literal["pass", "fail", "inconclusive"]
WORKERS = (1, 2, 7, 16, 33)
POSITIONS = 3  # of the sequence that is followed through batches of this size
CONTROL_TRIES = 50


@dataclass(frozen=True)
class Outcome:
    guarantee: str
    status: Status
    detail: str


class CaseTest:
    """One case, its inputs, and the first result, which every other one is compared with."""

    def __init__(
        self,
        case: Case,
        device: str,
        runs: int,
        tick: Callable[[], None] | None = None,
        ranks: Sequence[int] = (),
        backend: str = "auto",
    ) -> None:
        """`tick` is called after every comparison. `ranks`: numbers of ranks that shall share the sequence."""
        self.backend = backend
        self.case, self.device, self.runs, self.tick, self.ranks = case, device, runs, tick, ranks
        self.mask = case.read_mask()
        self.inputs = make_inputs(case, device)
        self.reference = self._run()

    def _run(self, inputs: Inputs | None = None, accumulation: str = "ordered") -> Results:
        function = partial(flash_attn_func, accumulation=accumulation, backend=self.backend)
        return attend(self.inputs if inputs is None else inputs, self.mask, self.case.schedule, function)

    def explain(self) -> Explanation:
        q, k, v, _ = self.inputs
        options = {"mask": self.mask, "schedule": self.case.schedule, "backend": self.backend}
        told: Explanation = explain(flash_attn_func, q, k, v, predict_time=False, **options)
        return told

    def outcomes(self, fresh: dict[str, Results]) -> Iterator[Outcome]:
        """`fresh`: what other processes computed, by their description; empty if none was asked."""
        yield self._judge("same bits in repeated runs", self._repeats())
        if self.device == "cpu":  # a GPU interleaves by itself
            yield self._judge("same bits in any interleaving", self._interleavings())
            if promises(self.explain().guarantees, WORKER_INVARIANT):
                yield self._worker_counts()
        yield self._judge("same bits while other work runs", self._loaded())
        yield self._judge("same bits whatever else is in the batch", self._batches())
        if fresh:
            yield self._judge("same bits in fresh processes", iter([(what, found, self.reference) for what, found in fresh.items()]))
        yield self._control()
        if can_decode(self.case, self.device) and has_cache(resolve(self.backend, torch.device(self.device))):
            yield _with_detail(self._judge(DECODE_EQUALS_TRAINING, self._decoded()), f"{DETAIL}; with and without sinks")
            yield self._control_of_decoding()
        if self.ranks:
            detail = f"{' and '.join(SHARDINGS)}, with and without sinks and a gradient of the LSE; one process played all ranks"
            yield _with_detail(self._judge(name_of(self.ranks), self._shared()), detail)
            yield self._control_of_ranks()

    def _judge(self, guarantee: str, pairs: Iterator[tuple[str, Results, Results]]) -> Outcome:
        """Fail at the first pair of results that differs."""
        count = 0
        for what, actual, expected in pairs:
            count += 1
            if self.tick is not None:
                self.tick()
            found = difference(actual, expected) or not_a_number(actual)
            if found:
                return Outcome(guarantee, "fail", f"{what}: {found}")
        return Outcome(guarantee, "pass", f"{count} compared")

    def _repeats(self) -> Iterator[tuple[str, Results, Results]]:
        for run in range(2, self.runs + 1):
            yield f"run {run}", self._run(), self.reference

    def _interleavings(self) -> Iterator[tuple[str, Results, Results]]:
        for seed in range(1, self.runs + 1):
            for threads in (False, True):
                with interleaving(seed, threads):
                    result = self._run()
                yield f"interleaving {seed}{' in threads' if threads else ''}", result, self.reference

    def _worker_counts(self) -> Outcome:
        """Equal bits on every number of workers. A refusal breaks the promise, too."""
        promise = "same bits on any number of workers"
        try:
            return self._judge(promise, self._on_workers())
        except TooFewWorkers as error:
            return Outcome(promise, "fail", f"refused on {error.workers} workers: {error}".splitlines()[0])

    def _on_workers(self) -> Iterator[tuple[str, Results, Results]]:
        for workers in WORKERS:
            with interleaving(workers, workers=workers):
                result = self._run()
            yield f"{workers} workers", result, self.reference

    def _loaded(self) -> Iterator[tuple[str, Results, Results]]:
        with other_work(self.device):
            for run in range(1, loaded_runs(self.runs) + 1):
                yield f"run {run} beside other work", self._run(), self.reference

    def _batches(self) -> Iterator[tuple[str, Results, Results]]:
        """The first sequence alone, then among others, at every position."""
        expected = self.reference.sequence(0)
        alone = tuple(x[:1] for x in self.inputs)
        yield "alone", self._run(_four(alone)), expected
        for position in range(POSITIONS):
            mates = make_inputs(self.case, self.device, seed=position + 1, batch=POSITIONS - 1)
            batch = tuple(torch.cat([m[:position], x, m[position:]]) for x, m in zip(alone, mates, strict=True))
            yield f"at position {position} of {POSITIONS}", self._run(_four(batch)).sequence(position), expected

    def _shared(self) -> Iterator[tuple[str, Results, Results]]:
        """The sequence on every number of ranks: as it is, and with sinks and a gradient of the LSE."""
        extras = make_extras(self.case, self.device)
        with_extras = attend(self.inputs, self.mask, self.case.schedule, extras=extras)
        for what, result in on_ranks(self.case, self.inputs, self.ranks):
            yield what, result, self.reference
        for what, result in on_ranks(self.case, self.inputs, self.ranks, extras):
            yield f"{what}, with sinks", result, with_extras

    def _decoded(self) -> Iterator[tuple[str, Results, Results]]:
        """Every token through every kind of cache."""
        extras = make_extras(self.case, self.device)
        with_sinks = attend(self.inputs, self.mask, self.case.schedule, extras=extras)
        for what, result in through_caches(self.case, self.inputs, self.reference):
            yield what, result, self.reference
        for what, result in through_caches(self.case, self.inputs, with_sinks, extras.sinks):
            yield f"{what}, with sinks", result, with_sinks

    def _control_of_decoding(self) -> Outcome:
        """A split of the keys must be seen to differ."""
        guarantee = "control: halves of the keys, recombined, differ"
        found = difference(recombined_halves(self.case, self.inputs, self.reference), self.reference) if self.case.seqlen > 1 else None
        if found:
            return Outcome(guarantee, "pass", found)
        return Outcome(guarantee, "inconclusive", "halves, recombined, have the bits of the whole; take a longer sequence")

    def _control_of_ranks(self) -> Outcome:
        """What an all-reduce adds up must be seen to differ."""
        most = max(self.ranks)
        guarantee = "control: sums per rank, added up, differ"
        found = difference(added_up(self.case, self.inputs, most, self.reference), self.reference)
        if found:
            return Outcome(guarantee, "pass", f"{most} ranks: {found}")
        detail = f"dK and dV of {most} ranks, added up, have the bits of one, so equal bits prove nothing here; take a longer sequence"
        return Outcome(guarantee, "inconclusive", detail)

    def _control(self) -> Outcome:
        """Unordered sums must be seen to differ. Each try arrives differently, on the CPU by its seed."""
        if resolve(self.backend, torch.device(self.device)) in ALWAYS_ORDERED:
            return self._control_of_channels()
        guarantee = "control: unordered runs differ"
        first = self._unordered(0)
        for attempt in range(1, CONTROL_TRIES + 1):
            found = difference(self._unordered(attempt), first)
            if found:
                return Outcome(guarantee, "pass", found)
        detail = f"{CONTROL_TRIES} unordered runs agree, so equal bits prove nothing here; take a longer sequence (three KV tiles or more)"
        return Outcome(guarantee, "inconclusive", detail)

    def _control_of_channels(self) -> Outcome:
        """Where nothing can be unordered: the same sums in another order, with the channels of queries and keys reversed."""
        guarantee = "control: another order of sums differs"
        q, k, v, dout = self.inputs
        turned = self._run((q.flip(-1), k.flip(-1), v, dout))
        found = difference(turned._replace(dq=turned.dq.flip(-1), dk=turned.dk.flip(-1)), self.reference)
        if found:
            return Outcome(guarantee, "pass", found)
        return Outcome(
            guarantee, "inconclusive", "reversed channels give the same bits, so equal bits prove nothing here; take a longer sequence"
        )

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


def _with_detail(outcome: Outcome, detail: str) -> Outcome:
    """What a pass was about."""
    return replace(outcome, detail=f"{outcome.detail}: {detail}") if outcome.status == "pass" else outcome


def _four(tensors: tuple[torch.Tensor, ...]) -> Inputs:
    q, k, v, dout = tensors
    return q, k, v, dout


def overall(outcomes: list[Outcome]) -> Status:
    return worst([outcome.status for outcome in outcomes])


def worst(found: Sequence[str | None]) -> Status:
    """What is not known to be a pass or inconclusive is a failure."""
    if not set(found) <= {"pass", "inconclusive"}:
        return "fail"
    return "inconclusive" if "inconclusive" in found else "pass"
