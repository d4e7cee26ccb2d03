"""Groups of query heads in parts, on the CPU: dK and dV are the contract's sums, bit by bit, and depend on nothing around them."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Full, Mask, Window, explain, flash_attn_func
from dash_attn.backends.cpu import backward, forward
from dash_attn.call.call import Call, Grads, Saved
from dash_attn.call.options import AttentionOptions
from dash_attn.execution.interleaving import interleaving
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.problem import parts_of
from dense import Results, assert_same_bits, largest_error, random_inputs, repeated, run_dense, run_ours, same_bits
from inputs import Inputs
from packed_batches import run_packed
from reference import dealt

# (queries, keys, group): as few rows as give several parts
SHAPES = {
    "two parts of one": (2100, 300, 2),
    "three parts of one": (2100, 200, 3),
    "parts of 1, 2 and 2": (1400, 400, 5),
    "parts of 23 and 24": (130, 130, 71),
    "two parts of four": (600, 700, 8),
    "seven parts of one": (2060, 129, 7),
}
MASKS: list[Mask] = [Causal(), Full(), Window(200, 30)]
KINDS = {"ascending": 1, "alternating": 2}  # sums of a group with several parts
# Where all heads are of one kind, their offset changes nothing.
OFFSETS = [("ascending", 0), pytest.param("ascending", 1, marks=pytest.mark.exhaustive), ("alternating", 0), ("alternating", 1)]
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def made(shape: tuple[int, int, int], kv_heads: int = 1, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """A head dim of 64, whose scale is a power of two: it commutes with every rounding."""
    q, k, v, dout = drawn(shape, kv_heads, batch, dtype, seed)
    return q.clone(), k.clone(), v.clone(), dout.clone()


@lru_cache(maxsize=2)
def drawn(shape: tuple[int, int, int], kv_heads: int, batch: int, dtype: torch.dtype, seed: int) -> Inputs:
    q_len, kv_len, group = shape
    return random_inputs(q_len, kv_len, (group * kv_heads, kv_heads), 64, dtype, batch, seed)


def parts(shape: tuple[int, int, int]) -> list[list[int]]:
    return dealt(shape[2], parts_of(shape[2], shape[0]))


def kv_heads_of(inputs: tuple[Tensor, ...], heads: slice, group: int) -> tuple[Tensor, ...]:
    """Some KV heads with their query heads."""
    of_queries = slice(heads.start * group, heads.stop * group)
    q, k, v, dout = inputs
    return q[:, :, of_queries], k[:, :, heads], v[:, :, heads], dout[:, :, of_queries]


def of_part(inputs: tuple[Tensor, ...], members: list[int], mask: Mask, schedule: str, kind: int) -> Results:
    """One part alone: a whole group of its query heads on a KV head of this kind."""
    q, k, v, dout = inputs
    return run_ours((q[:, :, members], k, v, dout[:, :, members]), mask, schedule=schedule, head_offset=kind)


def added(values: list[Tensor], kinds: int) -> Tensor:
    """The contract: parts of one kind are added in their order, then the sums of the kinds, that of the first part first."""
    sums = [values[first::kinds] for first in range(min(kinds, len(values)))]
    totals = []
    for summands in sums:
        total = summands[0].clone()
        for summand in summands[1:]:
            total = total + summand
        totals.append(total)
    return totals[0] if len(totals) == 1 else totals[0] + totals[1]


@shapes
def test_the_shapes_have_several_parts(shape: tuple[int, int, int]) -> None:
    assert len(parts(shape)) > 1


@pytest.mark.parametrize("mask", MASKS, ids=str)
@shapes
def test_close_to_fp64(shape: tuple[int, int, int], mask: Mask) -> None:
    inputs = made(shape)
    ours, truth = run_ours(inputs, mask), run_dense(inputs, mask, torch.float64)
    for name, a, b in zip(Results._fields, ours, truth, strict=True):
        assert largest_error(a, b) < 3e-6 * max(1.0, b[b.isfinite()].abs().max().item()), name
    if mask != MASKS[0]:
        return
    fewer = run_dense(tuple(x[:, :, :-1] if x.shape[2] > 1 else x for x in inputs), mask, torch.float64)
    assert largest_error(ours.dv, fewer.dv) > 1e-3, "the control: a query head less"


@pytest.mark.parametrize(("schedule", "head_offset"), OFFSETS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@shapes
def test_sums_are_the_contract_bit_by_bit(shape: tuple[int, int, int], mask: Mask, schedule: str, head_offset: int) -> None:
    """From runs of single parts: single query heads, or a few in one chain."""
    inputs, dealt_heads, kinds = made(shape), parts(shape), KINDS[schedule]
    whole = run_ours(inputs, mask, schedule=schedule, head_offset=head_offset)
    first = head_offset * len(dealt_heads)
    single = [of_part(inputs, members, mask, schedule, (first + part) % kinds) for part, members in enumerate(dealt_heads)]
    dk, dv = (added([getattr(part, name) for part in single], kinds) for name in ("dk", "dv"))
    expected = Results(*(torch.cat([getattr(part, name) for part in single], 2) for name in ("out",)), whole.lse, whole.dq, dk, dv)
    assert_same_bits(whole, expected)
    for members, part in zip(dealt_heads, single, strict=True):
        assert same_bits(whole.dq[:, :, members].contiguous(), part.dq.contiguous())


@pytest.mark.parametrize("shape", [SHAPES["three parts of one"], SHAPES["seven parts of one"]], ids=["three", "seven"])
def test_another_order_of_the_parts_would_show(shape: tuple[int, int, int]) -> None:
    """The controls: the first part last, all parts in one sum, kinds swapped, and the same call with its first query head last."""
    inputs = made(shape)
    ours = run_ours(inputs, Causal(), schedule="alternating")
    single = [of_part(inputs, members, Causal(), "alternating", part % 2).dk for part, members in enumerate(parts(shape))]
    other_kinds = [of_part(inputs, members, Causal(), "alternating", 1 - part % 2).dk for part, members in enumerate(parts(shape))]
    assert same_bits(added(single, 2), ours.dk)
    for what in (added(single[1:] + single[:1], 2), added(single, 1), added(other_kinds, 2)):
        assert largest_error(what, ours.dk) < 1e-4
        assert not same_bits(what, ours.dk)
    q, k, v, dout = inputs
    turned = run_ours((q.roll(-1, 2), k, v, dout.roll(-1, 2)), Causal(), schedule="alternating")
    assert largest_error(turned.dk, ours.dk) < 1e-4
    assert not same_bits(turned.dk, ours.dk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_are_rounded_once(dtype: torch.dtype) -> None:
    """dV of one key is the sum of dO. The first query head has 257 and 2049, which bfloat16 and float16 round to 256 and 2048; the
    second takes all but 1 away."""
    large = 256.0 if dtype == torch.bfloat16 else 2048.0
    assert torch.tensor(large + 1, dtype=dtype) == large
    q, k, v, dout = (torch.zeros(1, length, heads, 64, dtype=dtype) for length, heads in ((2100, 2), (1, 1), (1, 1), (2100, 2)))
    dout[0, 0, 0], dout[0, 1, 0], dout[0, 0, 1] = large, 1, -large
    assert len(parts((2100, 1, 2))) == 2
    assert run_ours((q, k, v, dout), Full()).dv.unique().tolist() == [1]
    of_heads = [of_part((q, k, v, dout), [head], Full(), "auto", 0).dv for head in (0, 1)]
    assert (of_heads[0] + of_heads[1]).unique().tolist() == [0], "the control: rounded before they are added"


def test_sixteen_bits_come_last() -> None:
    """dK and dV in bfloat16 are those in float32, from the same forward, rounded once."""
    shape = SHAPES["three parts of one"]
    q, k, v, dout = made(shape, dtype=torch.bfloat16)
    options = AttentionOptions(Causal(), 0.125)
    call = Call(q, k, v, options)
    out, lse = saved = forward(call)
    in_half = backward(call, saved, Grads(dout))
    in_full = backward(Call(q.float(), k.float(), v.float(), options), Saved(out.float(), lse), Grads(dout.float()))
    assert all(torch.equal(half, full.bfloat16()) for half, full in zip(in_half[:3], in_full[:3], strict=True))
    rounded = []
    for head in (slice(i, i + 1) for i in range(3)):
        alone = Call(q[:, :, head], k, v, options)
        rounded.append(backward(alone, Saved(out[:, :, head], lse[:, head]), Grads(dout[:, :, head])).v)
    assert not torch.equal(in_half[2], added(rounded, 2)), "the control: parts that were rounded before they are added"


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[name] for name in ("three parts of one", "parts of 1, 2 and 2", "parts of 23 and 24")], ids=str)
def test_batch_position_and_packing(shape: tuple[int, int, int], mask: Mask) -> None:
    """Alone, everywhere in a batch, and packed beside sequences whose groups have other parts."""
    batch = made(shape, kv_heads=1, batch=3)
    together = run_ours(batch, mask)
    sequences = [tuple(x[place : place + 1] for x in batch) for place in range(3)]
    for place, one in enumerate(sequences):
        assert_same_bits(Results(*(x[place : place + 1] for x in together)), run_ours(one, mask), f"sequence {place}")
    short = made((90, 100, shape[2]), seed=5)
    assert len(parts((90, 100, shape[2]))) < len(parts(shape))
    packed = run_packed([short, sequences[1], short, sequences[2]], mask)  # type: ignore[list-item]
    assert_same_bits(packed[1], run_ours(sequences[1], mask), "packed")
    assert_same_bits(packed[3], run_ours(sequences[2], mask), "packed last")
    assert_same_bits(packed[0], run_ours(short, mask), "packed short")


def shards(inputs: tuple[Tensor, ...], cuts: tuple[int, ...], group: int, offsets: tuple[int, ...]) -> Results:
    """Runs over some KV heads each, put together."""
    runs = [
        run_ours(kv_heads_of(inputs, slice(first, end), group), Causal(), head_offset=offset)
        for (first, end), offset in zip(pairwise(cuts), offsets, strict=True)
    ]
    return Results(*(torch.cat(parts, 1 if name == "lse" else 2) for name, *parts in zip(Results._fields, *runs, strict=True)))


@pytest.mark.parametrize("group", [3, 2])
def test_shards_of_the_heads(group: int) -> None:
    """Four KV heads whole, in two shards, in three uneven ones, and one by one."""
    inputs = made((2060, 129, group), kv_heads=4)
    whole = run_ours(inputs, Causal())
    for cuts in ((0, 2, 4), (0, 1, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)):
        assert_same_bits(shards(inputs, cuts, group, cuts[:-1]), whole, str(cuts))
    forgotten = shards(inputs, (0, 1, 4), group, (0, 0))
    if group % 2:
        assert not same_bits(forgotten.dk, whole.dk), "the control: three parts a head, so an odd shard begins with the other kind"
    else:
        assert_same_bits(forgotten, whole, "two parts a head: every KV head begins with the same kind")


@pytest.mark.parametrize("name", ["three parts of one", "parts of 23 and 24"])
def test_workers_and_interleavings(name: str) -> None:
    inputs = made(SHAPES[name])
    expected, run = run_ours(inputs, Causal()), repeated(inputs, Causal())
    for workers in (1, 3, 50):
        for seed, threads in ((None, False), (1, False), (3, True)):
            with interleaving(seed, threads, workers):
                assert_same_bits(run(), expected, f"{workers} workers, seed {seed}")


def test_unordered_arrives_differently() -> None:
    """The control of the test above, and close to the ordered sums."""
    inputs = made(SHAPES["seven parts of one"])
    expected = run_ours(inputs, Causal())
    found = [run_ours(inputs, Causal(), accumulation="unordered") for _ in range(4)]
    assert len({tuple(run.dk.flatten().tolist()) for run in found}) > 1
    assert all(largest_error(run.dk, expected.dk) < 1e-4 for run in found)


def test_keys_that_nobody_attends_have_no_gradient() -> None:
    """Chains without a task still add: zeros."""
    inputs = made((2100, 5000, 2))
    ours = run_ours(inputs, Window(100, 0))
    assert ours.dk[:, : 5000 - 2100 - 100].abs().max() == 0
    assert ours.dv[:, : 5000 - 2100 - 100].abs().max() == 0
    assert ours.dv[:, -100:].abs().min() > 0


@pytest.mark.parametrize(("shape", "said"), [((2100, 300, 3), "3 parts"), ((130, 130, 71), "3 parts"), ((300, 300, 3), None)])
def test_explain_says_the_parts(shape: tuple[int, int, int], said: str | None) -> None:
    q, k, v, _ = made(shape)
    described = explain(flash_attn_func, q, k, v, mask=Causal())
    assert described.parts == (3 if said else 1)
    assert ("parts" in str(described)) == (said is not None)
    assert said is None or f"groups of query heads in {said}" in str(described)


def test_explanations_of_other_parts_have_other_order_hashes() -> None:
    """2049 queries and two query heads: two parts. With a query less they are one."""
    short, long = (explain(flash_attn_func, *made((q_len, 300, 2))[:3], mask=Causal()) for q_len in (2048, 2049))
    assert (short.parts, long.parts) == (1, 2)
    alone = explain(flash_attn_func, *made((2049, 300, 1))[:3], mask=Causal())
    assert long.order_hash != alone.order_hash, "the same walks and ranks, but parts"
    assert explain(flash_attn_func, *made((2049, 300, 2), kv_heads=2, batch=3)[:3], mask=Causal()).order_hash == long.order_hash


def test_recomputed_gradients_are_the_same() -> None:
    """Two backward passes of one graph."""
    q, k, v, dout = made(SHAPES["parts of 1, 2 and 2"])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, mask=Causal())
    first, second = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_given_schedule_may_say_the_parts(count: int) -> None:
    shape = q_len, kv_len, group = 300, 200, 3
    inputs = made(shape)
    problem = Problem(Causal(), q_len, kv_len, 64, 128, group=group, group_parts=count)
    ours = run_ours(inputs, Causal(), schedule=generate("ascending", problem, 16))
    single = [of_part(inputs, members, Causal(), "ascending", 0) for members in dealt(group, count)]
    assert same_bits(ours.dk, added([part.dk for part in single], 1))
    assert same_bits(ours.dk, run_ours(inputs, Causal(), schedule="ascending").dk) == (count == 1), "the rule says one part"
