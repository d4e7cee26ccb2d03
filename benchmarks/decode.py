"""Attention to a cache on a Hopper GPU: are its bits those of training, how fast is it.

    python -m benchmarks.kernels decode                    compiles all that this loads; needs no GPU
    timeout 300 python -m benchmarks.decode --check 200    bits against the whole forward, small cases first, a verdict per case
    timeout 300 python -m benchmarks.decode --check 200 --columns 32
    timeout 300 python -m benchmarks.decode --time         TB/s beside others, by CUDA graphs (benchmarks.suite decode: launched one by one)

Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from importlib import import_module

import torch

from cached import CacheCase, play
from dash_attn.tools.bench.candidates import first_line, make_tensors
from dash_attn.tools.bench.shape import Shape

from .cache_peers import copies_of, decode_candidates
from .suites import choose
from .timing import milliseconds, replayed

PEAK = 4.8e12  # bytes per second of an H200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # --check also runs on a CPU
LONGEST = 100_000 if DEVICE == "cuda" else 20_000  # keys of a random case
MOST_WRONG = 20  # cases, until the rest is left out
RUNS = 12
PAGE_SIZES = (0, 16, 64, 256)  # to time; 0: rows


# ---- check

BASE = CacheCase((300, 200), dims=(128, 128), chunks=(1, 1, 100), device=DEVICE)
LARGE = replace(BASE, lengths=(4000, 100, 9000), heads=(32, 8), page_size=16, chunks=(1, 1, 3000))
SMALL = (
    *(replace(BASE, lengths=lengths) for lengths in ((5,), (128,), (129,), (300,), (300, 1, 128, 77))),
    *(replace(BASE, chunks=(chunk, 100)) for chunk in (3, 90)),
    *(replace(BASE, page_size=size) for size in (128, 16, 48)),
    replace(BASE, page_size=256, chunks=(40,)),
    replace(BASE, most_padding=150),
    replace(BASE, options={"window_size": (70, 0)}),
    replace(BASE, options={"window_size": (70, 0)}, page_size=16, chunks=(5, 100)),
    replace(BASE, options={"softcap": 5.0}),
    replace(BASE, sinks=True),
    replace(BASE, dtype=torch.float16),
    *(replace(BASE, dims=dims, page_size=16) for dims in ((64, 64), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256), (40, 64))),
    *(replace(BASE, heads=heads, chunks=(3, 100)) for heads in ((1, 1), (8, 1), (7, 1), (32, 8), (71, 1), (130, 1))),
    *(replace(LARGE, seed=seed) for seed in range(20)),
)


def random_case(seed: int) -> CacheCase:
    """A third of the longest at once brings single tokens to long caches."""
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
        (chunk, chunk, max(chunk, longest // 3)),
        seed,
        DEVICE,
    )


def in_words(case: CacheCase) -> str:
    """What is not as in every case."""
    return ", ".join(f"{f.name}={getattr(case, f.name)}" for f in fields(case) if getattr(case, f.name) != getattr(BASE, f.name))


def check(cases: Iterable[CacheCase]) -> int:
    """How many differ from the whole forward. tests/gpu/test_gpu_kv_cache.py also replays graphs."""
    bad = 0
    for number, case in enumerate(cases):
        wrong = ", ".join(play(case))
        bad += bool(wrong)
        print(f"{'BAD' if wrong else 'ok '} {number:4d} {in_words(case)} {wrong}", flush=True)
        if bad > MOST_WRONG:
            break
    print(f"{bad} wrong")
    return bad


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


def time_all() -> None:
    plain = dict.fromkeys(replace(shape, cache="rows") for shape in choose("decode", masks=("causal",)) if shape.q_seqlen == 1)
    for shape in (replace(shape, cache=f"pages:{size}" if size else "rows") for shape in plain for size in PAGE_SIZES):
        print(f"{shape}: {time_shape(shape)}", flush=True)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=int, metavar="CASES", help="random cases after the small ones")
    parser.add_argument("--time", action="store_true")
    columns_help = "of V per CTA of a cluster, however many units: 16, 32 or 64; 0: no clusters; else as it is"
    parser.add_argument("--columns", type=int, help=columns_help)
    chosen = parser.parse_args()
    if chosen.columns is not None:
        clusters = tuple((dim, chosen.columns, 10**6) for dim in (64, 128) if 0 < chosen.columns < dim)
        import_module("dash_attn.backends.hopper.calls.decode").CLUSTERS = clusters
    bad = 0 if chosen.check is None else check((*SMALL, *(random_case(i) for i in range(chosen.check))))
    if chosen.time:
        time_all()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
