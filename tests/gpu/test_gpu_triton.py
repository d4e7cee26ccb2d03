"""The Triton backend on a GPU, asked for by name: FlashAttention's grid, repeats under load, and what must not reach the bits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from budget import assert_case, assert_in_budget
from dash_attn import Causal, Documents, Full, Mask, Prefix, Window, explain, flash_attn_func, flash_attn_varlen_func
from dash_attn.backends.triton import passes
from dash_attn.backends.triton.launch import Launch
from dash_attn.backends.triton.mask_tables import MOST_TABLES
from dash_attn.backends.triton.tiles import Tile, Tiles
from dense import Results, assert_same_bits, run_dense_with_sinks, run_ours, run_ours_with_sinks, same_bits
from devices import Case, disturbed
from families import NAMES, assert_same, family
from gpu_helpers import REPEATS, assert_accurate, gpu_inputs, poisoned_memory, ragged_map
from graphs import capture
from grid import dim_cases, length_cases, softcap_cases
from packed_batches import places

triton, tl = (pytest.importorskip(name) for name in ("triton", "triton.language"))

pytestmark = pytest.mark.gpu

TRITON = {"backend": "triton"}
MASKS = [Full(), Causal(), Window(200, 50), Window(100, -1), Prefix(333), Documents((300, 400)), ragged_map(700, 700)]


@pytest.mark.parametrize("case", [*length_cases(), *dim_cases(), *softcap_cases()], ids=str)
def test_the_grid(case: Case) -> None:
    assert_case("cuda", case, **TRITON)


ACCURATE = [*MASKS[:5], Window(-1, 100), Documents((300, 1, 555, 144)), Documents((300, 700), causal=False), ragged_map(1000, 1000)]


@pytest.mark.parametrize("mask", ACCURATE, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_masks(dim: int, mask: Mask) -> None:
    assert_accurate(gpu_inputs(1000, 1000, dim=dim, batch=2), mask, **TRITON)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_float32(dim: int) -> None:
    assert_accurate(gpu_inputs(300, 300, dim=dim, dtype=torch.float32), Causal(), **TRITON)


@pytest.mark.parametrize("mask", [Causal(), Window(100, 20)], ids=str)
def test_sinks(mask: Mask) -> None:
    inputs, sinks = gpu_inputs(500, 300, (4, 2), 64, batch=2), torch.randn(4, device="cuda")
    ours = run_ours_with_sinks(inputs, sinks, mask=mask, **TRITON)
    plain, truth = (run_dense_with_sinks(inputs, sinks, mask, dtype) for dtype in (torch.bfloat16, torch.float64))
    assert_in_budget(ours, plain, truth)


@pytest.mark.parametrize("name", NAMES)
def test_repeats_under_load(name: str) -> None:
    chosen = family(name, "cuda")
    inputs = chosen.inputs("cuda")
    expected = chosen.run(inputs, **TRITON)
    with poisoned_memory():
        assert_same(chosen.run(inputs, **TRITON), expected, "memory full of NaN")
    for run in range(REPEATS):
        with disturbed("cuda", run):
            assert_same(chosen.run(inputs, **TRITON), expected, f"run {run}")
    q, k, *rest = inputs
    turned = chosen.run((q.flip(-1), k.flip(-1), *rest), **TRITON)
    assert not same_bits(turned["lse"], expected["lse"]), "the control: another order of sums gives the same bits"


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_batch_and_position(dim: int, mask: Mask) -> None:
    together = gpu_inputs(700, 700, (4, 2), dim, batch=5)
    expected = run_ours(together, mask, **TRITON)
    for position in range(5):
        alone = run_ours(tuple(x[position : position + 1] for x in together), mask, **TRITON)
        assert_same_bits(alone, Results(*(r[position : position + 1] for r in expected)), f"sequence {position}")
    moved = [4, 1, 3, 0]
    assert_same_bits(run_ours(tuple(x[moved] for x in together), mask, **TRITON), Results(*(r[moved] for r in expected)), "moved")


@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_have_the_bits_they_have_alone(causal: bool, heads: tuple[int, int]) -> None:
    lengths = (2300, 1, 0, 800, 300, 64)
    q, k, v, dout = (x[0] for x in gpu_inputs(sum(lengths), sum(lengths), heads))
    ends = places(list(lengths), q.device)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(*leaves, ends, ends, 2300, 2300, causal=causal, return_lse=True, **TRITON)
    gradients = torch.autograd.grad(out, leaves, dout)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        if length:
            alone = run_ours(tuple(x[None, rows] for x in (q, k, v, dout)), Causal() if causal else Full(), **TRITON)
            packed = Results(out[None, rows].detach(), lse[None, :, rows].detach(), *(g[None, rows] for g in gradients))
            assert_same_bits(alone, packed, f"sequence at {start}")
        start += length


def test_a_neighbour_full_of_nan_changes_nothing() -> None:
    lengths = (1061, 1, 2048, 0, 512, 77)
    q, k, v, dout = (x[0] for x in gpu_inputs(sum(lengths), sum(lengths), (8, 2)))
    ends = places(list(lengths), q.device)

    def packed(*tensors: Tensor) -> list[Tensor]:
        """All laid out by tokens."""
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = flash_attn_varlen_func(*leaves, ends, ends, 2048, 2048, causal=True, return_lse=True, **TRITON)
        return [out.detach(), lse.detach().T, *torch.autograd.grad(out, leaves, dout)]

    expected, poisoned = packed(q, k, v), [x.clone() for x in (q, k, v)]
    for x in poisoned:
        x[1062:3110] = torch.nan
    for found, before in zip(packed(*poisoned), expected, strict=True):
        assert found[1062:3110].isnan().any(), "the control: it is there"
        for part in (slice(0, 1062), slice(3110, None)):
            assert same_bits(found[part].contiguous(), before[part].contiguous())


@triton.jit
def spin(x, turns):  # type: ignore[no-untyped-def]
    """Holds an SM for a while."""
    at = x + tl.program_id(0) * 1024 + tl.arange(0, 1024)
    value = tl.load(at)
    for _ in range(turns):
        value = value * 0.9999 + 0.0001
    tl.store(at, value)


@pytest.mark.parametrize("sms", [16, 66, 120])
def test_sms_whose_threads_other_programs_hold(sms: int) -> None:
    inputs, stream = gpu_inputs(2048, 2048, (8, 8), batch=2), torch.cuda.Stream()
    expected, x = run_ours(inputs, Causal(), **TRITON), torch.ones(sms * 1024, device="cuda")
    torch.cuda.synchronize()
    for run in range(20):
        with torch.cuda.stream(stream):
            spin[(sms,)](x, 20000, num_warps=32)
        assert_same_bits(run_ours(inputs, Causal(), **TRITON), expected, f"run {run}")
    torch.cuda.synchronize()


@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
def test_some_of_the_heads(mask: Mask) -> None:
    q, k, v, dout = whole = gpu_inputs(900, 900, (12, 4))
    expected = run_ours(whole, mask, **TRITON)
    for first, end in ((0, 1), (1, 4), (2, 3)):
        queries, keys = slice(3 * first, 3 * end), slice(first, end)
        part = (q[:, :, queries], k[:, :, keys], v[:, :, keys], dout[:, :, queries])
        found = run_ours(part, mask, head_offset=first, **TRITON)
        assert_same_bits(found, expected.of_heads(queries, keys), f"heads {first} to {end}")


@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_one_launch_has_the_bits_of_two(dim: int, mask: Mask) -> None:
    inputs, tile = gpu_inputs(700, 900, (4, 2), dim, batch=2), Tile(64, 64, 4, 2, 2)
    apart, together = (Tiles("a test", tile, tile, tile, one) for one in (False, True))
    found = []
    for tiles in (apart, together):
        seen = patch.object(Launch, "run", autospec=True, side_effect=Launch.run)
        with patch.object(passes, "tiles_for", return_value=tiles), seen as run:
            found.append(run_ours(inputs, mask, **TRITON))
        assert [call.args[0].kernel for call in run.call_args_list[2:]] == (
            ["gradients"] if tiles.together else ["key_gradients", "query_gradients"]
        )
    assert_same_bits(*found)


def test_strides_and_addresses() -> None:
    inputs = gpu_inputs(700, 700, (4, 2), 64, batch=2)
    expected = run_ours(inputs, Causal(), **TRITON)

    def unaligned(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    for change in (unaligned, heads_first, lambda x: torch.nn.functional.pad(x, (0, 5))[..., :-5]):
        assert_same_bits(run_ours(tuple(map(change, inputs)), Causal(), **TRITON), expected)


def test_explain_hashes_what_runs() -> None:
    q, k, v, _ = gpu_inputs(700, 700)
    first, second = (explain(flash_attn_func, q, k, v, causal=True, **TRITON) for _ in range(2))
    assert first == second
    assert set(first.kernels) - {"forward", "row statistics"} in ({"gradients"}, {"key gradients", "query gradients"})
    capped = explain(flash_attn_func, q, k, v, causal=True, softcap=3.0, **TRITON)
    assert capped.kernels["forward"] != first.kernels["forward"], "the control: another kernel has another hash"


def test_a_graph_replays_the_same_bits() -> None:
    inputs = gpu_inputs(700, 700, (4, 2), 64)
    q, k, v, _ = inputs
    expected = flash_attn_func(q, k, v, causal=True, **TRITON)
    graph, out = capture(lambda: flash_attn_func(q, k, v, causal=True, **TRITON), warm_ups=0)
    out.zero_()
    graph.replay()
    assert same_bits(out, expected)


@pytest.mark.parametrize("mask", [Documents((300, 400)), Prefix(250)], ids=str)
def test_a_graph_keeps_its_tables(mask: Mask) -> None:
    """Other masks and lengths come and go, and what they leave is written over."""
    q, k, v, _ = gpu_inputs(700, 700, (4, 2), 64)
    expected = flash_attn_func(q, k, v, mask=mask, **TRITON)
    graph, out = capture(lambda: flash_attn_func(q, k, v, mask=mask, **TRITON), warm_ups=0)
    for length in range(1, 2 + MOST_TABLES):
        flash_attn_func(q, k, v, mask=Documents((length, 700 - length)) if isinstance(mask, Documents) else Prefix(length), **TRITON)
    torch.cuda.synchronize()
    rubbish = [torch.full((size,), 2**31 - 1, dtype=torch.int32, device="cuda") for size in (4, 128, 1500) for _ in range(500)]
    out.zero_()
    graph.replay()
    assert same_bits(out, expected), len(rubbish)


@pytest.mark.parametrize("causal", [True, False])
def test_wrong_offsets_stop_the_process(causal: bool) -> None:
    from gpu_helpers import run_script

    script = """
import sys, torch
from dash_attn import flash_attn_varlen_func
q = torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16)
ends = torch.tensor([0, 60, 40, 100], dtype=torch.int32, device="cuda")
flash_attn_varlen_func(q, q, q, ends, ends, 100, 100, causal=sys.argv[1] == "True", backend="triton")
torch.cuda.synchronize()
"""
    done = run_script(script, str(causal))
    assert done.returncode != 0
    assert "cu_seqlens must not decrease" in done.stderr + done.stdout


def test_compiled_programs_have_the_bits_of_eager_ones() -> None:
    q, k, v, _ = gpu_inputs(700, 700, (4, 2), 64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, **TRITON)

    assert same_bits(torch.compile(attend, fullgraph=True)(q, k, v), attend(q, k, v))
