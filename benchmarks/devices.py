"""Devices that share a sequence, on one Hopper GPU: python -m benchmarks.devices [--compile] [--check] [--long] [--time] [--json FILE]

--compile: all kernels that the others need, in as many processes as there are cores. It needs no GPU.
--check: one process plays all devices; O, LSE, dQ, dK and dV must be those of the plain call, bit by bit, and a state that is rounded
must change them. Small shapes come first, so that whatever is wrong shows early. Every second run has launches that overlap.
--long: the same from 16384 to 131072 tokens on 2 to 16 devices.
--time: each device's part of the backward alone, with states already there, against the plain call divided by the number of devices:
launched from Python, and replayed from a CUDA graph, which leaves the host out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dash_attn import Causal, Full, Mask, Window, flash_attn_func
from dash_attn.backends.hopper import ranks, tiles
from dash_attn.backends.hopper.calls.kernel_names import Variant, backward_kernels, forward_kernel, leg_kernels
from dash_attn.backends.hopper.calls.tables import mask_kind
from dash_attn.backends.hopper.support import DTYPES
from dash_attn.backends.hopper.tiles import CONSUMER_CHOICES
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.units import Unit
from inputs import make_inputs
from played_devices import Case, play_devices, play_forward

from .kernels import compile_ahead
from .timing import milliseconds, replayed, timed

NAMES = ("out", "lse", "dq", "dk", "dv")
ROUNDS = 7


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


# ---- kernels


def kernels_of(case: Case) -> set[tuple[str, str]]:
    """(header, name) of all that a plain call and devices load."""
    dims = tiles.backward_dims(*case.dims)
    softcap, kind, dtype = bool(case.options.softcap), mask_kind(case.mask), DTYPES[case.dtype]
    variant = Variant(dtype, dims[0], softcap, kind)
    dim, v_dim = tiles.forward_dims(*case.dims)
    choices = CONSUMER_CHOICES[tiles.kernel_dim(*case.dims)]
    forward = [forward_kernel(Variant(dtype, dim, softcap, kind), consumers, v_dim) for consumers in choices]
    found = [leg_kernels(variant, dims[1]), backward_kernels(variant, dims[1], ordered=True)]
    others = (getattr(kernels, field.name) for kernels in found for field in fields(kernels))
    return {(kernel.header, kernel.name) for kernel in (*forward, *others) if kernel is not None}


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


def long_cases(least: int = 0) -> Iterator[tuple[Case, int]]:
    for tokens, repeats in ((16384, 100), (32768, 100), (65536, 6), (131072, 6)):
        if tokens < least:
            continue
        for count in (2, 4, 8, 16):
            for heads in ((32, 8), (16, 16)):
                yield case_of(tokens, count, heads), repeats


def play(case: Case, tensors: tuple[Tensor, ...], overlap: bool, change: Callable[[Unit, Tensor], None] | None = None) -> list[Tensor]:
    """O, LSE, dQ, dK and dV of the whole sequence."""
    q, k, v, dout = tensors
    out, lse = play_forward(case, q, k, v)
    return [out, lse, *play_devices(case, (dout, q, k, v, out, lse), change=change, overlap=overlap).gradients]


def check_bits(cases: Iterator[tuple[Case, int]], seconds: float) -> Iterator[dict[str, Any]]:
    end = time.time() + seconds
    for case, repeats in cases:
        if time.time() > end:
            print("out of time", file=sys.stderr)
            return
        began, different = time.time(), set[str]()
        tensors, forward, backward = plain(case)
        expected = [*forward, *backward()]
        for number in range(repeats):
            overlap = number % 2 == 1
            for name, a, b in zip(NAMES, expected, play(case, tensors, overlap), strict=True):
                if not torch.equal(a, b):
                    different.add(f"{name} (overlap)" if overlap else name)
                    print(f"  run {number}, overlap {overlap}: {name} {difference(a, b)}", flush=True)
        rounded = play(case, tensors, False, _round_states)
        control = [name for name, a, b in zip(NAMES, expected, rounded, strict=True) if not torch.equal(a, b)]
        verdict = "EQUAL" if not different else f"DIFFERENT in {sorted(different)}"
        print(f"{verdict}  x{repeats}  {in_words(case)}  (rounded states change {control})  {time.time() - began:.1f} s", flush=True)
        yield {"case": in_words(case), "repeats": repeats, "different": sorted(different), "control": control}


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


@dataclass
class Times:
    """In milliseconds, of the slowest device; host: in which Python has launched its units."""

    case: str
    devices: int
    heads_together: int
    units: int  # of the device that has most
    plain_ms: float
    device_ms: dict[str, float]

    def __str__(self) -> str:
        share = self.plain_ms / self.devices
        found = ", ".join(f"{name} {ms:.2f} ({share / ms:.3f})" for name, ms in self.device_ms.items())
        return f"{self.case}, {self.heads_together} together, {self.units} units: plain {self.plain_ms:.2f} ms; slowest device {found}"


def timed_cases() -> Iterator[Case]:
    for tokens, count in ((32768, 2), (32768, 4), (65536, 8)):
        for together in (1, 2, 4, 8, 0):
            yield case_of(tokens, count, (32, 8), together)
    yield case_of(32768, 4, (16, 16))
    yield case_of(32768, 4, (16, 16), dims=(64, 64))
    yield case_of(32768, 4, (16, 16), mask=Full(), sharding="contiguous")
    yield case_of(131072, 8, (32, 8))


def measure(case: Case) -> Times:
    tensors, (out, lse), backward = plain(case)
    plain_ms = time_of(backward)
    slowest: dict[str, float] = {}
    for device in range(case.sharding.ranks):
        for name, ms in times_of_device(part_of_device(case, device, (*tensors, out, lse))):
            slowest[name] = max(ms, slowest.get(name, 0.0))
    units = max(map(len, case.shared.by_rank))
    return Times(in_words(case), case.sharding.ranks, case.together, units, plain_ms, slowest)


def part_of_device(case: Case, device: int, whole: tuple[Tensor, ...]) -> Callable[[bool], Any]:
    """A device's part of the backward, from preprocess to postprocess, for whose states nobody waits; told whether launches overlap."""
    q, k, v, dout, out, lse = whole
    mine = case.rows_of(device).cuda()
    own, its_lse = tuple(x[:, mine].contiguous() for x in (dout, q, out)), lse[:, :, mine].contiguous()
    plan, shared, options = case.plan, case.shared, case.options
    sizes = {shared.state_tiles(unit) * ranks.tile_size(*case.dims) for unit in shared.by_rank[device]}
    states = {size: torch.randn(size, device="cuda") for size in sizes}  # what is in them does not change the time

    def run(overlap: bool) -> tuple[Tensor, ...]:
        backward = ranks.RankBackward(plan, shared, device, options, own, (its_lse, None), overlap)
        backward.take_keys(k, v, 0)
        for unit in shared.by_rank[device]:
            backward.run(unit, states[backward.state_size(unit)])
        return backward.finish()

    return run


def times_of_device(run: Callable[[bool], Any]) -> Iterator[tuple[str, float]]:
    for overlap, name in ((False, ""), (True, " overlapping")):
        call = partial(run, overlap)
        yield f"launched{name}", time_of(call)
        yield f"replayed{name}", time_of(replayed(lambda call=call: call))
        if not overlap:
            yield "host", min(timed(call, lead_in=0).host for _ in range(3))


def time_of(call: Callable[[], Any]) -> float:
    """With what the host takes to launch it."""
    return milliseconds([call], ROUNDS, lead_in=0)[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile all kernels at once")
    parser.add_argument("--check", action="store_true", help="compare bits")
    parser.add_argument("--long", action="store_true", help="compare bits of long sequences")
    parser.add_argument("--least", type=int, default=0, help="long sequences of so many tokens or more")
    parser.add_argument("--time", action="store_true", help="time the slowest device")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--json", type=Path, help="write what was found there, after every case")
    chosen = parser.parse_args(arguments)
    began = time.time()
    if chosen.compile:
        compile_ahead(set.union(*map(kernels_of, [*(case for case, _ in checked_cases()), *timed_cases()])))
    if not (chosen.check or chosen.long or chosen.time):
        return
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "check": [], "time": []}

    def keep(where: str, found: dict[str, Any]) -> None:
        results[where].append(found)
        if chosen.json:
            chosen.json.write_text(json.dumps(results, indent=1))

    for asked, cases in ((chosen.check, checked_cases), (chosen.long, partial(long_cases, chosen.least))):
        for verdict in check_bits(cases(), chosen.seconds) if asked else ():
            keep("check", verdict)
    for case in timed_cases() if chosen.time else ():
        if time.time() - began > chosen.seconds:
            print("out of time", file=sys.stderr)
            break
        times = measure(case)
        print(times, flush=True)
        keep("time", asdict(times))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
