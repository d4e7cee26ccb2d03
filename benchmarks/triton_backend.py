"""The Triton backend on this GPU: python benchmarks/triton_backend.py --check | --time | --sweep | --warm

--check: accuracy against fp64, repeats under load, invariances, hashes; small shapes first, and it stops at the first failure.
--time:  paper shapes beside PyTorch's deterministic flash backward and FlexAttention; writes JSON.
--sweep: every pass with other tiles, to choose src/dash_attn/backends/triton/tiles.json; writes JSON, and with --table the new table.
--warm:  compiles what the others (and tests/gpu/test_gpu_triton.py) need, in processes side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402
from triton_sweep import SWEEP, choose_tiles, jobs_of, limits_of, measure_tiles, place_of, table_with, to_compile  # noqa: E402
from triton_warm import compile_all, launches_to_warm  # noqa: E402

from dash_attn import Causal, Documents, Full, Mask, Prefix, TileMap, Window, explain, flash_attn_func, flash_attn_varlen_func  # noqa: E402
from dash_attn.backends.triton import tiles  # noqa: E402
from dash_attn.backends.triton.support import architecture_of  # noqa: E402

BACKEND = {"backend": "triton"}
DEVICE = torch.device("cuda", 0)
NAMES = ("out", "lse", "dq", "dk", "dv")
TARGETS = {"backward": {"PyTorch flash deterministic": 1.1, "FlexAttention": 1.0}, "forward": {"FlexAttention": 0.95}}


class Case(NamedTuple):
    """One accuracy case: lengths, heads and dims are those of queries and of keys (or values)."""

    mask: Mask
    lengths: tuple[int, int]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    softcap: float = 0.0
    batch: int = 2


def ragged(q_len: int, kv_len: int) -> TileMap:
    blocks = np.random.default_rng(0).random((-(-q_len // 37), -(-kv_len // 53))) < 0.4
    blocks[3], blocks[:, 5] = False, False
    return TileMap(blocks, 37, 53)


FP16, FP32 = torch.float16, torch.float32
CASES = (
    Case(Full(), (64, 64), dims=(64, 64)),
    Case(Causal(), (113, 203), dims=(64, 64)),
    Case(Causal(), (113, 203)),
    Case(Causal(), (512, 256)),
    Case(Full(), (239, 799), (6, 1)),
    Case(Window(200, 100), (1023, 1024), dims=(64, 64), dtype=FP16),
    Case(Window(200, -1), (700, 700)),
    Case(Window(-1, 100), (700, 900)),
    Case(Prefix(300), (1000, 1000)),
    Case(ragged(1000, 900), (1000, 900)),
    Case(Documents((300, 1, 555, 144)), (1000, 1000)),
    Case(Documents((300, 700), causal=False), (1000, 1000)),
    Case(Causal(), (512, 512), softcap=15.0),
    Case(Causal(), (384, 256), dims=(256, 256)),
    Case(Causal(), (500, 500), dims=(192, 128)),
    Case(Causal(), (300, 300), dims=(40, 59), dtype=FP16),
    Case(Full(), (300, 300), dims=(96, 96)),
    Case(Causal(), (300, 300), dims=(64, 64), dtype=FP32),
    Case(Causal(), (300, 300), dims=(128, 128), dtype=FP32),
    Case(Causal(), (2048, 2048), (16, 16), dtype=FP16),
    Case(Causal(), (4096, 4096), (8, 2)),
)


def make(case: Case, seed: int = 0) -> tuple[Tensor, ...]:
    source = torch.Generator(DEVICE).manual_seed(seed)
    rows = ((case.lengths[0], case.heads[0]), (case.lengths[1], case.heads[1]), (case.lengths[1], case.heads[1]))
    shapes = [*zip(rows, (case.dims[0], *case.dims), strict=True), (rows[0], case.dims[1])]
    q, *rest = (torch.randn(case.batch, *row, dim, generator=source, device=DEVICE).to(case.dtype) for row, dim in shapes)
    return (q * 6 if case.softcap else q), *rest


def run_case(case: Case, inputs: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    q, k, v, dout = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, mask=case.mask, softcap=case.softcap, return_lse=True, **BACKEND, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def check_accuracy(case: Case) -> str:
    """At most twice the error of plain PyTorch in the same dtype (tests/helpers/budget.py)."""
    from dense import largest_error, run_dense

    inputs = make(case)
    with DEVICE:
        truth, plain = (run_dense(inputs, case.mask, dtype, softcap=case.softcap) for dtype in (torch.float64, case.dtype))
    sizes = {name: max(1.0, x[x.isfinite()].abs().max().item()) for name, x in zip(NAMES, truth, strict=True)}
    gradients = max(sizes[name] for name in NAMES[2:])
    said = []
    for name, mine, theirs, exact in zip(NAMES, run_case(case, inputs), plain, truth, strict=True):
        budget = 1e-3 if name == "lse" else 2 * largest_error(theirs, exact) + 1e-4 * (gradients if name[0] == "d" else sizes[name])
        error = largest_error(mine, exact)
        assert error <= budget, f"{name} is off by {error:.3g}; the budget is {budget:.3g}"
        said.append(f"{name} {error / budget:.2f}")
    return "of the budget: " + ", ".join(said)


def same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    for name, a, b in zip((*NAMES, "dsinks"), actual, expected, strict=False):
        kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
        differ = a.contiguous().view(kind) != b.contiguous().view(kind)
        assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} elements of {name} differ"


@contextmanager
def busy() -> Iterator[Callable[[int], None]]:
    """Matrix products on a side stream: other timing in every run."""
    stream, a = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()

    def disturb(number: int) -> None:
        with torch.cuda.stream(stream):
            for _ in range(1 + number % 3):
                torch.mm(a, a)

    yield disturb
    torch.cuda.synchronize()


FAMILIES = {
    "causal": Case(Causal(), (2048, 2048), (8, 8)),
    "window": Case(Window(1024, 0), (2048, 2048), (8, 8), (64, 64)),
    "grouped": Case(Causal(), (2048, 2048), (16, 4)),
    "head dim 256": Case(Causal(), (2048, 2048), (8, 8), (256, 256)),
    "softcap": Case(Causal(), (2048, 2048), (8, 8), softcap=2.0),
    "documents": Case(Documents((1963, 37, 48)), (2048, 2048), (8, 8)),
    "tile map": Case(ragged(2048, 2048), (2048, 2048), (8, 8)),
    "float32": Case(Causal(), (1024, 1024), (8, 8), (64, 64), torch.float32),
}


def check_repeats(name: str, repeats: int) -> str:
    case = FAMILIES[name]
    inputs = make(case)
    expected = run_case(case, inputs)
    with busy() as disturb:
        for number in range(repeats):
            disturb(number)
            same(run_case(case, inputs), expected, f"run {number}")
    q, k, v, dout = inputs
    turned = run_case(case, (q.flip(-1), k.flip(-1), v, dout))
    assert not torch.equal(turned[1], expected[1]), "the control: another order of sums gives the same LSE"
    return f"{repeats} runs beside other work; the control differs"


def check_sinks() -> str:
    q, k, v, dout = make(FAMILIES["causal"])
    sinks = torch.randn(8, device=DEVICE)

    def attend() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        out, lse = flash_attn_func(*leaves[:3], causal=True, sinks=leaves[3], return_lse=True, **BACKEND)
        gradients = torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])
        return out.detach(), lse.detach(), *gradients

    first = attend()
    for number in range(20):
        same(attend(), first, f"run {number}")
    from dense import run_dense_with_sinks

    exact = run_dense_with_sinks((q[:, :512], k[:, :512], v[:, :512], dout[:, :512]), sinks, Causal(), torch.float64)
    ours = flash_attn_func(q[:, :512], k[:, :512], v[:, :512], causal=True, sinks=sinks, **BACKEND)
    error = (ours.double() - exact.out).abs().max().item()
    assert error < 0.05, f"out is off by {error}"
    return f"20 runs, gradients through the LSE, out off by {error:.2g}"


def check_boolean() -> str:
    """A matrix per sequence and query head: accuracy, and the bits of heads alone."""
    from dense import largest_error, run_dense

    case = Case(Full(), (1000, 1300), (4, 2))
    q, k, v, dout = inputs = make(case)
    source = torch.Generator(DEVICE).manual_seed(0)
    mask = torch.rand(2, 4, 1000, 1300, device=DEVICE, generator=source) < torch.rand(2, 4, 1, 1, device=DEVICE, generator=source)
    mask[..., 64:192, 128:512], mask[..., 300:420, 700:900] = True, False

    def attend(tensors: tuple[Tensor, ...], kept: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out, lse = flash_attn_func(*leaves, mask=kept, return_lse=True, **BACKEND)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, tensors[3])

    mine = attend(inputs, mask)
    truth, plain = (run_dense(inputs, mask, dtype) for dtype in (torch.float64, case.dtype))
    for name, ours, theirs, exact in zip(NAMES, mine, plain, truth, strict=True):
        off, budget = largest_error(ours, exact), 1e-3 if name == "lse" else 2 * largest_error(theirs, exact) + 1e-3
        assert off <= budget, f"{name} is off by {off:.3g}; the budget is {budget:.3g}"
    part = attend((q[1:, :, 2:], k[1:, :, 1:], v[1:, :, 1:], dout[1:, :, 2:]), mask[1:, 2:])
    out, lse, dq, dk, dv = mine
    same(part, (out[1:, :, 2:], lse[1:, 2:], dq[1:, :, 2:], dk[1:, :, 1:], dv[1:, :, 1:]), "a KV head of a sequence alone")
    for number in range(20):
        same(attend(inputs, mask), mine, f"run {number}")
    return "a matrix per sequence and query head; alone; 20 runs"


def check_batch() -> str:
    """A sequence's bits alone, at every place of a batch, and with other heads left out."""
    case = FAMILIES["grouped"]._replace(batch=4)
    inputs = make(case)
    whole = run_case(case, inputs)
    for place in range(4):
        one = run_case(case, tuple(x[place : place + 1] for x in inputs))
        same(one, tuple(x[place : place + 1] for x in whole), f"sequence {place} alone")
    order = [2, 0, 3, 1]
    same(run_case(case, tuple(x[order] for x in inputs)), tuple(x[order] for x in whole), "another order of the batch")
    q, k, v, dout = inputs
    part = run_case(case, (q[:, :, 4:12], k[:, :, 1:3], v[:, :, 1:3], dout[:, :, 4:12]), head_offset=1)
    out, lse, dq, dk, dv = whole
    same(part, (out[:, :, 4:12], lse[:, 4:12], dq[:, :, 4:12], dk[:, :, 1:3], dv[:, :, 1:3]), "some of the heads")
    padded = tuple(torch.nn.functional.pad(x, (0, 8))[..., :-8] for x in inputs)
    same(run_case(case, padded), whole, "other strides")
    shifted = tuple(torch.cat([x.flatten().new_zeros(3), x.flatten()])[3:].view(x.shape) for x in inputs)
    same(run_case(case, shifted), whole, "addresses that are not aligned")
    return "alone, moved, some heads, other strides and addresses"


def check_packed() -> str:
    """Every packed sequence has the bits it has alone; a neighbour full of NaN changes nothing."""
    lengths = (1061, 1, 2048, 0, 512, 77)
    total = sum(lengths)
    q, k, v, dout = (x[0] for x in make(Case(Causal(), (total, total), (8, 2), batch=1)))
    ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=DEVICE)

    def packed(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = flash_attn_varlen_func(*leaves, ends, ends, max(lengths), max(lengths), causal=True, return_lse=True, **BACKEND)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)

    together = packed(q, k, v)
    starts = ends.tolist()
    case = Case(Causal(), (1, 1))
    for a, b in pairwise(starts):
        if a < b:
            alone = run_case(case, tuple(x[None, a:b] for x in (q, k, v, dout)))
            of_packed = tuple(x[a:b][None] if i != 1 else x[:, a:b][None] for i, x in enumerate(together))
            same(alone, of_packed, f"tokens {a} to {b}")
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned:
        x[starts[2] : starts[3]] = torch.nan
    beside = packed(*poisoned)
    for i, x in enumerate(beside):
        rows = x if i != 1 else x.T
        kept = together[i] if i != 1 else together[i].T
        for part in (slice(0, starts[2]), slice(starts[3], None)):
            assert torch.equal(rows[part], kept[part]), f"NaN next door reaches {NAMES[i]}"
    return f"{len(lengths)} sequences alone and packed, NaN next door"


@triton.jit
def spin(x, turns):
    """Holds an SM for a while."""
    at = x + tl.program_id(0) * 1024 + tl.arange(0, 1024)
    value = tl.load(at)
    for _ in range(turns):
        value = value * 0.9999 + 0.0001
    tl.store(at, value)


def check_fewer_sms(repeats: int = 20) -> str:
    """While other programs hold threads of part of the SMs."""
    case = FAMILIES["causal"]
    inputs = make(case)
    expected = run_case(case, inputs)
    stream = torch.cuda.Stream()
    for sms in (16, 66, 120):
        x = torch.ones(sms * 1024, device=DEVICE)
        for number in range(repeats):
            with torch.cuda.stream(stream):
                spin[(sms,)](x, 20000, num_warps=32)
            same(run_case(case, inputs), expected, f"{sms} SMs busy, run {number}")
        torch.cuda.synchronize()
    return "16, 66 and 120 SMs shared with spinning programs"


def check_explain() -> str:
    q, k, v, _ = make(FAMILIES["causal"])
    first, second = (explain(flash_attn_func, q, k, v, causal=True, **BACKEND) for _ in range(2))
    assert first == second
    assert set(first.kernels) - {"forward", "row statistics"} in ({"gradients"}, {"key gradients", "query gradients"})
    return "\n" + str(first)


def check(arguments: argparse.Namespace) -> int:
    failed = 0
    jobs: list[tuple[str, Callable[[], str]]] = [(f"accuracy {case.mask} {case[1:]}", partial(check_accuracy, case)) for case in CASES]
    jobs += [("explain", check_explain), ("batch", check_batch), ("packed", check_packed), ("sinks and LSE", check_sinks)]
    jobs += [("boolean masks", check_boolean)]
    jobs += [("fewer SMs", check_fewer_sms)]
    jobs += [(f"repeats of {name}", partial(check_repeats, name, arguments.repeats)) for name in FAMILIES]
    for name, job in jobs:
        began = time.perf_counter()
        try:
            said = job()
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
            if isinstance(error, torch.AcceleratorError if hasattr(torch, "AcceleratorError") else RuntimeError) or failed > 8:
                break  # the context is lost, or everything is wrong
            continue
        print(f"ok ({time.perf_counter() - began:.1f} s) {name}: {said}", flush=True)
    print(json.dumps({"checked": len(jobs), "failed": failed}))
    return 1 if failed else 0


# Times


def timed(arguments: argparse.Namespace) -> int:
    from dash_attn.tools.bench.candidates import ours
    from dash_attn.tools.bench.environment import environment
    from dash_attn.tools.bench.flex import flex
    from dash_attn.tools.bench.measure import measure
    from dash_attn.tools.bench.pytorch_peers import pytorch_peers
    from dash_attn.tools.bench.suites import choose
    from dash_attn.tools.bench.timing import CudaStopwatch

    candidates = [*ours(schedules=False, backend="triton"), *(peer for peer in pytorch_peers() if peer.deterministic), flex()]
    shapes = choose("paper", arguments.seqlens, arguments.head_dims, arguments.masks)
    results: dict[str, Any] = {"environment": environment("triton"), "repeats": arguments.repeats, "rows": []}
    missed = 0
    for shape in shapes:
        rows = measure(shape, candidates, arguments.repeats, CudaStopwatch, DEVICE)
        results["rows"] += rows
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        for direction, targets in TARGETS.items():
            of_pass = {row["candidate"]: row for row in rows if row["pass"] == direction}
            mine = of_pass["dash-attn"]
            if "median_ms" not in mine:
                print(f"{shape} {direction}: {mine['status']}: {mine['reason']}", flush=True)
                missed += 1
                continue
            words = [f"{mine['median_ms']:.3f} ms, {mine['tflops']:.0f} TFLOP/s"]
            for peer, least in targets.items():
                row = of_pass.get(peer, {})
                if "median_ms" not in row:
                    missed += 1  # a peer without a figure shows nothing
                    words.append(f"{peer}: {row.get('reason', 'not there')}")
                    continue
                ratio = row["median_ms"] / mine["median_ms"]
                missed += ratio < least
                words.append(f"{ratio:.2f} x {peer}{'' if ratio >= least else f' (MISSED: {least})'}")
            print(f"{shape} {direction}: {', '.join(words)}", flush=True)
        torch.cuda.empty_cache()
    print(json.dumps({"shapes": len(shapes), "missed": missed, "file": str(arguments.output)}))
    return 1 if missed else 0


# Tiles


def sweep(arguments: argparse.Namespace) -> int:
    jobs = jobs_of(arguments.head_dims or tuple(SWEEP))
    launches = {job: to_compile(job) for job in jobs}
    kernels = {(launch.kernel, str(launch.constants), launch.tile): launch for of_job in launches.values() for launch in of_job}
    longest_first = sorted(kernels.values(), key=lambda launch: launch.kernel != "gradients")
    troubles = [trouble for trouble in compile_all(longest_first, arguments.processes) if trouble]
    rows, failures = measure_tiles(jobs, arguments.seqlens or (512, 2048, 16384), arguments.repeats, DEVICE)
    limits = limits_of(json.loads(arguments.limits.read_text(encoding="utf-8"))["rows"], TARGETS) if arguments.limits else {}
    architecture, chosen = architecture_of(DEVICE), choose_tiles(jobs, rows, limits)
    found = {"environment": {"gpu": torch.cuda.get_device_name(DEVICE), "triton": triton.__version__}, "architecture": architecture}
    found |= {"rows": rows, "failures": failures, "chosen": [job._asdict() for job in chosen]}
    arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for why in (*troubles, *failures.values()):
        print(f"cannot: {why}")
    for job in chosen:
        missed = [place for row in rows if row["ms"].get(job.key, 0.0) > limits.get(place := place_of(row), float("inf"))]
        print(f"chosen: {architecture} head dim {job.dim} {job.name}: {job.key}; {len(missed)} missed of {len(limits)}: {missed}")
    if arguments.table is not None:
        arguments.table.write_text(table_with(architecture, chosen), encoding="utf-8")
    return 0


def warm(arguments: argparse.Namespace) -> int:
    """Compiles side by side what tests, checks, times and sweeps will ask for one by one."""
    launches = launches_to_warm(architecture_of(DEVICE))
    began = time.perf_counter()
    failed = [trouble for trouble in compile_all(launches, arguments.processes) if trouble]
    print(f"{len(launches)} kernels compiled in {time.perf_counter() - began:.0f} s, {len(failed)} cannot: {failed[:5]}")
    return 0


def read_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    for name in ("check", "time", "sweep", "warm"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--repeats", type=int, help="of each run (default: 50 to check, 20 to time, 7 to sweep)")
    parser.add_argument("--seqlens", type=read_numbers, metavar="N,N")
    parser.add_argument("--head-dims", type=read_numbers, metavar="N,N")
    parser.add_argument("--masks", type=lambda text: tuple(text.split(",")), metavar="NAME,NAME")
    parser.add_argument("--processes", type=int, default=12, help="that compile at once")
    parser.add_argument("--table", type=Path, metavar="FILE", help="--sweep writes tiles.json with the best tiles there")
    parser.add_argument("--limits", type=Path, metavar="FILE", help="--sweep prefers tiles that reach the targets beside the peers in FILE")
    parser.add_argument("--tiles", type=Path, metavar="FILE", help="take tiles from there, not from the package")
    parser.add_argument("--output", type=Path, default=Path("triton-backend.json"), metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; PyTorch finds none")
    if arguments.repeats is None:
        arguments.repeats = 50 if arguments.check else 20 if arguments.time else 7
    if arguments.tiles is not None:
        tiles.TABLE = arguments.tiles
    return next(run for name, run in RUNS.items() if getattr(arguments, name))(arguments)


RUNS = {"check": check, "time": timed, "sweep": sweep, "warm": warm}


if __name__ == "__main__":
    sys.exit(main())
