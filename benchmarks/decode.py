"""Attention to a cache on a Hopper GPU: does it compile clean, are its bits those of training, how fast is it.

    python benchmarks/decode.py --compile                  needs no GPU
    timeout 300 python benchmarks/decode.py --check 200    bits against the whole forward, small cases first, a verdict per case
    timeout 300 python benchmarks/decode.py --check 200 --columns 32
    timeout 300 python benchmarks/decode.py --time         GB/s beside PyTorch's SDPA with one query per sequence

Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_with_kvcache

if TYPE_CHECKING:
    from dash_attn.backends.hopper.calls.kernel_names import KernelName

NAN = float("nan")
L2_BYTES = 200 * 2**20  # caches that are read in turn have more than this, so none stays in the L2 cache
PEAK = 4.8e12  # bytes per second of an H200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # --check also runs on a CPU
LONGEST = 100_000 if DEVICE == "cuda" else 20_000  # keys of a random case


# ---- compile


def needed_kernels() -> list[KernelName]:
    from dash_attn.backends.hopper.calls.decode import APPEND
    from dash_attn.backends.hopper.calls.kernel_names import Variant, cluster_kernel, decode_kernel, forward_kernel
    from dash_attn.backends.hopper.tiles import CLUSTERS, CONSUMER_CHOICES, FORWARD_DIMS, KERNEL_DIMS, kernel_dim

    choices = [(dtype, cap) for dtype in ("bf16", "f16") for cap in (False, True)]
    kernels = [decode_kernel(dtype, dim, cap) for dim in KERNEL_DIMS for dtype, cap in choices]
    kernels += [cluster_kernel(dtype, dim, columns, cap) for dim, columns, _ in CLUSTERS for dtype, cap in choices]
    kernels.append(APPEND)
    for dtype, cap in choices:  # what --check compares with
        for dim, v_dim in FORWARD_DIMS:
            variant = Variant(dtype, dim, cap, "Band")
            kernels += [forward_kernel(variant, consumers, v_dim) for consumers in CONSUMER_CHOICES[kernel_dim(dim)]]
    return kernels


def compile_all() -> int:
    from dash_attn.backends.hopper.driver.compile import compile_kernel, compiler_version

    kernels, bad = needed_kernels(), 0
    for kernel in kernels:
        log = compile_kernel(kernel.header, kernel.name).log
        sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
        spills = any(map(int, sizes)) or "C75" in log
        bad += spills
        registers = re.search(r"Used (\d+) registers", log)
        print(f"{'SPILLS' if spills else 'clean '} {kernel.name}: {registers[1] if registers else '?'} registers", flush=True)
    print(f"NVRTC {compiler_version()}: {bad} of {len(kernels)} kernels spill or are serialised")
    return bad


# ---- check


@dataclass(frozen=True)
class Case:
    """Sequences of some lengths, of which the last `chunk` tokens come now. page_size 0: rows of a plain cache."""

    lengths: tuple[int, ...]
    chunk: int = 1
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 0
    padded: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    appended: bool = True
    seed: int = 0

    def __str__(self) -> str:
        """What is not as in every case."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)


SMALL = (
    Case((5,)),
    Case((128,)),
    Case((129,)),
    Case((300,)),
    Case((300, 1, 128, 77)),
    Case((300, 200), chunk=3),
    Case((300, 200), chunk=100),
    Case((300, 200), page_size=128),
    Case((300, 200), page_size=16),
    Case((300, 200), page_size=48),
    Case((300, 200), page_size=256, chunk=40),
    Case((300, 200), padded=True),
    Case((300, 200), window=(70, 0)),
    Case((300, 200), window=(70, 0), page_size=16, chunk=5),
    Case((300, 200), softcap=5.0),
    Case((300, 200), sinks=True),
    Case((300, 200), dtype=torch.float16),
    *(Case((300, 200), dims=dims, page_size=16) for dims in ((64, 64), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256), (40, 64))),
    *(Case((300, 200), heads=heads, chunk=3) for heads in ((1, 1), (8, 1), (7, 1), (32, 8), (71, 1), (130, 1))),
    Case((4000, 100, 9000), heads=(32, 8), page_size=64),
)


def random_case(seed: int) -> Case:
    source = random.Random(seed)
    longest = source.choice((40, 300, 300, 1000, 1000, 1000, 5000, 5000, 5000, 20000, 20000, LONGEST))
    chunk = source.choice((1, 1, 1, 1, 2, 4, 9, 64, 200))
    page_size = source.choice((0, 0, 16, 16, 32, 48, 64, 112, 128, 256, 528))
    heads = source.choice(((1, 1), (2, 2), (4, 2), (8, 2), (6, 2), (8, 1), (16, 2), (5, 1), (12, 1), (32, 4), (70, 1)))
    left = source.choice((-1, -1, -1, 1, 50, 128, 700))
    return Case(
        tuple(source.randint(chunk, longest + chunk) for _ in range(source.choice((1, 2, 5)))),
        chunk,
        heads,
        source.choice(((64, 64), (128, 128), (128, 128), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256), (40, 104))),
        source.choice((torch.bfloat16, torch.float16)),
        page_size,
        page_size == 0 and source.random() < 0.4,
        (left, 0),
        source.choice((0.0, 0.0, 4.0)),
        source.random() < 0.3,
        source.random() < 0.7,
        seed,
    )


class Problem:
    """A case on the GPU: whole tensors for the training forward, and a cache that holds all but what is new; the rest is NaN."""

    def __init__(self, case: Case) -> None:
        self.case, source = case, random.Random(case.seed + 1)
        torch.manual_seed(case.seed)
        (q_heads, kv_heads), (dim, v_dim) = case.heads, case.dims
        shapes = (q_heads, dim), (kv_heads, dim), (kv_heads, v_dim)
        self.whole = [[torch.randn(1, n, *shape, device=DEVICE).to(case.dtype) for shape in shapes] for n in case.lengths]
        self.sinks = torch.randn(q_heads, device=DEVICE) if case.sinks else None
        self.padding = [source.randint(0, 150) if case.padded else 0 for _ in case.lengths]
        self.options: dict[str, Any] = {"softcap": case.softcap, "sinks": self.sinks, "window_size": case.window, "causal": True}
        self.places: dict[str, Tensor] = {}
        self._fill(source)

    def _fill(self, source: random.Random) -> None:
        case, count = self.case, len(self.case.lengths)
        slots = max(n + p for n, p in zip(case.lengths, self.padding, strict=True)) + source.randint(0, 300)
        rows, size = count + 2, slots
        if case.page_size:
            columns, size = -(-slots // case.page_size), case.page_size
            rows = columns * count + 5
            table = torch.tensor(source.sample(range(rows), columns * count), dtype=torch.int32).view(count, columns)
            for i, length in enumerate(case.lengths):
                table[i, -(-length // size) :] = -1  # nobody may look at it
        self.caches = [torch.full((rows, size, case.heads[1], dim), NAN, dtype=case.dtype, device=DEVICE) for dim in case.dims]
        chosen = source.sample(range(rows), count) if not case.page_size else []
        kept = [n - case.chunk if case.appended else n for n in case.lengths]
        for i, (length, pad) in enumerate(zip(kept, self.padding, strict=True)):
            at = torch.arange(pad, pad + length)
            place = (table[i].long()[at // size], at % size) if case.page_size else (torch.full_like(at, chosen[i]), at)
            for cache, x in zip(self.caches, self.whole[i][1:], strict=True):
                cache[tuple(index.to(DEVICE) for index in place)] = x[0, :length]
        lengths = [n + p for n, p in zip(kept, self.padding, strict=True)]
        numbers: dict[str, Any] = {"cache_seqlens": lengths}
        if case.page_size:
            numbers["block_table"] = table.tolist()
        else:
            numbers["cache_batch_idx"] = chosen
        if case.padded:
            numbers["cache_leftpad"] = self.padding
        self.places = {name: torch.tensor(values, dtype=torch.int32, device=DEVICE) for name, values in numbers.items()}

    def last(self, which: int) -> Tensor:
        return torch.cat([tensors[which][:, -self.case.chunk :] for tensors in self.whole])

    def decode(self) -> tuple[Tensor, Tensor]:
        new = (self.last(1), self.last(2)) if self.case.appended else (None, None)
        out, lse = flash_attn_with_kvcache(self.last(0), *self.caches, *new, **self.places, **self.options, return_softmax_lse=True)
        return out, lse

    def train(self) -> tuple[Tensor, Tensor]:
        results = [flash_attn_func(*tensors, **self.options, return_lse=True) for tensors in self.whole]
        chunk = self.case.chunk
        return torch.cat([out[:, -chunk:] for out, _ in results]), torch.cat([lse[:, :, -chunk:] for _, lse in results])


def difference(got: Tensor, expected: Tensor) -> str:
    """In words; empty if all bits are equal."""
    integers = torch.int16 if got.element_size() == 2 else torch.int32
    differs = got.contiguous().view(integers) != expected.contiguous().view(integers)
    if not differs.any():
        return ""
    place = tuple(differs.nonzero()[0].tolist())
    far = (got.double() - expected.double()).abs().nan_to_num(torch.inf).max().item()
    return f"{int(differs.sum())} of {differs.numel()} differ, by up to {far:.3g}, first at {place}: {got[place]} for {expected[place]}"


def check(count: int, seed: int) -> int:
    bad = 0
    for number, case in enumerate((*SMALL, *(random_case(seed + i) for i in range(count)))):
        problem = Problem(case)
        expected, got = problem.train(), problem.decode()
        wrong = [f"{name}: {text}" for name, a, b in zip(("out", "LSE"), got, expected, strict=True) if (text := difference(a, b))]
        bad += bool(wrong)
        print(f"{'BAD' if wrong else 'ok '} {number:4d} {case}", *wrong, sep="\n      " if wrong else " ", flush=True)
        if bad > 20:
            break
    for name, control in (
        ("graph", check_graph),
        ("repeats", check_repeats),
        ("shifted keys differ", check_shift),
        ("SDPA differs", check_sdpa),
    ):
        text = control()
        bad += bool(text)
        print(f"{'BAD' if text else 'ok '} {name} {text}", flush=True)
    print(f"{bad} wrong")
    return bad


def check_graph() -> str:
    """One graph, replayed with other lengths, pages and queries."""
    problems = [Problem(Case((700, 400 + 13 * i), heads=(8, 2), page_size=32, seed=i)) for i in range(3)]
    columns = max(p.places["block_table"].shape[1] for p in problems)
    rows = max(len(p.caches[0]) for p in problems)
    caches = [torch.full((rows, *x.shape[1:]), NAN, dtype=x.dtype, device=DEVICE) for x in problems[0].caches]
    q, k, v = (problems[0].last(i).clone() for i in range(3))
    lengths, table = problems[0].places["cache_seqlens"].clone(), torch.zeros(2, columns, dtype=torch.int32, device=DEVICE)

    def load(problem: Problem) -> None:
        for mine, its in zip(caches, problem.caches, strict=True):
            mine.fill_(NAN)
            mine[: len(its)] = its
        table.fill_(-1)
        table[:, : problem.places["block_table"].shape[1]] = problem.places["block_table"]
        lengths.copy_(problem.places["cache_seqlens"])
        for mine, which in ((q, 0), (k, 1), (v, 2)):
            mine.copy_(problem.last(which))

    def call() -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True)
        return out, lse

    load(problems[0])
    call()
    if DEVICE == "cpu":
        return ""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for i, problem in enumerate(problems):
        load(problem)
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(got, problem.train(), strict=True):
            if text := difference(a, b):
                return f"problem {i}: {text}"
    return ""


def check_repeats() -> str:
    problem = Problem(Case((3000, 5000, 17), heads=(32, 8), page_size=16, appended=False))
    first = problem.decode()
    for _ in range(20):
        for a, b in zip(problem.decode(), first, strict=True):
            if text := difference(a, b):
                return text
    return ""


def check_shift() -> str:
    """The control: the same keys, counted from another slot, have other bits."""
    problem = Problem(Case((1000,), dtype=torch.float16))
    q, k, v = problem.whole[0]
    zeros = [torch.zeros_like(x[:, :37]) for x in (k, v)]
    moved = flash_attn_with_kvcache(q[:, -1:], *(torch.cat(pair, 1) for pair in zip(zeros, (k, v), strict=True)), window_size=(999, 0))
    out, _ = problem.train()
    return "" if difference(moved, out) else "bits are equal though keys moved on the tile grid"


def check_sdpa() -> str:
    """The control: PyTorch's attention of one query has other bits."""
    problem = Problem(Case((1000,), dtype=torch.float16))
    q, k, v = (x.transpose(1, 2) for x in problem.whole[0])
    decoded = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True).transpose(1, 2)
    out, _ = problem.train()
    return "" if difference(decoded, out) else "its bits are ours"


# ---- time

SHAPES = (  # batch, keys, query heads, KV heads, head dim
    (64, 4096, 32, 8, 128),
    (128, 8192, 32, 8, 128),
    (256, 2048, 64, 8, 128),
    (16, 8192, 32, 8, 128),
    (64, 8192, 32, 8, 64),
    (16, 32768, 8, 1, 128),
    (1, 8192, 32, 8, 128),
    (1, 32768, 32, 8, 128),
    (4, 32768, 32, 8, 128),
)


def time_of(calls: list[Callable[[], Any]]) -> float:
    """Median seconds of a call, in a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def time_all(page_sizes: list[int]) -> None:
    for batch, keys, q_heads, kv_heads, dim in SHAPES:
        bytes_read = 2 * batch * keys * kv_heads * dim * 2
        copies = max(1, -(-L2_BYTES // bytes_read))
        torch.manual_seed(0)
        q = torch.randn(batch, 1, q_heads, dim, device="cuda", dtype=torch.bfloat16)
        flat = [torch.randn(batch, keys, kv_heads, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        found = []
        for size in page_sizes:
            caches = [[x[:, :, :, i].contiguous() for i in range(2)] for x in flat]
            places: dict[str, Any] = {"cache_seqlens": lengths}
            if size:
                caches = [[x.view(-1, size, kv_heads, dim) for x in pair] for pair in caches]
                pages = torch.randperm(batch * keys // size, device="cuda").int()
                places["block_table"] = pages.view(batch, -1)
            calls = [partial(flash_attn_with_kvcache, q, *pair, **places, causal=True) for pair in caches]
            found.append((f"pages of {size}" if size else "rows", time_of(calls)))
            del caches, calls
        heads_first = [[x[:, :, :, i].transpose(1, 2).contiguous() for i in range(2)] for x in flat]
        del flat
        sdpa = torch.nn.functional.scaled_dot_product_attention
        try:
            found.append(("SDPA", time_of([partial(sdpa, q.transpose(1, 2), *pair, enable_gqa=True) for pair in heads_first])))
        except RuntimeError as error:
            print("SDPA:", str(error).splitlines()[0])
        del heads_first
        torch.cuda.empty_cache()
        shown = ", ".join(f"{n} {t * 1e6:.0f} us {bytes_read / t / 1e12:.2f} TB/s ({bytes_read / t / PEAK:.0%})" for n, t in found)
        print(f"batch {batch}, {keys} keys, {q_heads}/{kv_heads} heads, dim {dim}: {shown}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", type=int, metavar="CASES", help="random cases after the small ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time", action="store_true")
    parser.add_argument(
        "--columns", type=int, help="of V per CTA of a cluster, however many units: 16, 32 or 64; 0: no clusters; else as it is"
    )
    parser.add_argument("--pages", type=int, nargs="*", default=[0, 16, 64, 256], help="page sizes to time; 0: rows")
    chosen = parser.parse_args()
    if chosen.columns is not None:
        clusters = tuple((dim, chosen.columns, 10**6) for dim in (64, 128) if 0 < chosen.columns < dim)
        import_module("dash_attn.backends.hopper.calls.decode").CLUSTERS = clusters
    bad = compile_all() if chosen.compile else 0
    if chosen.check is not None:
        bad += check(chosen.check, chosen.seed)
    if chosen.time:
        time_all(chosen.pages)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
