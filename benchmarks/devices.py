"""Devices that share a sequence, on one Hopper GPU: python benchmarks/devices.py [--compile] [--check] [--long] [--time] [--json FILE]

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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dash_attn import Causal, Full, Mask, Problem, Window, flash_attn_func
from dash_attn.backends.hopper import ranks, tiles
from dash_attn.backends.hopper.calls.kernel_names import Variant, backward_kernels, forward_kernel, leg_kernels
from dash_attn.backends.hopper.calls.tables import mask_kind
from dash_attn.backends.hopper.driver.compile import compile_kernel
from dash_attn.backends.hopper.support import DTYPES
from dash_attn.backends.hopper.tiles import CONSUMER_CHOICES
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions, Choices, options_for
from dash_attn.call.planning import DEFAULT_WORKERS, plan_for, schedule_for
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.share import share
from dash_attn.scheduling.ranks.units import SharedSchedule, Unit

NAMES = ("out", "lse", "dq", "dk", "dv")
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """heads: query and KV heads. together: heads of a unit; 0: as many as the backend says."""

    tokens: int
    devices: int
    heads: tuple[int, int] = (4, 4)
    dims: tuple[int, int] = (128, 128)
    mask: Mask = Causal()  # noqa: RUF009 (a mask is a value)
    dtype: torch.dtype = torch.bfloat16
    sharding: str = "zigzag"
    together: int = 0
    batch: int = 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = (
            f"{self.heads[0]}/{self.heads[1]} heads, {self.together} together"
            if self.together
            else f"{self.heads[0]}/{self.heads[1]} heads"
        )
        return f"{self.mask}, {self.tokens} tokens, P={self.devices} {self.sharding}, {heads}, dims {self.dims}, {dtype}"

    @property
    def options(self) -> AttentionOptions:
        return options_for(Choices(mask=self.mask), self.dims[0])

    @property
    def rows(self) -> Sharding:
        return Sharding.named(self.sharding, self.tokens, self.devices)

    @property
    def problem(self) -> Problem:
        q_heads, kv_heads = self.heads
        tile = ranks.backward_tiles(*self.dims)
        return Problem(self.mask, self.tokens, self.tokens, *tile, kv_heads, q_heads // kv_heads, self.batch)

    def tensors(self) -> list[Tensor]:
        """q, k, v and dO."""
        source = torch.Generator("cuda").manual_seed(0)
        (q_heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        shapes = [(q_heads, dim), (kv_heads, dim), (kv_heads, v_dim), (q_heads, v_dim)]
        return [
            torch.randn(self.batch, self.tokens, *shape, generator=source, device="cuda", dtype=torch.float32).to(self.dtype)
            for shape in shapes
        ]


class Shared:
    """A case whose devices are played one by one."""

    def __init__(self, case: Case) -> None:
        self.case, self.sharding = case, case.rows
        self.plan = plan_for(case.problem, "auto", DEFAULT_WORKERS)
        together = case.together or ranks.heads_together(case.problem, self.sharding)
        self.shared: SharedSchedule = share(schedule_for(case.problem, "auto", DEFAULT_WORKERS), self.sharding, together)
        self.rows = [torch.from_numpy(self.sharding.rows_of(device).copy()).long().cuda() for device in range(case.devices)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(len(q), q.shape[2], q.shape[1], device=q.device)
        for device, mine in enumerate(self.rows):
            some = ranks.forward(Call(q[:, mine], k, v, self.case.options), self.case.problem, self.sharding, device)
            out[:, mine], lse[:, :, mine] = some
        return out, lse

    def backward(self, device: int, inputs: tuple[Tensor, ...], overlap: bool) -> ranks.RankBackward:
        """inputs: dO, q, out and LSE of the device's rows, all of k and v."""
        dout, q, out, lse, k, v = inputs
        made = ranks.RankBackward(self.plan, self.shared, device, self.case.options, (dout, q, out), (lse, None), overlap)
        made.take_keys(k, v, 0)
        return made

    def own(self, device: int, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        mine = self.rows[device]
        return *(x[:, mine].contiguous() for x in (dout, q, out)), lse[:, :, mine].contiguous()

    def play(self, tensors: list[Tensor], overlap: bool, change: Callable[[Unit, Tensor], None] | None = None) -> list[Tensor]:
        """O, LSE, dQ, dK and dV of the whole sequence."""
        q, k, v, dout = tensors
        out, lse = self.forward(q, k, v)
        played = [self.backward(device, (*self.own(device, dout, q, out, lse), k, v), overlap) for device in range(self.case.devices)]
        states: dict[int, Tensor] = {}
        for unit in self.shared.units:
            state = played[unit.rank].new_state(unit) if unit.before is None else states.pop(unit.before)
            if change is not None:
                change(unit, state)
            played[unit.rank].run(unit, state)
            if unit.after is not None:
                states[unit.number] = state
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        for mine, one in zip(self.rows, played, strict=True):
            for whole, part in zip(gradients, one.finish(), strict=True):
                whole[:, mine] = part
        return [out, lse, *gradients]


def plain(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    q, k, v, dout = tensors
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*inputs, mask=case.mask, return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout)]


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


def compile_all() -> None:
    needed = sorted(set.union(*map(kernels_of, [*(case for case, _ in checked_cases()), *timed_cases()])))
    with ProcessPoolExecutor() as pool:
        for (_, name), kernel in zip(needed, pool.map(compile_kernel, *zip(*needed, strict=True)), strict=True):
            print(kernel.sha256[:16], name, flush=True)


# ---- bits


def checked_cases() -> Iterator[tuple[Case, int]]:
    """(case, repeats), small ones first."""
    small = Case(1024, 2, (2, 2))
    for dims in ((128, 128), (64, 64), (256, 256), (192, 128), (192, 192), (96, 96)):
        for mask in (Causal(), Window(300, 0), Full()):
            yield replace(small, dims=dims, mask=mask), 4
        yield replace(small, dims=dims, dtype=torch.float16, heads=(6, 2), tokens=2048), 4
    for count in (2, 4, 8):
        yield Case(8192, count, (8, 2)), 40
        yield Case(8192, count, (16, 16), (64, 64)), 40
        yield Case(8192, count, (4, 4), mask=Full(), sharding="contiguous"), 40
        yield Case(16384, count, (32, 8)), 10
        yield Case(16384, count, (16, 16), mask=Window(4096, 0)), 10


def long_cases(least: int = 0) -> Iterator[tuple[Case, int]]:
    for tokens, repeats in ((16384, 100), (32768, 100), (65536, 6), (131072, 6)):
        if tokens < least:
            continue
        for count in (2, 4, 8, 16):
            for heads in ((32, 8), (16, 16)):
                yield Case(tokens, count, heads), repeats


def check_bits(cases: Iterator[tuple[Case, int]], seconds: float) -> Iterator[dict[str, Any]]:
    end = time.time() + seconds
    for case, repeats in cases:
        if time.time() > end:
            print("out of time", file=sys.stderr)
            return
        began, tensors, shared = time.time(), case.tensors(), Shared(case)
        expected, different = plain(case, tensors), set[str]()
        for number in range(repeats):
            overlap = number % 2 == 1
            for name, a, b in zip(NAMES, expected, shared.play(tensors, overlap), strict=True):
                if not torch.equal(a, b):
                    different.add(f"{name} (overlap)" if overlap else name)
                    print(f"  run {number}, overlap {overlap}: {name} {difference(a, b)}", flush=True)
        rounded = shared.play(tensors, False, _round_states)
        control = [name for name, a, b in zip(NAMES, expected, rounded, strict=True) if not torch.equal(a, b)]
        verdict = "EQUAL" if not different else f"DIFFERENT in {sorted(different)}"
        print(f"{verdict}  x{repeats}  {case}  (rounded states change {control})  {time.time() - began:.1f} s", flush=True)
        yield {"case": str(case), "repeats": repeats, "different": sorted(different), "control": control}


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
            yield Case(tokens, count, (32, 8), together=together)
    yield Case(32768, 4, (16, 16))
    yield Case(32768, 4, (16, 16), (64, 64))
    yield Case(32768, 4, (16, 16), mask=Full(), sharding="contiguous")
    yield Case(131072, 8, (32, 8))


def measure(case: Case) -> Times:
    tensors, shared = case.tensors(), Shared(case)
    q, k, v, dout = tensors
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*inputs, mask=case.mask, return_lse=True)
    plain_ms = milliseconds(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
    out, lse = out.detach(), lse.detach()
    slowest: dict[str, float] = {}
    for device in range(case.devices):
        own = (*shared.own(device, dout, q, out, lse), k, v)
        for name, ms in times_of_device(shared, device, own):
            slowest[name] = max(ms, slowest.get(name, 0.0))
    units = max(map(len, shared.shared.by_rank))
    return Times(str(case), case.devices, shared.shared.heads_together, units, plain_ms, slowest)


def times_of_device(shared: Shared, device: int, own: tuple[Tensor, ...]) -> Iterator[tuple[str, float]]:
    states = scratch_states(shared, device)
    for overlap, name in ((False, ""), (True, " overlapping")):
        call = partial(run_alone, shared, device, own, states, overlap)
        yield f"launched{name}", milliseconds(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        yield f"replayed{name}", milliseconds(graph.replay)
        if not overlap:
            yield "host", host_milliseconds(call)


def scratch_states(shared: Shared, device: int) -> dict[int, Tensor]:
    """Memory for states by size: what is in it does not change the time."""
    sizes = {shared.shared.state_tiles(unit) * ranks.tile_size(*shared.case.dims) for unit in shared.shared.by_rank[device]}
    return {size: torch.randn(size, device="cuda") for size in sizes}


def run_alone(shared: Shared, device: int, own: tuple[Tensor, ...], states: dict[int, Tensor], overlap: bool) -> tuple[Tensor, ...]:
    """A device's part of the backward, from preprocess to postprocess, for whose states nobody waits."""
    backward = shared.backward(device, own, overlap)
    for unit in shared.shared.by_rank[device]:
        backward.run(unit, states[backward.state_size(unit)])
    return backward.finish()


def milliseconds(call: Callable[[], Any]) -> float:
    for _ in range(2):
        call()
    found = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return median(found)


def host_milliseconds(call: Callable[[], Any]) -> float:
    """Until the call returns; the GPU may still work."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return min(found)


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
        compile_all()
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
