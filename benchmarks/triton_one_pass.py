"""An experiment: the Triton backward in one pass, with hand-overs of dQ in the order of a plan, beside the two passes that are kept.

python benchmarks/triton_one_pass.py [--output FILE]

A program draws a ticket, which is a chain of the plan; so whatever a chain waits for has started before it, and a schedule without a
gang cannot hang. Rank 0 of a dQ tile stores, rank r adds after rank r - 1 was released. A tile is released one step late, when its
adds have landed. Dense calls with equal heads and a band for a mask: enough to compare times.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402
from triton_sweep import milliseconds  # noqa: E402

from dash_attn import Causal, Full, Mask, Problem  # noqa: E402
from dash_attn.backends.triton import setup, tiles  # noqa: E402
from dash_attn.backends.triton.kernels.tiles import capped, load_columns, load_numbers, load_rows, start_of, store_rows  # noqa: E402
from dash_attn.backends.triton.kernels.visits import row_bounds  # noqa: E402
from dash_attn.backends.triton.launch import Launch  # noqa: E402
from dash_attn.backends.triton.tiles import Tile  # noqa: E402
from dash_attn.call.call import Call  # noqa: E402
from dash_attn.call.options import AttentionOptions  # noqa: E402
from dash_attn.call.planning import plan_for  # noqa: E402
from dash_attn.scheduling.plan import Plan  # noqa: E402

FIELDS = 7  # of a chain: sequence, head, KV tile, first step, and where its full steps begin and end, end
SCHEDULES = ("alternating", "descending")
BAND = tl.constexpr(0)
NUMBERS = (
    *("q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head", "do_batch", "do_row", "do_head"),
    *("heads", "q_tiles", "q_len", "kv_len", "row_units", "left", "right"),
)


# fmt: off
@triton.jit(do_not_specialize=NUMBERS)
def one_pass(
    q, k, v, dout, minus_lse, delta, dq, dk, dv, counter, semaphores, chains, steps,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head,
    heads, q_tiles, q_len, kv_len, row_units, left, right, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    PARTIAL_STAGES: tl.constexpr, ORDERED: tl.constexpr, IN_ASM: tl.constexpr,
):
    chain = chains + tl.atomic_add(counter, 1) * 7
    sequence = tl.load(chain)
    head = tl.load(chain + 1)
    start = tl.load(chain + 2) * BLOCK_KV
    begin, full_begin, full_end, end = tl.load(chain + 3), tl.load(chain + 4), tl.load(chain + 5), tl.load(chain + 6)
    q_at = start_of(q, sequence, sequence * 0, head, q_batch, q_row, q_head)
    do_at = start_of(dout, sequence, sequence * 0, head, do_batch, do_row, do_head)
    k_at = start_of(k, sequence, sequence * 0, head, k_batch, k_row, k_head)
    v_at = start_of(v, sequence, sequence * 0, head, v_batch, v_row, v_head)
    of_head = sequence * heads + head
    of_rows = of_head.to(tl.int64) * (row_units * 8)
    dq_at = dq + of_head.to(tl.int64) * q_len * HEAD_DIM
    semaphore = semaphores + of_head * q_tiles
    keys = load_rows(k_at, start, k_row, kv_len, HEAD_DIM, BLOCK_KV, BLOCK_DIM, True)
    values = load_rows(v_at, start, v_row, kv_len, HEAD_DIM, BLOCK_KV, BLOCK_DIM, True)
    column = start + tl.arange(0, BLOCK_KV)
    dk_sum = tl.zeros([BLOCK_KV, BLOCK_DIM], tl.float32)
    dv_sum = tl.zeros([BLOCK_KV, BLOCK_DIM], tl.float32)
    landing = begin * 0 - 1  # the dQ tile whose adds are on the way
    landed = begin * 0
    for i in tl.range(begin, full_begin, num_stages=PARTIAL_STAGES):
        dk_sum, dv_sum, landing, landed = step(
            i, steps, dk_sum, dv_sum, keys, values, column, q_at, do_at, minus_lse + of_rows, delta + of_rows, dq_at, semaphore, landing,
            landed, q_row, do_row, q_len, kv_len, left, right, scale_log2, HEAD_DIM, BLOCK_DIM, BLOCK_Q, ORDERED, IN_ASM, True,
        )
    for i in tl.range(full_begin, full_end):
        dk_sum, dv_sum, landing, landed = step(
            i, steps, dk_sum, dv_sum, keys, values, column, q_at, do_at, minus_lse + of_rows, delta + of_rows, dq_at, semaphore, landing,
            landed, q_row, do_row, q_len, kv_len, left, right, scale_log2, HEAD_DIM, BLOCK_DIM, BLOCK_Q, ORDERED, IN_ASM, False,
        )
    for i in tl.range(full_end, end, num_stages=PARTIAL_STAGES):
        dk_sum, dv_sum, landing, landed = step(
            i, steps, dk_sum, dv_sum, keys, values, column, q_at, do_at, minus_lse + of_rows, delta + of_rows, dq_at, semaphore, landing,
            landed, q_row, do_row, q_len, kv_len, left, right, scale_log2, HEAD_DIM, BLOCK_DIM, BLOCK_Q, ORDERED, IN_ASM, True,
        )
    if ORDERED:
        release(semaphore, landing, landed, IN_ASM)
    stride = heads * (HEAD_DIM // 8)
    dk_at = start_of(dk, sequence, sequence * 0, head, kv_len.to(tl.int64) * stride, stride, HEAD_DIM // 8)
    dv_at = start_of(dv, sequence, sequence * 0, head, kv_len.to(tl.int64) * stride, stride, HEAD_DIM // 8)
    store_rows(dk_at, start, stride, kv_len, dk_sum * scale, HEAD_DIM, BLOCK_KV, BLOCK_DIM)
    store_rows(dv_at, start, stride, kv_len, dv_sum, HEAD_DIM, BLOCK_KV, BLOCK_DIM)


@triton.jit
def step(
    i, steps, dk_sum, dv_sum, keys, values, column, q_at, do_at, minus_lse, delta, dq_at, semaphore, landing, landed,
    q_row, do_row, q_len, kv_len, left, right, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
    ORDERED: tl.constexpr, IN_ASM: tl.constexpr, PARTIAL: tl.constexpr,
):
    tile = tl.load(steps + 2 * i)
    rank = tl.load(steps + 2 * i + 1)
    start = tile * BLOCK_Q
    row = start + tl.arange(0, BLOCK_Q)
    queries = load_columns(q_at, start, q_row, q_len, HEAD_DIM, BLOCK_Q, BLOCK_DIM, PARTIAL)
    of_rows = load_numbers(minus_lse, start, q_len, float("-inf"), BLOCK_Q, PARTIAL)
    scores = capped(tl.dot(keys, queries, input_precision="ieee"), 0.0, False)
    weights = tl.exp2(tl.fma(scores, scale_log2, of_rows[None, :]))
    if PARTIAL:
        first, end = row_bounds(row, None, q_len, kv_len, left, right, BAND)
        weights = tl.where((column[:, None] >= first[None, :]) & (column[:, None] < end[None, :]), weights, 0.0)
    douts = load_rows(do_at, start, do_row, q_len, HEAD_DIM, BLOCK_Q, BLOCK_DIM, PARTIAL)
    dv_sum = tl.dot(weights.to(douts.dtype), douts, dv_sum, input_precision="ieee")
    deltas = load_numbers(delta, start, q_len, 0.0, BLOCK_Q, PARTIAL)
    dweights = tl.dot(values, tl.trans(douts), input_precision="ieee")
    dscores = (weights * (dweights - deltas[None, :])).to(queries.dtype)
    dk_sum = tl.dot(dscores, tl.trans(queries), dk_sum, input_precision="ieee")
    dq_part = tl.dot(tl.trans(dscores), keys, input_precision="ieee")
    place = dq_at + row[:, None].to(tl.int64) * HEAD_DIM + tl.arange(0, BLOCK_DIM)[None, :]
    inside = (row[:, None] < q_len) & (tl.arange(0, BLOCK_DIM)[None, :] < HEAD_DIM)
    first = rank == 0
    if ORDERED:
        release(semaphore, landing, landed, IN_ASM)
        turn = wait(semaphore + tile, rank, IN_ASM)
        place += turn - rank  # 0, but known only when the turn has come
        tl.store(place, dq_part, mask=inside & first)
        inside &= rank != 0
    tl.atomic_add(place, dq_part, mask=inside, sem="relaxed")
    return dk_sum, dv_sum, tile, rank + 1


@triton.jit
def wait(semaphore, rank, IN_ASM: tl.constexpr):
    """Until a tile has as many ranks. In assembly, because Triton prefetches nothing in a loop that has another loop or a barrier."""
    if IN_ASM:
        turn = tl.inline_asm_elementwise(
            """
            {
            .reg .pred waits;
            .reg .u32 found;
            poll:
            ld.acquire.gpu.global.u32 found, [$1];
            setp.ne.u32 waits, found, $2;
            @waits bra poll;
            mov.u32 $0, found;
            }
            """,
            "=r,l,r", [semaphore.to(tl.int64), rank], dtype=tl.int32, is_pure=False, pack=1,
        )
    else:
        turn = tl.atomic_add(semaphore, 0, sem="acquire")
        while turn != rank:
            turn = tl.atomic_add(semaphore, 0, sem="acquire")
    return turn


@triton.jit
def release(semaphore, tile, value, IN_ASM: tl.constexpr):
    """Let the next rank of a tile add; -1: there is none. The adds of all threads come before the release of one."""
    if IN_ASM:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred first, there;
            .reg .u32 thread;
            bar.sync 0;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            setp.ge.and.s32 there, $2, 0, first;
            @there st.release.gpu.global.u32 [$1], $3;
            mov.u32 $0, $3;
            }
            """,
            "=r,l,r,r", [(semaphore + tile).to(tl.int64), tile, value], dtype=tl.int32, is_pure=False, pack=1,
        )
    elif tile >= 0:
        tl.atomic_xchg(semaphore + tile, value, sem="release")


@triton.jit
def finish(dq, out, scale, length, heads, count, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """dQ from (batch, heads, length, dim) in float32 to (batch, length, heads, dim) in 16 bits."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column, row = i % DIM, i // DIM
    head, token = row % heads, row // heads
    place = ((token // length * heads + head) * length + token % length) * DIM + column
    tl.store(out + i, (tl.load(dq + place, mask=i < count) * scale).to(out.dtype.element_ty), mask=i < count)
# fmt: on


def tables_of(plan: Plan) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Chains by ticket, and the steps of each walk, (Q tile, rank). A walk has its partial tiles at its ends."""
    problem = plan.problem
    bounds, steps, count = {}, [], 0
    for kind in range(plan.kinds):
        for kv_tile in range(problem.kv_tiles):
            walk = plan.steps(kind, kv_tile)
            full = np.flatnonzero(walk[:, 2] == 0)
            first, last = (int(full[0]), int(full[-1]) + 1) if len(full) else (len(walk), len(walk))
            if len(full) != last - first:
                raise ValueError(f"the walk of KV tile {kv_tile} has partial tiles between full ones")
            bounds[kind, kv_tile] = (count, count + first, count + last, count + len(walk))
            steps.append(walk[:, :2])
            count += len(walk)
    tickets = plan.placement.tickets(problem).tolist()
    chains = [(sequence, head, tile, *bounds[plan.kind_of(head), tile]) for sequence, head, tile in tickets]
    return np.array(chains, dtype=np.int32), np.concatenate(steps).astype(np.int32)


class OnePass:
    """A backward of tensors (q, k, v, dO) and what the row statistics gave, prepared."""

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        rows: setup.RowValues,
        mask: Mask,
        tile: Tile,
        schedule: str,
        ordered: bool = True,
        in_asm: bool = True,
    ) -> None:
        q, k, v, dout = tensors
        batch, length, heads, dim = q.shape
        problem = Problem(mask, length, k.shape[1], tile.q_rows, tile.kv_rows, heads, 1, batch)
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 132
        plan = plan_for(problem, schedule, sms)
        if plan.gang > 1:
            raise ValueError(f"{schedule} has a gang of {plan.gang} on this mask")
        self.chains, self.steps = (torch.from_numpy(table).to(q.device) for table in tables_of(plan))
        self.counters = torch.zeros(4 + batch * heads * problem.q_tiles, dtype=torch.int32, device=q.device)
        self.dq_sum = torch.empty(batch, heads, length, dim, dtype=torch.float32, device=q.device)
        self.dq, self.dk, self.dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self.scale, self.tile, self.ordered, self.shape = dim**-0.5, tile, ordered, (batch, length, heads, dim)
        call = setup.Passes(Call(q, k, v, AttentionOptions(mask, self.scale)))
        self.numbers = {
            **{
                "q": q,
                "k": k,
                "v": v,
                "dout": dout,
                "minus_lse": rows.minus_lse,
                "delta": rows.delta,
                "row_units": rows.units,
                "dq": self.dq_sum,
                "dk": self.dk,
                "dv": self.dv,
            },
            **{"counter": self.counters[:1], "semaphores": self.counters[4:], "chains": self.chains, "steps": self.steps},
            **setup.strides("q", q),
            **setup.strides("k", k),
            **setup.strides("v", v),
            **setup.strides("do", dout),
            **{"heads": heads, "q_tiles": problem.q_tiles, "q_len": length, "kv_len": k.shape[1], "scale": self.scale},
            "scale_log2": call.scales()["scale_log2"],
            "left": call.masked(tile).left,
            "right": call.masked(tile).right,
        }
        self.constants = {
            **{"HEAD_DIM": dim, "BLOCK_DIM": setup.block_of(dim), "BLOCK_Q": tile.q_rows, "BLOCK_KV": tile.kv_rows},
            **{"PARTIAL_STAGES": tile.partial_stages, "ORDERED": ordered, "IN_ASM": in_asm},
        }

    def run(self) -> None:
        self.counters.zero_()
        if not self.ordered:
            self.dq_sum.zero_()
        options = {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "enable_fp_fusion": False}
        one_pass[(len(self.chains),)](**self.numbers, **self.constants, **options)
        _, length, heads, dim = self.shape
        count = self.dq.numel()
        finish[(-(-count // 4096),)](self.dq_sum, self.dq, self.scale, length, heads, count, DIM=dim, BLOCK=4096)


RUNS = 10  # timed, of each
TILES = {
    64: (Tile(64, 128, 8, 3, 2), Tile(64, 128, 8, 3), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2), Tile(128, 128, 8, 2)),
    128: (Tile(64, 128, 8, 2, 2), Tile(64, 128, 8, 2), Tile(64, 128, 8, 1), Tile(64, 64, 4, 2), Tile(32, 128, 8, 2)),
}


def compare(dim: int, length: int, mask: Mask) -> dict[str, Any]:
    """Times of one shape; the two passes include what they launch after the row statistics."""
    shape = (16384 // length, length, 2048 // dim, dim)
    q, k, v, dout = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
    call = setup.Passes(Call(q, k, v, AttentionOptions(mask, dim**-0.5)))
    out, lse = torch.empty_like(q), torch.empty(call.lse_shape, device="cuda")
    setup.forward_launch(call, out, lse, None).run()
    rows = setup.RowValues.empty(call)
    setup.statistics_launch(call, out, dout, lse, None, rows).run()
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    passes: tuple[Launch, ...] = setup.gradient_launches(call, dout, rows, (dq, dk, dv))
    found: dict[str, Any] = {"dim": dim, "length": length, "mask": str(mask)}
    found["two passes"] = milliseconds(passes, RUNS)
    for tile in TILES[dim]:
        for schedule, ordered in (*((name, True) for name in SCHEDULES), (SCHEDULES[0], False)):
            name = f"{schedule if ordered else 'unordered'}, {tile}"
            try:
                one = OnePass((q, k, v, dout), rows, mask, tile, schedule, ordered)
                found[name] = milliseconds((one,), RUNS)
                first = one.dq.clone()
                off = max((a.float() - b.float()).norm() / b.float().norm() for a, b in ((one.dq, dq), (one.dk, dk), (one.dv, dv))).item()
                assert off < 0.02, f"off by {off:.3g}"
                for _ in range(20 if ordered else 0):
                    one.run()
                    assert torch.equal(one.dq, first), "the ordered runs differ"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return found


def in_words(row: dict[str, Any]) -> str:
    """The best of one pass beside the two passes."""
    times = {name: ms for name, ms in row.items() if isinstance(ms, float) and name != "two passes"}
    ordered, control = ({name: ms for name, ms in times.items() if name.startswith("unordered") == free} for free in (False, True))
    said = [f"{row['dim']} {row['mask']} {row['length']}: two passes {row['two passes']:.3f} ms"]
    for found in (ordered, control):
        if found:
            best = min(found, key=lambda name: found[name])
            said.append(f"{best} {found[best]:.3f} ms ({row['two passes'] / found[best]:.2f} x)")
    failed = [f"{name}: {why}" for name, why in row.items() if isinstance(why, str) and name != "mask"]
    return "; ".join([*said, *failed[:1], f"{len(failed)} failed"])


def compile_one(job: tuple[int, Tile, bool]) -> None:
    """In a process of its own, into the cache on disk. What cannot run is told when it is timed."""
    dim, tile, ordered = job
    q, k, v, dout = (torch.randn((2, 512, 2, dim), device="cuda").bfloat16() for _ in range(4))
    rows = setup.RowValues.empty(setup.Passes(Call(q, k, v, AttentionOptions(Causal(), dim**-0.5))))
    with suppress(Exception):
        OnePass((q, k, v, dout), rows, Causal(), tile, SCHEDULES[1], ordered).run()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("triton-one-pass.json"))
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=(1024, 4096, 16384))
    parser.add_argument("--processes", type=int, default=12, help="that compile at once")
    parser.add_argument("--tiles", type=Path, metavar="FILE", help="of the two passes: take them from there, not from the package")
    arguments = parser.parse_args()
    if arguments.tiles is not None:
        tiles.TABLE = arguments.tiles
    jobs = [(dim, tile, ordered) for dim, of_dim in TILES.items() for tile in of_dim for ordered in (True, False)]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    rows = []
    for dim in (128, 64):
        for mask in (Causal(), Full()):
            for length in arguments.lengths:
                rows.append(compare(dim, length, mask))
                print(in_words(rows[-1]), flush=True)
                arguments.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
