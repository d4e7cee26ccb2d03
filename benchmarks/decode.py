"""Attention to a cache on a Hopper GPU: does it compile clean, are its bits those of training, how fast is it.

    python -m benchmarks.decode --compile                  needs no GPU
    timeout 300 python -m benchmarks.decode --check 200    bits against the whole forward, small cases first, a verdict per case
    timeout 300 python -m benchmarks.decode --check 200 --columns 32
    timeout 300 python -m benchmarks.decode --time         TB/s beside others, by CUDA graphs (benchmarks.suite decode: launched one by one)

Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module

import torch
from torch import Tensor

from cached import CacheCase, Played
from dash_attn import flash_attn_with_kvcache
from dash_attn.tools.bench.candidates import first_line, make_tensors
from dash_attn.tools.bench.shape import Shape
from graphs import capture

from .cache_peers import copies_of, decode_candidates
from .kernels import compile_ahead
from .suites import choose
from .timing import milliseconds, replayed

PEAK = 4.8e12  # bytes per second of an H200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # --check also runs on a CPU
LONGEST = 100_000 if DEVICE == "cuda" else 20_000  # keys of a random case
MOST_WRONG = 20  # cases, until the rest is left out
RUNS = 12


def needed_kernels() -> set[tuple[str, str]]:
    """Of caches, and of the forward that --check compares with."""
    from dash_attn.backends.hopper.calls.decode import APPEND
    from dash_attn.backends.hopper.calls.kernel_names import Variant, decode_kernel, forward_kernel
    from dash_attn.backends.hopper.tiles import CLUSTERS, CONSUMER_CHOICES, FORWARD_DIMS, KERNEL_DIMS, kernel_dim

    found = [APPEND]
    for dtype, cap in ((dtype, cap) for dtype in ("bf16", "f16") for cap in (False, True)):
        found += [decode_kernel(dtype, dim, cap) for dim in KERNEL_DIMS]
        found += [decode_kernel(dtype, dim, cap, columns) for dim, columns, _ in CLUSTERS]
        for dim, v_dim in FORWARD_DIMS:
            variant = Variant(dtype, dim, cap, "Band")
            found += [forward_kernel(variant, consumers, v_dim) for consumers in CONSUMER_CHOICES[kernel_dim(dim)]]
    return {(kernel.header, kernel.name) for kernel in found}


# ---- check. The last of a case's chunks is how many tokens come at once when the cache has all others.

BASE = CacheCase((300, 200), dims=(128, 128), chunks=(1,), device=DEVICE)
SMALL = (
    *(replace(BASE, lengths=lengths) for lengths in ((5,), (128,), (129,), (300,), (300, 1, 128, 77))),
    *(replace(BASE, chunks=(chunk,)) for chunk in (3, 100)),
    *(replace(BASE, page_size=size) for size in (128, 16, 48)),
    replace(BASE, page_size=256, chunks=(40,)),
    replace(BASE, most_padding=150),
    replace(BASE, options={"window_size": (70, 0)}),
    replace(BASE, options={"window_size": (70, 0)}, page_size=16, chunks=(5,)),
    replace(BASE, options={"softcap": 5.0}),
    replace(BASE, sinks=True),
    replace(BASE, dtype=torch.float16),
    *(replace(BASE, dims=dims, page_size=16) for dims in ((64, 64), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256), (40, 64))),
    *(replace(BASE, heads=heads, chunks=(3,)) for heads in ((1, 1), (8, 1), (7, 1), (32, 8), (71, 1), (130, 1))),
    replace(BASE, lengths=(4000, 100, 9000), heads=(32, 8), page_size=64),
)


def random_case(seed: int) -> CacheCase:
    source = random.Random(seed)
    longest = source.choice((40, 300, 300, 1000, 1000, 1000, 5000, 5000, 5000, 20000, 20000, LONGEST))
    chunk = source.choice((1, 1, 1, 1, 2, 4, 9, 64, 200))
    page_size = source.choice((0, 0, 16, 16, 32, 48, 64, 112, 128, 256, 528))
    return CacheCase(
        tuple(source.randint(chunk, longest + chunk) for _ in range(source.choice((1, 2, 5)))),
        source.choice(((1, 1), (2, 2), (4, 2), (8, 2), (6, 2), (8, 1), (16, 2), (5, 1), (12, 1), (32, 4), (70, 1))),
        source.choice(((64, 64), (128, 128), (128, 128), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256), (40, 104))),
        source.choice((torch.bfloat16, torch.float16)),
        page_size,
        150 if page_size == 0 and source.random() < 0.4 else 0,
        {"window_size": (source.choice((-1, -1, -1, 1, 50, 128, 700)), 0), "softcap": source.choice((0.0, 0.0, 4.0))},
        source.random() < 0.3,
        (chunk,),
        seed,
        DEVICE,
    )


def in_words(case: CacheCase) -> str:
    """What is not as in every case."""
    return ", ".join(f"{f.name}={getattr(case, f.name)}" for f in fields(case) if getattr(case, f.name) != getattr(BASE, f.name))


def played(case: CacheCase) -> Played:
    """Each sequence but its last tokens, one after the other; then those of all."""
    made, chunk = Played(case), case.chunks[-1]
    before = [max(0, length - chunk) for length in case.lengths]
    for i, length in enumerate(before):
        if length:
            made.call([i], [0] * len(before), length)
    for new in sorted({length - done for length, done in zip(case.lengths, before, strict=True)}):
        made.call([i for i, done in enumerate(before) if case.lengths[i] - done == new], list(before), new)
    return made


def again(made: Played) -> Tensor:
    """The last token of the first sequence once more, with nothing to append."""
    case, length = made.case, torch.tensor([made.case.lengths[0] + made.padding[0]], dtype=torch.int32, device=DEVICE)
    places = {"block_table": made.table[:1]} if case.page_size else {"cache_batch_idx": made.rows[:1]}
    if case.most_padding:
        places["cache_leftpad"] = torch.tensor(made.padding[:1], dtype=torch.int32, device=DEVICE)
    q, options = made.tensors[0][0][:, -1:], {"causal": True, "sinks": made.sinks, **case.options}
    out: Tensor = flash_attn_with_kvcache(q, *made.caches, cache_seqlens=length, **places, **options)
    return out


def wrong_with(case: CacheCase, repeats: int = 2) -> str:
    made = played(case)
    bad, last = made.differing(), made.out[0][-1][:, -1:]
    if not all(torch.equal(again(made), last) for _ in range(repeats)):
        bad.append("a call that appends nothing")
    return ", ".join(bad)


def check(count: int, seed: int) -> int:
    bad = 0
    for number, case in enumerate((*SMALL, *(random_case(seed + i) for i in range(count)))):
        wrong = wrong_with(case)
        bad += bool(wrong)
        print(f"{'BAD' if wrong else 'ok '} {number:4d} {in_words(case)} {wrong}", flush=True)
        if bad > MOST_WRONG:
            break
    controls: dict[str, Callable[[], str]] = {"graph": check_graph, "repeats": check_repeats}
    controls |= {"shifted keys differ": check_shift, "SDPA differs": check_sdpa}
    for name, control in controls.items():
        text = control()
        bad += bool(text)
        print(f"{'BAD' if text else 'ok '} {name} {text}", flush=True)
    print(f"{bad} wrong")
    return bad


def check_graph() -> str:
    """One graph, replayed with other lengths, pages and queries."""
    made = [Played(replace(BASE, lengths=(700, 400 + 13 * i), heads=(8, 2), page_size=32, seed=i)) for i in range(3)]
    rows, columns = max(len(one.caches[0]) for one in made), max(one.table.shape[1] for one in made)
    held = [x.new_empty(rows, *x.shape[1:]) for x in made[0].caches]
    q, k, v = (torch.cat([tensors[which][:, -1:] for tensors in made[0].tensors]) for which in range(3))
    lengths, table = (torch.empty(shape, dtype=torch.int32, device=DEVICE) for shape in ((2,), (2, columns)))

    def load(one: Played) -> None:
        for i, length in enumerate(one.case.lengths):
            one.call([i], [0, 0], length - 1)
        for mine, its in ((table.fill_(-1).T, one.table.T), *((x.fill_(torch.nan), y) for x, y in zip(held, one.caches, strict=True))):
            mine[: len(its)] = its
        for which, mine in enumerate((q, k, v)):
            mine.copy_(torch.cat([tensors[which][:, -1:] for tensors in one.tensors]))
        lengths.copy_(torch.tensor([length - 1 for length in one.case.lengths]))

    def call() -> Tensor:
        out: Tensor = flash_attn_with_kvcache(q, *held, k, v, cache_seqlens=lengths, block_table=table, causal=True)
        return out

    load(made[0])
    graph, out = capture(call) if DEVICE == "cuda" else (None, call())
    for number, one in enumerate(made):
        load(one)
        out.copy_(call()) if graph is None else graph.replay()
        if not torch.equal(out, torch.cat([one.whole(i)[0][:, -1:] for i in range(2)])):
            return f"problem {number} has other bits"
    return ""


def check_repeats() -> str:
    return wrong_with(replace(BASE, lengths=(3000, 5000, 17), heads=(32, 8), page_size=16), 20)


def check_shift() -> str:
    """The control: the same keys, counted from another slot, have other bits."""
    made = Played(replace(BASE, lengths=(1000,), dtype=torch.float16))
    q, k, v = made.tensors[0]
    shifted = (torch.cat((torch.zeros_like(x[:, :37]), x), 1) for x in (k, v))
    moved = flash_attn_with_kvcache(q[:, -1:], *shifted, window_size=(999, 0))
    return "bits are equal though keys moved on the tile grid" if torch.equal(moved, made.whole(0)[0][:, -1:]) else ""


def check_sdpa() -> str:
    """The control: PyTorch's attention of one query has other bits."""
    made = Played(replace(BASE, lengths=(1000,), dtype=torch.float16))
    q, k, v = (x.transpose(1, 2) for x in made.tensors[0])
    decoded = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True).transpose(1, 2)
    return "its bits are ours" if torch.equal(decoded, made.whole(0)[0][:, -1:]) else ""


# ---- time


def time_shape(shape: Shape) -> str:
    """Each kernel that can run it, in a graph that reads every copy of the cache once."""
    tensors, said = make_tensors(shape, torch.device("cuda")), []
    for candidate in decode_candidates()[0]:
        if candidate.refuses(shape) is not None:
            continue
        try:
            forward, copies = candidate.prepare(shape, tensors).forward, copies_of(shape, tensors)
            (ms,) = milliseconds([replayed(lambda forward=forward, copies=copies: lambda: [forward() for _ in range(copies)])], RUNS)
        except Exception as error:  # what a kernel cannot do, it says in many ways
            said.append(f"{candidate.name}: {first_line(error)}")
            continue
        seconds = ms / 1000 / copies
        rate = shape.cache_bytes / seconds
        said.append(f"{candidate.name} {seconds * 1e6:.0f} us {rate / 1e12:.2f} TB/s ({rate / PEAK:.0%})")
    return ", ".join(said)


def time_all(page_sizes: list[int]) -> None:
    plain = dict.fromkeys(replace(shape, cache="rows") for shape in choose("decode", masks=("causal",)) if shape.q_seqlen == 1)
    for shape in (replace(shape, cache=f"pages:{size}" if size else "rows") for shape in plain for size in page_sizes):
        print(f"{shape}: {time_shape(shape)}", flush=True)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", type=int, metavar="CASES", help="random cases after the small ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time", action="store_true")
    columns_help = "of V per CTA of a cluster, however many units: 16, 32 or 64; 0: no clusters; else as it is"
    parser.add_argument("--columns", type=int, help=columns_help)
    parser.add_argument("--pages", type=int, nargs="*", default=[0, 16, 64, 256], help="page sizes to time; 0: rows")
    chosen = parser.parse_args()
    if chosen.columns is not None:
        clusters = tuple((dim, chosen.columns, 10**6) for dim in (64, 128) if 0 < chosen.columns < dim)
        import_module("dash_attn.backends.hopper.calls.decode").CLUSTERS = clusters
    bad = compile_ahead(needed_kernels()) if chosen.compile else 0
    if chosen.check is not None:
        bad += check(chosen.check, chosen.seed)
    if chosen.time:
        time_all(chosen.pages)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
