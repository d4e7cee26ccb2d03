"""The bits of a version: python tools/baseline.py orders|cpu|h200 [--write] [--source OTHER/src] [--jobs N]

Compares this tree with the recorded lines, and names what differs; --write records them instead. A change of the code that is not a
change of bits leaves all three files as they are.

orders: tests/golden/order_hashes.txt, computed anew. cpu: output, LSE and gradients of a grid of calls; they are
those of one kind of CPU, so record both trees on the machine that compares them. h200: the same of the calls below, on a Hopper GPU.
Only names that users have are called, so that --source can be an older version.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "baseline"
FILES = {"orders": ROOT / "tests" / "golden" / "order_hashes.txt", "cpu": FOLDER / "cpu.txt", "h200": FOLDER / "h200.txt"}
SEEDS = torch.tensor([11, 12], dtype=torch.int64)
SLOPES = 0.5 ** torch.arange(1, 9)
FULL_SCHEDULES = ("ascending", "descending", "spt", "shift_blocks", "alternating", "arrival", "weave", "shift")
CAUSAL_SCHEDULES = ("ascending", "descending", "spt", "symmetric_shift", "alternating", "arrival", "weave")
Call = Callable[[str], dict[str, Any]]  # on a device: results by name


def hash_of(results: dict[str, Any]) -> str:
    """A short hash of the bits of each result."""

    def short(tensor: Tensor) -> str:
        octets = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(octets).hexdigest()[:12]

    return " ".join(f"{name}={short(tensor)}" for name, tensor in results.items() if tensor is not None)


def _random(device: str, dtype: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Drawn on the CPU, so that every device gets the same."""
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source).to(device, getattr(torch, dtype)) for shape in shapes]


def _gradients(call: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], dout: Tensor) -> dict[str, Any]:
    leaves = [x.requires_grad_() for x in inputs]
    out, lse = call(*leaves)
    found = torch.autograd.grad(out, leaves, dout)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsinks"), found, strict=False))}


def dense(
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dim: int,
    device: str,
    v_dim: int = 0,
    batch: int = 2,
    dtype: str = "bfloat16",
    sinks: bool = False,
    mask: str | Callable[[str], Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One call of flash_attn_func and its backward. mask: as the commands take it, or what makes one on a device."""
    from dash_attn import flash_attn_func, parse_mask

    (q_len, kv_len), (q_heads, kv_heads), v_dim = lengths, heads, v_dim or dim
    shapes = [(q_len, q_heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, v_dim), (q_len, q_heads, v_dim)]
    *inputs, dout = _random(device, dtype, *((batch, *shape) for shape in shapes))
    if sinks:
        inputs += _random(device, "float32", (q_heads,))
    if mask is not None:
        options["mask"] = parse_mask(mask) if isinstance(mask, str) else mask(device)

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        return flash_attn_func(q, k, v, return_lse=True, **on_device(device, options), **({"sinks": rest[0]} if rest else {}))

    return _gradients(call, inputs, dout)


def packed(lengths: tuple[int, ...], heads: tuple[int, int], dim: int, device: str, dtype: str = "bfloat16", **options: Any) -> Any:
    """Sequences laid end to end."""
    from dash_attn import flash_attn_varlen_func

    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    *inputs, dout = _random(device, dtype, *((sum(lengths), heads[i], dim) for i in (0, 1, 1, 0)))
    return _gradients(partial(flash_attn_varlen_func, return_lse=True, **on_device(device, options)), inputs, dout)


def on_device(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


def cached(
    lengths: tuple[int, ...],
    queries: int,
    heads: tuple[int, int],
    dim: int,
    device: str,
    dtype: str = "bfloat16",
    padding: tuple[int, ...] = (),
    page: int = 0,
    append: bool = False,
    sinks: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Queries that attend to a cache; the cache itself is a result where keys are appended."""
    from dash_attn import flash_attn_with_kvcache

    room = -(-(max(lengths) + queries) // 256) * 256
    shape = (len(lengths), room, heads[1], dim)
    q, k_cache, v_cache, k, v = _random(
        device, dtype, (len(lengths), queries, heads[0], dim), shape, shape, *2 * [(len(lengths), queries, heads[1], dim)]
    )
    if page:
        pages = len(lengths) * room // page
        k_cache, v_cache = (x.view(pages, page, heads[1], dim) for x in (k_cache, v_cache))
        options["block_table"] = torch.arange(pages, dtype=torch.int32).flip(0).view(len(lengths), -1).to(device)
    if padding:
        options["cache_leftpad"] = torch.tensor(padding, dtype=torch.int32, device=device)
    if sinks:
        (options["sinks"],) = _random(device, "float32", (heads[0],))
    if append:
        options |= {"k": k, "v": v}
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, return_softmax_lse=True, **options)
    return {"out": out, "lse": lse, **({"keys": k_cache, "values": v_cache} if append else {})}


def scattered(device: str) -> Any:
    """A boolean matrix with full, partial and empty tiles, other ones per sequence."""
    source = torch.Generator().manual_seed(1)
    coarse = torch.rand((2, 1, 8, 8), generator=source).repeat_interleave(128, 2).repeat_interleave(128, 3)
    fine = torch.rand((2, 1, 1024, 1024), generator=source)
    return ((coarse > 0.5) | ((coarse > 0.3) & (fine > 0.5))).to(device)


def blocks(device: str) -> Any:
    from dash_attn import TileMap

    return TileMap(np.random.RandomState(3).randint(0, 100, (28, 20)) < 40, 37, 53)


def cpu_calls() -> Iterator[tuple[str, Call]]:
    """A grid: masks, schedules, groups, dtypes, modifiers."""
    masks = ("full", "causal", "window:70,0", "window:40,90", "documents:100,60,97", "prefix:50")
    for mask, heads, dtype in product(masks, ((2, 2), (4, 1), (6, 2)), ("float32", "bfloat16")):
        yield f"{mask} heads {heads} {dtype}", partial(dense, (257, 257), heads, 32, mask=mask, dtype=dtype)
    for schedule in FULL_SCHEDULES:
        yield f"full schedule {schedule}", partial(dense, (300, 420), (4, 2), 32, dtype="float32", schedule=schedule)
    for schedule in CAUSAL_SCHEDULES:
        yield f"causal schedule {schedule}", partial(dense, (384, 384), (4, 2), 32, dtype="float32", causal=True, schedule=schedule)
    small: dict[str, Any] = {"dtype": "float32", "causal": True}
    yield "float64", partial(dense, (200, 200), (4, 2), 24, dtype="float64", causal=True)
    yield "float16, other value dim", partial(dense, (130, 200), (4, 2), 24, v_dim=40, dtype="float16", causal=True)
    yield "sinks, softcap", partial(dense, (200, 200), (4, 2), 32, **small, sinks=True, softcap=5.0)
    yield "dropout", partial(dense, (200, 200), (4, 2), 32, **small, dropout_p=0.2, dropout_seed=SEEDS)
    yield "ALiBi", partial(dense, (200, 200), (8, 2), 32, **small, alibi_slopes=SLOPES)
    yield "head offset", partial(dense, (300, 300), (4, 2), 32, **small, head_offset=1)
    yield "boolean", partial(dense, (1024, 1024), (2, 1), 16, dtype="float32", mask=scattered)
    yield "blocks", partial(dense, (1024, 1024), (2, 1), 16, dtype="float32", mask=blocks)
    for dtype in ("float32", "bfloat16"):
        yield f"packed {dtype}", partial(packed, (100, 1, 300, 37), (4, 2), 32, dtype=dtype, causal=True)
        yield f"cache {dtype}", partial(cached, (100, 1, 300), 3, (4, 2), 32, dtype=dtype, causal=True, append=True)


def h200_calls() -> Iterator[tuple[str, Call]]:
    square, many = (1024, 1024), (8, 8)
    dims = ((64, 0), (80, 0), (96, 0), (128, 0), (192, 0), (192, 128), (256, 0), (40, 0), (128, 64), (64, 256))
    for (dim, v_dim), mask in product(dims, ("causal", "full")):
        yield f"dim {dim} {v_dim} {mask}", partial(dense, square, many, dim, v_dim=v_dim, causal=mask == "causal")
    for dim in (64, 128, 256):
        yield f"float16 dim {dim}", partial(dense, square, many, dim, dtype="float16", causal=True)
    for mask, dim in product(("window:300,0", "window:100,200", "window:-1,70", "documents:300,24,700", "prefix:400"), (64, 128)):
        yield f"{mask} dim {dim}", partial(dense, square, many, dim, mask=mask)
    yield "blocks", partial(dense, square, many, 128, mask=blocks)
    for dim in (64, 128):
        yield f"boolean dim {dim}", partial(dense, square, many, dim, mask=scattered)
    for heads, lengths in product(((8, 1), (8, 2), (6, 2), (10, 2)), ((512, 512), (2048, 2048))):
        yield f"groups {heads} {lengths}", partial(dense, lengths, heads, 128, causal=True)
    for lengths in ((1, 1000), (100, 3000), (3000, 100), (4096, 4096), (16384, 16384)):
        yield f"lengths {lengths}", partial(dense, lengths, (4, 2), 128, batch=1, causal=True)
    yield "lengths (8192, 8192) full", partial(dense, (8192, 8192), (4, 4), 128, batch=1)
    for name in FULL_SCHEDULES:
        yield f"full schedule {name}", partial(dense, (2048, 2048), many, 128, schedule=name)
    for name in CAUSAL_SCHEDULES:
        yield f"causal schedule {name}", partial(dense, (2048, 2048), many, 128, causal=True, schedule=name)
    for dim in (64, 128):
        yield f"sinks dim {dim}", partial(dense, square, many, dim, causal=True, sinks=True)
        yield f"softcap dim {dim}", partial(dense, square, many, dim, causal=True, softcap=10.0)
        yield f"dropout dim {dim}", partial(dense, square, many, dim, causal=True, dropout_p=0.1, dropout_seed=SEEDS)
        yield f"ALiBi dim {dim}", partial(dense, square, many, dim, causal=True, alibi_slopes=SLOPES)
    yield "head offset", partial(dense, square, (4, 2), 128, causal=True, head_offset=1)
    yield from _h200_packed_and_cached()


def _h200_packed_and_cached() -> Iterator[tuple[str, Call]]:
    lengths = (1000, 1, 37, 2048, 512)
    for dim, mask in product((64, 128, 192), ("causal", "full")):
        yield f"packed dim {dim} {mask}", partial(packed, lengths, (8, 2), dim, causal=mask == "causal")
    yield "packed window", partial(packed, lengths, (8, 2), 128, causal=True, window_size=(200, 0))
    yield "packed dropout", partial(packed, (1000, 1048), (8, 2), 128, causal=True, dropout_p=0.1, dropout_seed=SEEDS)
    held = (1000, 1, 3000, 257, 40)
    for dim, queries in product((64, 128, 256), (1, 5)):
        yield f"cache dim {dim} queries {queries}", partial(cached, held, queries, (8, 2), dim, causal=True, append=True)
    yield "cache of many", partial(cached, held * 20, 1, (8, 2), 128, causal=True)
    yield "cache pages", partial(cached, held, 3, (8, 2), 128, causal=True, page=64, append=True)
    yield "cache padded window", partial(cached, held, 1, (8, 2), 128, padding=(17, 0, 1000, 256, 3), window_size=(300, 0))
    yield "cache softcap sinks", partial(cached, held, 1, (8, 2), 128, causal=True, softcap=10.0, sinks=True)


def orders() -> list[str]:
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from golden_files import actual_hashes

    return [f"{what} | {found}" for what, found in actual_hashes().items()]


CALLS: dict[str, tuple[str, Callable[[], Iterable[tuple[str, Call]]]]] = {"cpu": ("cpu", cpu_calls), "h200": ("cuda", h200_calls)}


def one_call(kind: str, number: int) -> str:
    """A line of the file."""
    device, calls = CALLS[kind]
    name, call = list(calls())[number]
    return f"{name} | {hash_of(call(device))}"


def use_source(folder: str) -> None:
    sys.path.insert(0, folder)


def lines_of(kind: str, source: str, jobs: int) -> list[str]:
    """Processes share the calls, because the first of a kind compiles its kernels."""
    use_source(source)
    if kind == "orders":
        return orders()
    count = len(list(CALLS[kind][1]()))
    with ProcessPoolExecutor(jobs, get_context("spawn"), use_source, (source,)) as pool:
        return list(pool.map(partial(one_call, kind), range(count)))


def differences(found: list[str], recorded: list[str]) -> list[str]:
    was, now = (dict(line.rsplit(" | ", 1) for line in lines) for lines in (recorded, found))
    names = [*was, *(name for name in now if name not in was)]
    return [f"{name}: {was.get(name, 'nothing')} became {now.get(name, 'nothing')}" for name in names if was.get(name) != now.get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("orders", *CALLS))
    parser.add_argument("--write", action="store_true", help="record instead of comparing")
    parser.add_argument("--source", default=str(ROOT / "src"), help="the src folder of another version")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--file", type=Path, help="instead of the one that is committed")
    arguments = parser.parse_args()
    file = arguments.file or FILES[arguments.kind]
    found = lines_of(arguments.kind, arguments.source, arguments.jobs)
    if arguments.write:
        where = torch.cuda.get_device_name() if arguments.kind == "h200" else platform.machine()
        head = [] if arguments.kind == "orders" else [f"# PyTorch {torch.__version__}, {where}"]
        file.write_text("\n".join([*head, *found]) + "\n")
        print(f"{len(found)} lines in {file}")
        return 0
    changed = differences(found, [line for line in file.read_text().splitlines() if not line.startswith("#")])
    print("\n".join([*changed, f"{len(changed)} of {len(found)} differ"]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
