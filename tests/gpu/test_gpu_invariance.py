"""What must not reach the bits on a GPU: the rest of the batch, sharding over heads, the number of SMs, the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dash_attn import Causal, Documents, Full, Mask, Window
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions
from dense import Results, assert_same_bits, digest, run_ours, same_bits
from gpu_helpers import assert_batch_changes_no_bit, gpu_inputs, hopper, patched_backend, run_script

pytestmark = pytest.mark.gpu

BOTH = [Full(), Causal()]


@pytest.mark.parametrize("mask", [Full(), Causal(), Documents((300, 400)), Window(200, 50)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_batch_and_position(dim: int, mask: Mask) -> None:
    assert_batch_changes_no_bit(gpu_inputs(700, 700, (4, 2), dim, batch=5), mask)


@pytest.mark.parametrize("mask", BOTH, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_many_short_sequences(dim: int, mask: Mask) -> None:
    """So many heads that the forward takes them in several groups, and a larger one at the end."""
    together = gpu_inputs(500, 500, (16, 8), dim, batch=40)
    expected = run_ours(together, mask)
    for position in (0, 17, 39):
        alone = run_ours(tuple(x[position : position + 1] for x in together), mask)
        assert_same_bits(alone, Results(*(r[position : position + 1] for r in expected)), f"sequence {position}")


@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_documents_have_the_bits_they_have_alone(causal: bool, heads: tuple[int, int]) -> None:
    """Those of (7, 1) have from one part to seven."""
    lengths = (2300, 1, 800, 300, 64)
    together = gpu_inputs(sum(lengths), sum(lengths), heads, batch=2)
    expected = run_ours(together, Documents(lengths, causal))
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = run_ours(tuple(x[:, rows] for x in together), Causal() if causal else Full())
        out, lse, *gradients = expected
        assert_same_bits(alone, Results(out[:, rows], lse[:, :, rows], *(g[:, rows] for g in gradients)), f"document at {start}")
        start += length


@pytest.mark.parametrize("mask", BOTH, ids=str)
@pytest.mark.parametrize(("group", "length"), [(1, 2300), (2, 2300), (12, 2300), (8, 2100), (7, 2100), (3, 2100), (71, 300), (12, 900)])
def test_tensor_parallel_rank(group: int, length: int, mask: Mask) -> None:
    """Four KV heads whole, and in shards of one, two and three."""
    whole = gpu_inputs(length, length, (4 * group, 4))
    q, k, v, dout = whole
    expected = run_ours(whole, mask)
    for first, end in ((0, 1), (1, 4), (0, 2), (2, 4), (3, 4)):
        queries, keys = slice(group * first, group * end), slice(first, end)
        shard = run_ours((q[:, :, queries], k[:, :, keys], v[:, :, keys], dout[:, :, queries]), mask, head_offset=first)
        assert_same_bits(shard, expected.of_heads(queries, keys), f"KV heads {first} to {end}")


def test_head_offset_matters() -> None:
    """The control: odd heads of the causal schedule walk the other way."""
    inputs = gpu_inputs(1000, 1000, (1, 1))
    even, odd = (run_ours(inputs, Causal(), head_offset=offset) for offset in (0, 1))
    assert not same_bits(even.dk, odd.dk)


@pytest.mark.parametrize(("heads", "batch"), [((8, 4), 2), ((8, 1), 1), ((21, 3), 1)])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(500, 0)], ids=str)
def test_number_of_workers(mask: Mask, heads: tuple[int, int], batch: int) -> None:
    inputs = gpu_inputs(3000, 3000, heads, batch=batch)
    expected = run_ours(inputs, mask)
    orders = set()
    for workers in (132, 100, 66):
        changes = {(module, "sm_count"): lambda _, n=workers: n for module in ("calls.forward", "calls.backward_setup", "calls.packed")}
        with patched_backend(changes):
            plan = hopper("calls.explain").backward_plan(Call(*inputs[:3], AttentionOptions(mask, 128**-0.5)))
            assert plan.workers == workers, "the control: the placement did change"
            orders.add(plan.order_hash)
            assert_same_bits(run_ours(inputs, mask), expected, f"{workers} workers")
    assert len(orders) == 1


SCRIPT = """
from dash_attn import Causal, Full
from dense import digest, run_ours
from gpu_helpers import gpu_inputs
for mask in (Full(), Causal()):
    print(digest(*run_ours(gpu_inputs(1000, 1000), mask)))
"""


def test_another_process_with_a_cold_cache(tmp_path: Path) -> None:
    """Kernels compiled anew give the same bits."""
    done = run_script(SCRIPT, limit=300, DASH_ATTN_CACHE=str(tmp_path), PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stderr
    assert "compiling" in done.stderr, "the control: the cache was cold"
    assert done.stdout.split() == [digest(*run_ours(gpu_inputs(1000, 1000), mask)) for mask in BOTH]
