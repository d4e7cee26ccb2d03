"""Ranks that share a sequence, on one Hopper GPU: python -m benchmarks.ranks [--check] [--long] [--time] [--cost] [--json FILE]

`python -m benchmarks.kernels ranks` compiles before what these load.
--check: one process plays all ranks; O, LSE, dQ, dK and dV must be those of the plain call, bit by bit, and a state that is rounded
must change them. Small shapes come first, so that whatever is wrong shows early. Every second run has launches that overlap.
--long: the same from 16384 to 131072 tokens on 2 to 16 ranks.
--time: each rank's part of the backward alone, with states already there, against the plain call divided by the number of ranks:
launched from Python, and replayed from a CUDA graph, which leaves the host out.
--cost: what it costs that ranks compare each call. Microseconds of the host, medians, on processes of this machine: of the comparison
alone, while the GPU is idle and while it is busy; of all that comes before the first tensor travels, and of its part without messages; of
small calls with and without the comparison. On a GPU all ranks share the first one; without one, tensors are on the CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from dash_attn import Causal, Full, Mask, Window, flash_attn_func
from dash_attn.backends.hopper import ranks
from dash_attn.call.call import Given
from dash_attn.call.options import Choices
from dash_attn.distributed import context_parallel_attention
from dash_attn.distributed.context.asked import Asked
from dash_attn.distributed.context.of_rank import OfRank
from dash_attn.distributed.hosts import ATTENTION, Hosts
from dash_attn.distributed.peers import Peers
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.units import Unit
from dash_attn.tools.bench.report import save
from inputs import make_inputs
from played_ranks import Case, play_forward, play_ranks
from processes import run_processes

from .timing import host_milliseconds, milliseconds, replayed, timed
from .training import surroundings

NAMES = ("out", "lse", "dq", "dk", "dv")
ROUNDS = 7
COMPARISONS, CALLS, CALL_ROUNDS, WARM_UP = 500, 20, 10, 5  # of --cost
AHEAD = 300_000_000  # cycles that the GPU sleeps while hosts compare


def case_of(tokens: int, count: int, heads: tuple[int, int] = (4, 4), together: int = 0, sharding: str = "zigzag", **rest: Any) -> Case:
    """heads: query and KV heads. together: heads of a unit; 0: as many as the backend says."""
    case = Case(**{"mask": Causal(), "dims": (128, 128), **rest}, sharding=Sharding.named(sharding, tokens, count), heads=heads)
    return replace(case, together=together or ranks.heads_together(case.problem, case.sharding))


def in_words(case: Case) -> str:
    heads, dtype = f"{case.heads[0]}/{case.heads[1]} heads, {case.together} together", str(case.dtype).removeprefix("torch.")
    chunks = f"{case.sharding.rows} tokens in {len(case.sharding.lengths)} chunks on P={case.sharding.ranks}"
    return f"{case.mask}, {chunks}, {heads}, dims {case.dims}, {dtype}"


def plain(case: Case) -> tuple[tuple[Tensor, ...], list[Tensor], Callable[[], tuple[Tensor, ...]]]:
    """q, k, v and dO; O and LSE of the plain call; and its backward."""
    rows = case.sharding.rows
    *inputs, dout = tensors = make_inputs("cuda", (rows, rows), case.heads, case.dims, case.dtype, case.batch)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = flash_attn_func(*leaves, mask=case.mask, return_lse=True)
    return tensors, [out.detach(), lse.detach()], lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


# ---- bits


def checked_cases() -> Iterator[tuple[Case, int]]:
    """(case, repeats), small ones first."""
    masks: tuple[Mask, ...] = (Causal(), Window(300, 0), Full())
    for dims in ((128, 128), (64, 64), (256, 256), (192, 128), (192, 192), (96, 96)):
        for mask in masks:
            yield case_of(1024, 2, (2, 2), dims=dims, mask=mask), 4
        yield case_of(2048, 2, (6, 2), dims=dims, dtype=torch.float16), 4
    for count in (2, 4, 8):
        yield case_of(8192, count, (8, 2)), 40
        yield case_of(8192, count, (16, 16), dims=(64, 64)), 40
        yield case_of(8192, count, (4, 4), mask=Full(), sharding="contiguous"), 40
        yield case_of(16384, count, (32, 8)), 10
        yield case_of(16384, count, (16, 16), mask=Window(4096, 0)), 10


def long_cases() -> Iterator[tuple[Case, int]]:
    lengths = ((16384, 100), (32768, 100), (65536, 6), (131072, 6))
    for (tokens, repeats), count, heads in product(lengths, (2, 4, 8, 16), ((32, 8), (16, 16))):
        yield case_of(tokens, count, heads), repeats


def play(case: Case, tensors: tuple[Tensor, ...], overlap: bool, change: Callable[[Unit, Tensor], None] | None = None) -> list[Tensor]:
    """O, LSE, dQ, dK and dV of the whole sequence."""
    q, k, v, dout = tensors
    out, lse = play_forward(case, q, k, v)
    return [out, lse, *play_ranks(case, (dout, q, k, v, out, lse), change=change, overlap=overlap).gradients]


def check_bits(case: Case, repeats: int) -> dict[str, Any]:
    began, different = time.time(), set[str]()
    tensors, forward, backward = plain(case)
    expected = [*forward, *backward()]
    for number in range(repeats):
        overlap = number % 2 == 1
        for name, a, b in differing(expected, play(case, tensors, overlap)):
            different.add(f"{name} (overlap)" if overlap else name)
            print(f"  run {number}, overlap {overlap}: {name} {difference(a, b)}", flush=True)
    control = [name for name, *_ in differing(expected, play(case, tensors, False, _round_states))]
    verdict = "EQUAL" if not different else f"DIFFERENT in {sorted(different)}"
    print(f"{verdict}  x{repeats}  {in_words(case)}  (rounded states change {control})  {time.time() - began:.1f} s", flush=True)
    return {"case": in_words(case), "repeats": repeats, "different": sorted(different), "control": control}


def differing(expected: list[Tensor], found: list[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    return [(name, a, b) for name, a, b in zip(NAMES, expected, found, strict=True) if not torch.equal(a, b)]


def difference(a: Tensor, b: Tensor) -> str:
    """Where and how far two tensors are apart, to tell a wrong table from a wrong order of additions."""
    where = (a != b).nonzero()
    far = (a.float() - b.float()).abs().max().item() / a.float().abs().max().item()
    axes = [f"{int(axis.min())}..{int(axis.max())}" for axis in where.unbind(1)]
    return f"differs in {len(where)} of {a.numel()} elements, at {axes}, by at most {far:.2g} of the largest; NaN: {int(b.isnan().sum())}"


def _round_states(unit: Unit, state: Tensor) -> None:
    if unit.before is not None:
        state.copy_(state.bfloat16().float())


# ---- time


def timed_cases() -> Iterator[Case]:
    for tokens, count in ((32768, 2), (32768, 4), (65536, 8)):
        for together in (1, 2, 4, 8, 0):
            yield case_of(tokens, count, (32, 8), together)
    yield case_of(32768, 4, (16, 16))
    yield case_of(32768, 4, (16, 16), dims=(64, 64))
    yield case_of(32768, 4, (16, 16), mask=Full(), sharding="contiguous")
    yield case_of(131072, 8, (32, 8))


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds of the slowest rank, and units of the one that has most; host: in which Python has launched its units."""
    tensors, forward, backward = plain(case)
    plain_ms, count = time_of(backward), case.sharding.ranks
    found = [dict(times_of_rank(part_of_rank(case, rank, (*tensors, *forward)))) for rank in range(count)]
    slowest = {name: max(times[name] for times in found) for name in found[0]}
    units = max(map(len, case.shared.by_rank))
    said = ", ".join(f"{name} {ms:.2f} ({plain_ms / count / ms:.3f})" for name, ms in slowest.items())
    print(f"{in_words(case)}, {units} units: plain {plain_ms:.2f} ms; slowest rank {said}", flush=True)
    torch.cuda.empty_cache()
    names = {"case": in_words(case), "devices": count, "heads_together": case.together}  # as files have called them from the first
    return {**names, "units": units, "plain_ms": plain_ms, "device_ms": slowest}


def part_of_rank(case: Case, rank: int, whole: tuple[Tensor, ...]) -> Callable[[bool], Any]:
    """A rank's part of the backward, from preprocess to postprocess, for whose states nobody waits; told whether launches overlap."""
    q, k, v, dout, out, lse = whole
    mine = case.rows_of(rank).cuda()
    own, its_lse = tuple(x[:, mine].contiguous() for x in (dout, q, out)), lse[:, :, mine].contiguous()
    plan, shared, options = case.plan, case.shared, case.options
    sizes = {shared.state_tiles(unit) * ranks.tile_size(*case.dims) for unit in shared.by_rank[rank]}
    states = {size: torch.randn(size, device="cuda") for size in sizes}  # what is in them does not change the time

    def run(overlap: bool) -> tuple[Tensor, ...]:
        backward = ranks.RankBackward(plan, shared, rank, options, own, (its_lse, None), overlap)
        backward.take_keys(k, v, 0)
        for unit in shared.by_rank[rank]:
            backward.run(unit, states[backward.state_size(unit)])
        return backward.finish()

    return run


def times_of_rank(run: Callable[[bool], Any]) -> Iterator[tuple[str, float]]:
    for overlap, name in ((False, ""), (True, " overlapping")):
        call = partial(run, overlap)
        yield f"launched{name}", time_of(call)
        yield f"replayed{name}", time_of(replayed(lambda call=call: call))
        if not overlap:
            yield "host", min(timed(call, lead_in=0).host for _ in range(3))


def time_of(call: Callable[[], Any]) -> float:
    """With what the host takes to launch it."""
    return milliseconds([call], ROUNDS, lead_in=0)[0]


# ---- what it costs that ranks compare each call


def microseconds(action: Callable[[], object], count: int) -> list[float]:
    return [1e3 * host_milliseconds(action) for _ in range(count)]


def uncompared(self: Hosts, call: str, numbers: Sequence[int], refused: bool = False) -> list[list[int]]:
    """In place of Hosts.begin: all ranks are taken to tell what this one does."""
    self.number += 1
    return [list(numbers)] * self.count


def while_busy(compare: Callable[[], object]) -> float | None:
    """None: the GPU was idle before the last comparison ended."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(AHEAD)
    behind = torch.cuda.current_stream().record_event()
    found = median(microseconds(compare, 50))
    return None if behind.query() else found


def costs_of_rank(_: int) -> dict[str, float | None]:
    """Microseconds of this rank's host."""
    peers, device = Peers.of(None), "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.ones(1, 256, 2, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def compare() -> object:
        return peers.hosts.begin(ATTENTION, [1, 2, 3])

    def call() -> None:
        out = context_parallel_attention(q, k, v, causal=True)
        out.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    microseconds(compare, WARM_UP)
    microseconds(call, WARM_UP)
    asked = Asked(q, k, v, Given(), Choices(causal=True), "zigzag")
    found: dict[str, float | None] = {"comparison": median(microseconds(compare, COMPARISONS))}
    found["agreement on a call"] = median(microseconds(lambda: OfRank.agreed(asked, peers, True), COMPARISONS))
    found["its own checks alone"] = median(microseconds(lambda: asked.part(peers.count, peers.rank, True), COMPARISONS))
    if device == "cuda":
        found["comparison, GPU busy"] = while_busy(compare)
    times: dict[str, list[float]] = {"forward and backward": [], "without comparison": []}
    for _ in range(CALL_ROUNDS):  # in turn: a machine has better and worse seconds
        times["forward and backward"] += microseconds(call, CALLS)
        with patch.object(Hosts, "begin", uncompared):
            times["without comparison"] += microseconds(call, CALLS)
    dist.barrier()
    return found | {name: median(some) for name, some in times.items()}


def costs(count: int, file: Path | None) -> None:
    found = run_processes(costs_of_rank, count, limit=3600)[0]
    for name, value in found.items():
        print(f"{name:24} {'-' if value is None else f'{value:.0f} us'}")
    if file:
        save({"environment": surroundings(), "ranks": count, "microseconds": found}, file)


def asked(chosen: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The part of the results, and what is to be found for it, case by case."""
    for cases in (*([checked_cases()] if chosen.check else []), *([long_cases()] if chosen.long else [])):
        yield from (("check", partial(check_bits, *case)) for case in cases)
    yield from (("time", partial(measure, case)) for case in timed_cases() if chosen.time)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare bits")
    parser.add_argument("--long", action="store_true", help="compare bits of long sequences")
    parser.add_argument("--time", action="store_true", help="time the slowest rank")
    parser.add_argument("--cost", action="store_true", help="time what hosts do; nothing else")
    parser.add_argument("--ranks", type=int, default=2, metavar="P", help="processes of --cost (default: 2)")
    parser.add_argument("--json", type=Path, help="write what was found there, after every case")
    chosen = parser.parse_args(arguments)
    if chosen.cost:
        return costs(chosen.ranks, chosen.json)
    if not (chosen.check or chosen.long or chosen.time):
        return
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "check": [], "time": []}
    for part, find in asked(chosen):
        results[part].append(find())
        if chosen.json:
            save(results, chosen.json)


if __name__ == "__main__":
    main()
