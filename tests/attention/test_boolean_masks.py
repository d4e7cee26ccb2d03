"""Any boolean matrix as a mask: what is computed, in which order, what that order depends on, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from boolean_masks import SORTS, a_tree, draw, scattered
from dash_attn import BooleanMask, Causal, ScheduleError, TileMap, explain, flash_attn_func
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions
from dash_attn.call.planning import problem_of
from dash_attn.execution.interleaving import interleaving
from dash_attn.masks import TilePattern
from dash_attn.masks.boolean_mask import BitMatrix, bits_on_device
from dash_attn.scheduling import Schedule, generate
from dense import Results, assert_same_bits, largest_error, random_inputs, run_dense, run_ours, same_bits
from kept_pairs import dense_modified

ALL, QUICK = range(200), 100


@pytest.mark.parametrize("number", [number if number < QUICK else pytest.param(number, marks=pytest.mark.exhaustive) for number in ALL])
def test_results_are_those_of_the_definition(number: int) -> None:
    """Forward and backward of a random matrix; then the backward once more, with chains that move in a random sequence."""
    drawn = draw(number)
    inputs = random_inputs(*drawn.lengths, drawn.heads, 8, torch.float64, drawn.batch, seed=number)
    ours, truth = run_ours(inputs, drawn.mask), run_dense(inputs, drawn.mask, torch.float64)
    for name, one, other in zip(Results._fields, ours, truth, strict=True):
        assert largest_error(one, other) < 1e-11, (name, str(drawn))
    with interleaving(number, workers=1 + number % 5):
        assert_same_bits(run_ours(inputs, drawn.mask), ours, str(drawn))


def test_drawn_matrices_are_of_all_sorts() -> None:
    """The control: what the test above claims to see is among what it draws, and among what it draws in a quick run."""
    for numbers in (ALL, range(QUICK)):
        drawn = [draw(number) for number in numbers]
        patterns = [BooleanMask(one.mask).pattern for one in drawn]
        assert {type(pattern).__name__ for pattern in patterns} == {"TileMap", "TilePattern", "PatternPerHead"}
        assert any(not one.mask.any(-1).all() and one.mask.any() for one in drawn)
        assert any(not one.mask.any(-2).all() and one.mask.any() for one in drawn)
        assert {one.mask.ndim for one in drawn} == {2, 3, 4}
        assert any(one.heads[0] > one.heads[1] and one.mask.ndim > 2 for one in drawn)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(q_len: int, kv_len: int, density: float = 0.5, seed: int = 0) -> Tensor:
    return torch.rand(q_len, kv_len, generator=source(seed)) < density


def test_the_unordered_control_differs() -> None:
    inputs, mask = random_inputs(300, 700, (2, 2), 16, torch.float32), matrix(300, 700)
    ordered = run_ours(inputs, mask)
    for seed in range(5):
        with interleaving(seed):
            assert_same_bits(run_ours(inputs, mask), ordered)
    unordered = [run_ours(inputs, mask, accumulation="unordered") for _ in range(5)]
    assert any(not same_bits(one.dq, ordered.dq) for one in unordered)
    assert all(same_bits(one.out, ordered.out) for one in unordered)


@pytest.mark.parametrize("schedule", ["auto", "ascending", "descending", "spt", "arrival", "weave"])
def test_schedules_by_name_serve_it(schedule: str) -> None:
    inputs, mask = random_inputs(150, 400, (2, 1), 8, torch.float64), matrix(150, 400, 0.01)
    ours, truth = run_ours(inputs, mask, schedule=schedule), run_dense(inputs, mask, torch.float64)
    assert max(map(largest_error, ours, truth)) < 1e-11


@pytest.mark.parametrize("leading", [(), (2, 2)], ids=["one", "per head"])
def test_gradcheck(leading: tuple[int, ...]) -> None:
    q, k, v, _ = random_inputs(70, 140, (2, 1), 3, torch.float64, batch=2)
    mask = torch.rand(*leading, 70, 140, generator=source(1)) < 0.3
    mask[..., 5, :] = False
    if leading:
        mask[0, 1, :64] = False  # query heads of one group with different patterns
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: flash_attn_func(*x, mask=mask), leaves, fast_mode=True)


def options_of_all_sorts() -> dict[str, Any]:
    return {
        "softcap": 3.0,
        "dropout_p": 0.3,
        "dropout_seed": torch.tensor([5, 7]),
        "alibi_slopes": torch.rand(2, 4, generator=source(), dtype=torch.float64),
        "sinks": torch.randn(4, generator=source(), dtype=torch.float64),
    }


def test_other_options_go_with_it() -> None:
    """A causal matrix beside Causal: bit by bit, with everything that changes scores."""
    inputs = random_inputs(200, 260, (4, 2), 8, torch.float64, batch=2)
    tril = torch.ones(200, 260, dtype=torch.bool).tril(60)
    options = {**options_of_all_sorts(), "head_offset": 3}
    assert_same_bits(run_ours(inputs, tril, **options), run_ours(inputs, Causal(), **options))


def of_one_head(results: Results, sequence: int, kv_head: int, group: int) -> Results:
    queries, keys = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    return Results(*(x[sequence : sequence + 1] for x in results)).of_heads(queries, keys)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_each_head_has_the_bits_it_has_alone(dtype: torch.dtype) -> None:
    """Patterns: equal, equal with other elements, a map of blocks, and two in one group. Each KV head alone, with its query heads."""
    q, k, v, dout = inputs = random_inputs(150, 300, (6, 3), 8, dtype, batch=2)
    mask = torch.rand(2, 6, 150, 300, generator=source(3)) < 0.2
    mask[0, 2:4] = matrix(150, 300, 0.02)
    mask[0, 2:4, 64:128] = False
    mask[0, 5, :64] = False
    mask[1, :2] = True
    options = {**options_of_all_sorts(), "alibi_slopes": torch.rand(2, 6, generator=source()), "sinks": None}
    whole = run_ours(inputs, mask, head_offset=2, **options)
    for sequence in (0, 1):
        for kv_head in range(3):
            heads, one = slice(2 * kv_head, 2 * kv_head + 2), slice(sequence, sequence + 1)
            alone = (q[one, :, heads], k[one, :, kv_head : kv_head + 1], v[one, :, kv_head : kv_head + 1], dout[one, :, heads])
            own = {**options, "alibi_slopes": options["alibi_slopes"][one, heads], "dropout_seed": options["dropout_seed"][one]}
            expected = run_ours(alone, mask[one, heads], head_offset=2 + kv_head, **own)
            assert_same_bits(of_one_head(whole, sequence, kv_head, 2), expected, f"sequence {sequence}, KV head {kv_head}")


def test_a_group_of_two_patterns_is_heads_of_their_own() -> None:
    """Output and dQ are those of keys repeated for each query head; dK and dV their sum, in order, rounded once."""
    q, k, v, dout = inputs = random_inputs(150, 300, (3, 1), 8, torch.bfloat16)
    mask = torch.rand(3, 150, 300, generator=source(3)) < 0.3
    mask[1, :64] = False
    ours = run_ours(inputs, mask)
    repeated = run_ours((q, *(x.repeat_interleave(3, 2) for x in (k, v)), dout), mask)
    assert all(map(same_bits, ours[:3], repeated[:3]))
    exact = run_ours(tuple(x.float() for x in (q, *(x.repeat_interleave(3, 2) for x in (k, v)), dout)), mask)
    exact_rows = run_ours(tuple(x.float() for x in inputs), mask)
    for total, parts in ((exact_rows.dk, exact.dk), (exact_rows.dv, exact.dv)):
        assert same_bits(total[:, :, 0], parts[:, :, 0] + parts[:, :, 1] + parts[:, :, 2])
    assert same_bits(ours.dv, exact_rows.dv.bfloat16())  # dK also depends on the output, which is rounded
    alike = run_ours(inputs, mask[:1].expand(3, 150, 300))
    assert same_bits(alike.dq[:, :, :1], run_ours(inputs, mask[0]).dq[:, :, :1])


def test_sinks_per_head_have_the_gradient_of_the_definition() -> None:
    q, k, v, dout = random_inputs(100, 200, (4, 2), 8, torch.float64, batch=2)
    mask = torch.rand(2, 4, 100, 200, generator=source(3)) < 0.3
    mask[1, 1, :64] = False
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(4, dtype=torch.float64, generator=source()))]
    ours = flash_attn_func(q, k, v, mask=mask, sinks=leaves[3], return_lse=True)
    truth = dense_modified(q, k, v, mask, sinks=leaves[3])
    gradients = [torch.autograd.grad(pair, leaves, (dout, pair[1].detach())) for pair in (ours, truth)]
    for one, other in zip((*ours, *gradients[0]), (*truth, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_rows_that_attend_nothing_are_zero() -> None:
    inputs, mask = random_inputs(130, 130, (2, 2), 8, torch.float32), matrix(130, 130)
    mask[7], mask[:, 9] = False, False
    ours = run_ours(inputs, mask)
    assert not ours.out[:, 7].any()
    assert not ours.dq[:, 7].any()
    assert (ours.lse[:, :, 7] == -torch.inf).all()
    assert not ours.dk[:, 9].any()
    assert not ours.dv[:, 9].any()
    nothing = run_ours(inputs, torch.zeros(130, 130, dtype=torch.bool))
    assert not any(x.any() for x in (nothing.out, *nothing[2:]))


@pytest.mark.parametrize("sort", SORTS, ids=[sort.__name__ for sort in SORTS])
def test_a_mask_that_is_made_once_gives_the_same_bits(sort: Any) -> None:
    """And keeps its elements when the tensor changes, before the backward or after."""
    q, k, v, dout = inputs = random_inputs(200, 300, (2, 1), 8)
    mask = sort((200, 300), source())
    made, expected = BooleanMask(mask), run_ours(inputs, mask)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, mask=mask, return_lse=True)
    mask.logical_not_()
    assert_same_bits(Results(out, lse, *torch.autograd.grad(out, leaves, dout)), expected)
    assert_same_bits(run_ours(inputs, made), expected)
    assert not same_bits(run_ours(inputs, mask).out, expected.out)


def test_the_order_is_named_by_tiles_not_by_elements() -> None:
    q, k, v, _ = random_inputs(256, 512, (2, 2), 8)
    mask = matrix(256, 512)
    hashes = [explain(flash_attn_func, q, k, v, mask=x).order_hash for x in (mask, ~mask, matrix(256, 512, 0.9, seed=1))]
    assert len(set(hashes)) == 1
    emptied = mask.clone()
    emptied[:64, :128] = False
    assert explain(flash_attn_func, q, k, v, mask=emptied).order_hash != hashes[0]
    per_head = torch.stack([mask, emptied])
    found = {explain(flash_attn_func, q, k, v, mask=x).order_hash for x in (per_head, per_head.flip(0), mask, emptied)}
    assert len(found) == 4
    tril = torch.ones(256, 512, dtype=torch.bool).tril(256)
    assert explain(flash_attn_func, q, k, v, mask=tril).order_hash == explain(flash_attn_func, q, k, v, causal=True).order_hash


def test_auto_chooses_as_for_a_map_of_tiles() -> None:
    q, k, v, _ = random_inputs(640, 1280, (2, 2), 8)
    tiles = torch.rand(10, 10, generator=source()) < 0.5
    blocks = tiles.repeat_interleave(64, 0).repeat_interleave(128, 1)
    holes = blocks.clone()
    holes[3::64, 5::128] = False
    expected = explain(flash_attn_func, q, k, v, mask=TileMap(tiles.numpy(), 64, 128))
    for mask in (blocks, holes):
        found = explain(flash_attn_func, q, k, v, mask=mask)
        assert (found.schedule, found.order_hash) == ("weave", expected.order_hash)
    assert explain(flash_attn_func, q, k, v, mask=matrix(640, 1280)).schedule == "shift_blocks"


def test_an_own_schedule_fits_all_matrices_of_its_pattern() -> None:
    inputs, mask = random_inputs(256, 512, (2, 2), 8), matrix(256, 512)
    mask[:64, :128] = False
    pattern = BooleanMask(mask).pattern
    assert isinstance(pattern, TilePattern)
    schedule = generate("descending", problem_of(Call(*inputs[:3], AttentionOptions(pattern, 1.0)), 64, 128), 132)
    read = Schedule.from_json(schedule.to_json())
    assert read.problem.mask == pattern
    for one in (mask, mask & matrix(256, 512, 0.9, seed=5)):
        assert_same_bits(run_ours(inputs, one, schedule=read), run_ours(inputs, one, schedule="descending"))
    with pytest.raises(ScheduleError, match="does not fit this call"):
        run_ours(inputs, ~mask, schedule=read)


def test_only_partial_blocks_have_bits() -> None:
    mask = torch.ones(64 * 50, 64 * 40, dtype=torch.bool).tril()
    made = BooleanMask(mask)
    assert made.nbytes < 40 * 64 * 8 + 50 * 40 * 5 + 2048  # the diagonal, and five bytes per block
    assert BooleanMask(mask.expand(3, 4, *mask.shape)).nbytes == made.nbytes
    assert BooleanMask(mask.repeat(2, 1, 1, 1)).nbytes == made.nbytes  # equal matrices are one
    assert BooleanMask(torch.rand(640, 640) < 0.5).nbytes < 640 * 640 / 8 + 2048


def test_nothing_keeps_the_elements_of_a_mask() -> None:
    """Plans are kept by pattern: masks that change in every step must not fill the memory."""
    inputs, mask = random_inputs(130, 130, (1, 1), 8), BooleanMask(matrix(130, 130))
    seen = weakref.ref(mask)
    run_ours(inputs, mask)
    del mask
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leading", [(), (2, 1), (4,), (2, 4)], ids=str)
def test_a_matrix_of_0_and_minus_infinity_is_the_boolean_one(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, kept = random_inputs(150, 200, (4, 2), 8, batch=2), torch.rand(*leading, 150, 200, generator=source()) < 0.4
    numbers = torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, -torch.inf)
    assert_same_bits(run_ours(inputs, numbers), run_ours(inputs, kept))
    numbers[..., 3, 5] = -torch.inf if kept[..., 3, 5].any() else 0.0  # a change in place is seen
    assert_same_bits(run_ours(inputs, numbers), run_ours(inputs, numbers == 0))
    assert not same_bits(run_ours(inputs, numbers).out, run_ours(inputs, kept).out)


def test_numbers_of_an_expanded_matrix_are_read_once() -> None:
    """PyTorch's modules expand masks of padding to all queries and heads."""
    inputs, kept = random_inputs(150, 200, (4, 2), 8, batch=2), torch.rand(2, 1, 1, 200, generator=source()) < 0.4
    numbers = torch.zeros(kept.shape).masked_fill(~kept, -torch.inf).expand(2, 4, 150, 200)
    with Largest() as largest:
        found = run_ours(inputs, numbers)
    assert largest.compared == 2 * 200
    assert_same_bits(found, run_ours(inputs, kept.expand(2, 4, 150, 200)))


class Largest(TorchDispatchMode):
    """The most elements that were compared at once."""

    compared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.eq.Scalar and args[0].ndim == 4:
            self.compared = max(self.compared, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_numbers_that_were_seen_before_they_were_learnt_are_refused() -> None:
    """What is known of a tensor is looked up before anything is checked."""
    q, k, v, _ = random_inputs(20, 20, (2, 2), 8)
    numbers = torch.zeros(20, 20)
    for _ in range(2):
        flash_attn_func(q, k, v, mask=numbers)
    with pytest.raises(ValueError, match="a mask tensor gets no gradient"):
        flash_attn_func(q, k, v, mask=numbers.requires_grad_())
    with torch.no_grad():
        flash_attn_func(q, k, v, mask=numbers)


def test_a_given_schedule_serves_one_pattern() -> None:
    inputs = random_inputs(128, 128, (2, 2), 8)
    mask = torch.stack([matrix(128, 128), matrix(128, 128)])
    mask[1, :64] = False
    pattern = BooleanMask(mask[0]).pattern
    schedule = generate("ascending", problem_of(Call(*inputs[:3], AttentionOptions(pattern, 1.0)), 64, 128), 132)
    with pytest.raises(ScheduleError, match="does not fit this call"):
        run_ours(inputs, mask, schedule=schedule)
    with pytest.raises(ScheduleError, match="does not fit this call"):  # before there is a backward
        flash_attn_func(*inputs[:3], mask=mask, schedule=schedule)


@pytest.mark.parametrize("number", range(8))
def test_a_device_packs_as_the_host_does(number: int) -> None:
    """What packs a tensor on a GPU, of one on the host. The control: one element more."""
    mask = draw(number).mask.flatten(0, -3)[-1] if draw(number).mask.ndim > 2 else draw(number).mask
    here, there = BitMatrix.of(mask.numpy()), bits_on_device(mask)
    assert (tuple(here.shape), here.digest, here.places.tolist()) == (there.shape, there.digest, there.places.tolist())
    mask[-1, -1] ^= True
    assert bits_on_device(mask).digest != here.digest


class _RawCopies(TorchDispatchMode):
    """A GPU copies what is contiguous byte by byte; the host makes 0 or 1 of every boolean on the way."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype == torch.bool:
            args[0].view(torch.uint8).copy_(args[1].view(torch.uint8))
            return args[0]
        return function(*args, **(kwargs or {}))


def test_any_byte_but_zero_attends() -> None:
    """Of bytes that are viewed as boolean: on the host, and by what packs on a GPU. The control: one byte that becomes 0."""
    octets = torch.randint(0, 256, (70, 130), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    octets[:, ::3] = 0
    plain, viewed = (octets != 0).numpy(), octets.view(torch.bool)
    assert BooleanMask(viewed).matrices[0].digest == BitMatrix.of(plain).digest
    with _RawCopies():
        assert bits_on_device(viewed).digest == BitMatrix.of(plain).digest
        assert bits_on_device(viewed.T).digest == BitMatrix.of(plain.T).digest, "the tensor need not be contiguous"
        octets[0, 1] = 0
        assert bits_on_device(viewed).digest != BitMatrix.of(plain).digest


def test_no_queries_or_no_keys() -> None:
    for q_len, kv_len in ((0, 5), (5, 0)):
        q, k = torch.zeros(1, q_len, 2, 8), torch.zeros(1, kv_len, 2, 8)
        out = flash_attn_func(q, k, k, mask=torch.ones(q_len, kv_len, dtype=torch.bool))
        assert not out.any()
        with pytest.raises(ValueError, match="a boolean mask must be"):
            flash_attn_func(q, k, k, mask=torch.ones(q_len + 2, kv_len, dtype=torch.bool))


def test_trees_and_scattered_elements_differ_from_their_neighbours() -> None:
    """The control of the helpers: one element more changes the output."""
    inputs = random_inputs(70, 200, (1, 1), 8, torch.float64)
    for sort in (a_tree, scattered):
        mask = sort((70, 200), source(2))
        other = mask.clone()
        other[40, 150] ^= True
        assert not same_bits(run_ours(inputs, mask).out, run_ours(inputs, other).out)
