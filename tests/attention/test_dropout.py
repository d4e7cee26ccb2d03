"""Dropout: which pairs are kept, what that makes of output and gradients, and what cannot move a pair's number."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dash_attn import Causal, Documents, Full, Mask, TileMap, Window, explain, flash_attn_func, flash_attn_varlen_func
from dash_attn.call import dropout
from dash_attn.call.dropout import Dropout, philox, threshold_of
from dash_attn.execution.interleaving import interleaving
from dash_attn.nn import SelfAttention
from dense import Results, assert_same_bits, random_inputs, run_ours, same_bits
from kept_pairs import dense_modified, kept_pairs
from packed_batches import run_packed

SEEDS = torch.tensor([-3, 2**62 + 1])
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E
ANSWERS = [  # of Philox2x32, as its authors publish them: rounds, counter and key, words
    (7, (0, 0, 0), (0x257A3673, 0xCD26BE2A)),
    (7, (0xFFFFFFFF,) * 3, (0xAB302C4D, 0x3DC9D239)),
    (7, PI, (0xBEDBBE6B, 0xE4C770B3)),
    (10, (0, 0, 0), (0xFF1DAE59, 0x6CD10DF2)),
    (10, PI, (0xDD7CE038, 0xF62A4C12)),
]


@pytest.mark.parametrize(("rounds", "given", "words"), ANSWERS)
def test_philox_gives_the_known_answers(rounds: int, given: tuple[int, int, int], words: tuple[int, int]) -> None:
    counter = (np.array([word], dtype=np.uint64) for word in given[:2])
    assert tuple(int(word[0]) for word in philox(*counter, given[2], rounds)) == words


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 7])
def test_pairs_are_kept_by_definition(seed: int) -> None:
    expected = kept_pairs(seed, 5, 80, 48, 0.3)
    found = Dropout(threshold_of(0.3), (seed,), first_head=3).kept(0, 2, range(80), range(48))
    assert torch.equal(torch.from_numpy(found), expected)
    inside = Dropout(threshold_of(0.3), (seed,), first_head=3).kept(0, 2, range(32, 80), range(16, 48))
    assert torch.equal(torch.from_numpy(inside), expected[32:, 16:])


SIDE = 1024


def kept(dropout_p: float = 0.5, seed: int = 1, head: int = 0) -> np.ndarray[Any, Any]:
    return Dropout(threshold_of(dropout_p), (seed,)).kept(0, head, range(SIDE), range(SIDE)).astype(np.float64)


@pytest.mark.parametrize("dropout_p", [1 / 65536, 0.1, 0.5, 0.9])
def test_the_rate_is_that_of_the_threshold(dropout_p: float) -> None:
    """Of all pairs, and as evenly over rows and columns as chance is."""
    rate, found = threshold_of(dropout_p) / 65536, kept(dropout_p)
    assert abs(rate - (1 - dropout_p)) <= 1 / 131072
    spread = (rate * (1 - rate)) ** 0.5
    assert abs(found.mean() - rate) < 5 * spread / SIDE
    for axis in (0, 1):
        lines = (found.mean(axis) - rate) / (spread / SIDE**0.5)
        assert abs((lines**2).mean() - 1) < 5 * (2 / SIDE) ** 0.5 or dropout_p < 0.01
        assert np.abs(lines).max() < 6 or dropout_p < 0.01


SHIFTS = [(0, 1), (1, 0), (1, 1), (0, 8), (8, 0), (8, 8), (0, 16), (16, 0), (16, 16), (64, 128)]


def largest_correlation() -> float:
    """Between a pair and its neighbours, the transposed pair, other heads and other seeds; in standard deviations of chance."""
    here, found = kept() - 0.5, []
    for rows, columns in SHIFTS:
        both = here[rows:, columns:] * here[: SIDE - rows, : SIDE - columns]
        found.append(both.mean() * 4 * both.size**0.5)
    lower = np.tril_indices(SIDE, -1)
    found.append((here[lower] * here.T[lower]).mean() * 4 * len(lower[0]) ** 0.5)
    found += [
        (here * (kept(seed=seed, head=head) - 0.5)).mean() * 4 * SIDE for seed, head in ((2, 0), (0, 0), (-1, 0), (1, 1), (1, 2), (2, 1))
    ]
    return float(np.abs(found).max())


def test_pairs_are_independent() -> None:
    assert largest_correlation() < 4.5


def test_control_fewer_rounds_are_not_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "philox", lambda *counter: philox(*counter, rounds=2))
    assert largest_correlation() > 10


P = 0.3
MASKS: list[Mask] = [Full(), Causal(), Window(40, 10)]


def matrices(heads: int, q_len: int, kv_len: int, first_head: int = 0, dropout_p: float = P) -> Tensor:
    """Which pairs SEEDS keep, (2, heads, q_len, kv_len)."""
    made = Dropout(threshold_of(dropout_p), tuple(SEEDS.tolist()), first_head)
    rows, columns = (range(-(-length // 16) * 16) for length in (q_len, kv_len))
    every = [[torch.from_numpy(made.kept(sequence, head, rows, columns)) for head in range(heads)] for sequence in (0, 1)]
    return torch.stack([torch.stack(one) for one in every])[..., :q_len, :kv_len]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_results_are_those_of_the_definition(mask: Mask) -> None:
    """With groups, sinks, softcap, a head offset, lengths that fill no tile, and a gradient of the LSE."""
    q, k, v, dout = random_inputs(150, 180, (4, 2), 8, torch.float64, batch=2)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))]
    own = {"sinks": leaves[3], "softcap": 2.0}
    ours = flash_attn_func(q, k, v, P, mask=mask, dropout_seed=SEEDS, head_offset=3, return_lse=True, **own)
    truth = dense_modified(q, k, v, mask, kept=matrices(4, 150, 180, first_head=6), dropout_p=P, **own)
    gradients = [torch.autograd.grad(pair, leaves, (dout, pair[1].detach())) for pair in (ours, truth)]
    for one, other in zip((*ours, *gradients[0]), (*truth, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_gradcheck(mask: Mask) -> None:
    q, k, v, _ = random_inputs(5, 6, (2, 1), 3, torch.float64, batch=2)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.zeros(2, dtype=torch.float64))]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return flash_attn_func(q, k, v, P, mask=mask, dropout_seed=SEEDS, sinks=sinks, alibi_slopes=torch.arange(2) / 8, return_lse=True)

    assert torch.autograd.gradcheck(attend, leaves)


def test_the_mean_over_seeds_is_attention_without_dropout() -> None:
    q, k, v, _ = random_inputs(20, 20, (1, 1), 4)
    seeds = torch.arange(400)
    found = flash_attn_func(*(x.expand(400, -1, -1, -1) for x in (q, k, v)), P, dropout_seed=seeds)
    error = found.mean(0) - flash_attn_func(q, k, v)[0]
    assert (error.abs() < 5 * found.std(0) / 20).all()


def attended_pairs(schedule: str, mask: Mask, **options: Any) -> tuple[Tensor, Tensor]:
    """Pairs that count in the forward and in the backward, read from the output of values that name their key."""
    q, k, _, _ = random_inputs(200, 200, (2, 1), 8, batch=2)
    v = torch.eye(200)[None, :, None].repeat(2, 1, 1, 1).requires_grad_()
    out = flash_attn_func(q, k, v, P, mask=mask, schedule=schedule, dropout_seed=SEEDS, **options)
    dout = torch.zeros(2, 200, 2, 200)
    dout[:, :, 1] = torch.eye(200)  # so dV is the transpose of the weights of head 1
    (dv,) = torch.autograd.grad(out, v, dout)
    return out.transpose(1, 2) != 0, dv[:, :, 0].mT != 0


SCHEDULES = ["auto", "ascending", "descending", "spt", "alternating", "weave", "arrival"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_drops_the_same_pairs(schedule: str) -> None:
    expected = matrices(2, 200, 200) & torch.ones(200, 200, dtype=torch.bool).tril()
    forward, backward = attended_pairs(schedule, Causal())
    assert torch.equal(forward, expected)
    assert torch.equal(backward, expected[:, 1])


def test_a_map_of_blocks_drops_the_same_pairs() -> None:
    blocks = np.eye(4, dtype=bool)
    expected = matrices(2, 200, 200) & torch.from_numpy(np.kron(blocks, np.ones((50, 50), dtype=bool)))
    assert torch.equal(attended_pairs("auto", TileMap(blocks, 50, 50))[0], expected)


def dropped(inputs: tuple[Tensor, ...], mask: Mask = Causal(), seeds: Tensor = SEEDS, **options: Any) -> Results:  # noqa: B008  frozen
    return run_ours(inputs, mask, dropout_p=P, dropout_seed=seeds, **options)


def test_bits_do_not_depend_on_the_place_in_the_batch() -> None:
    batch = random_inputs(150, 150, (2, 1), 16, batch=2)
    together = dropped(batch)
    for place in (0, 1):
        one = slice(place, place + 1)
        alone = dropped(tuple(x[one] for x in batch), seeds=SEEDS[one])
        assert_same_bits(Results(*(x[one] for x in together)), alone, f"place {place}")
    exchanged = dropped(tuple(x.flip(0) for x in batch), seeds=SEEDS.flip(0))
    assert_same_bits(Results(*(x.flip(0) for x in exchanged)), together)
    control = dropped(batch, seeds=SEEDS.flip(0))
    assert not same_bits(control.out, together.out)


def test_bits_do_not_depend_on_packing() -> None:
    lengths = ((70, 70), (0, 0), (130, 150), (5, 0), (1, 1))
    parts = [random_inputs(*pair, (4, 2), 8, seed=i) for i, pair in enumerate(lengths)]
    seeds = torch.arange(5) * 1000
    for i, found in enumerate(run_packed(parts, Causal(), dropout_p=P, dropout_seed=seeds)):
        assert_same_bits(found, dropped(parts[i], seeds=seeds[i : i + 1]), f"sequence {i}")


@pytest.mark.parametrize("workers", [1, 3])
def test_bits_do_not_depend_on_workers(workers: int) -> None:
    inputs = random_inputs(700, 700, (2, 1), 8, batch=2)
    expected = dropped(inputs, Full())
    with interleaving(7, workers=workers):
        assert_same_bits(dropped(inputs, Full()), expected)


def test_a_shard_of_heads_drops_what_the_whole_model_drops() -> None:
    q, k, v, dout = random_inputs(100, 100, (4, 2), 8, batch=2)
    whole = dropped((q, k, v, dout))
    mine = q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], dout[:, :, 2:]
    assert_same_bits(dropped(mine, head_offset=1), whole.of_heads(slice(2, 4), slice(1, 2)))
    assert not same_bits(dropped(mine).out, whole.out[:, :, 2:])  # the control


def test_seeds_are_drawn_from_the_generator() -> None:
    inputs = random_inputs(40, 40, (2, 2), 8, batch=2)

    def drawn(seed: int | None = None) -> Results:
        if seed is not None:
            torch.manual_seed(seed)
        return run_ours(inputs, Causal(), dropout_p=P)

    first = drawn(1)
    second = drawn()
    assert not same_bits(first.out, second.out)
    assert_same_bits(drawn(1), first)
    assert not same_bits(drawn(2).out, first.out)
    before = torch.get_rng_state()
    run_ours(inputs, Causal(), dropout_p=0.0)
    dropped(inputs)
    assert torch.equal(torch.get_rng_state(), before)  # nothing to draw


def test_sequences_of_a_batch_get_seeds_of_their_own() -> None:
    torch.manual_seed(0)
    q, k, v, _ = random_inputs(40, 40, (2, 2), 8)
    out = flash_attn_func(*(x.expand(2, -1, -1, -1) for x in (q, k, v)), P)
    assert not same_bits(out[0], out[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_drops_the_same_pairs(reentrant: bool) -> None:
    q, k, v, dout = random_inputs(70, 70, (2, 2), 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients(recompute: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        out = checkpoint(flash_attn_func, *leaves, P, use_reentrant=reentrant) if recompute else flash_attn_func(*leaves, P)
        torch.manual_seed(6)  # what happens between forward and backward has no effect
        return torch.autograd.grad(out, leaves, dout) if not reentrant else _accumulated(out, leaves, dout)

    assert all(map(same_bits, gradients(True), gradients(False)))


def test_recomputation_that_would_drop_others_raises() -> None:
    """It would mix the output of one draw with the pairs of another. The control: seeds that are given."""
    q, k, v, dout = random_inputs(70, 70, (2, 2), 8)
    leaf = q.requires_grad_()
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    out = checkpoint(flash_attn_func, leaf, k, v, P, **options)
    with pytest.raises(RuntimeError, match=r"drawn other seeds for dropout .*: leave preserve_rng_state=True, or give dropout_seed; got"):
        out.backward(dout)
    seeds = torch.arange(len(q))
    given = checkpoint(flash_attn_func, leaf, k, v, P, dropout_seed=seeds, **options)
    plain = flash_attn_func(leaf, k, v, P, dropout_seed=seeds)
    assert same_bits(*(torch.autograd.grad(one, leaf, dout)[0] for one in (given, plain)))


def _accumulated(out: Tensor, leaves: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    for leaf in leaves:
        leaf.grad = None
    out.backward(dout)
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)


def test_seeds_that_change_before_the_backward_are_noticed() -> None:
    q, k, v, _ = random_inputs(20, 20, (1, 1), 8)
    seeds = torch.tensor([1])
    out = flash_attn_func(q.requires_grad_(), k, v, P, dropout_seed=seeds)
    seeds += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("given", [True, False])
def test_compiled_bits_are_eager_bits(given: bool) -> None:
    """Seeds that are drawn inside of the program come from the same generator."""
    q, k, v, dout = random_inputs(70, 70, (2, 1), 8, batch=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seeds = {"dropout_seed": SEEDS, "alibi_slopes": torch.arange(2) / 4} if given else {}
    torch._dynamo.reset()
    found = []
    for function in (flash_attn_func, torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        out = function(*leaves, P, causal=True, **seeds)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    assert all(map(same_bits, *found))


def test_the_operator_is_checked() -> None:
    from dash_attn.attention.torch_ops import VERSION

    q, k, v, _ = random_inputs(30, 30, (4, 2), 8, torch.float64, batch=2)
    rest = (None, 0, 0, "causal", [], 0.25, 0.0, "auto", "ordered", "auto", 0, P, VERSION)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.dash_attn.attention.default, (*leaves, None, None, None, SEEDS, torch.arange(4) / 8, *rest))
    with pytest.raises(ValueError, match=r"dropout needs a seed for each sequence; got dropout_p=0.3 and no dropout_seed"):
        torch.ops.dash_attn.attention(*leaves, None, None, None, None, None, *rest)


def test_modules_drop_in_training_only() -> None:
    torch.manual_seed(0)
    layer, x = SelfAttention(32, 4, dropout_p=0.5), torch.randn(2, 20, 32)
    plain = SelfAttention(32, 4)
    plain.load_state_dict(layer.state_dict())
    assert "dropout_p=0.5" in repr(layer)
    assert not same_bits(layer(x), layer(x))
    assert same_bits(layer(x, dropout_seed=SEEDS), layer(x, dropout_seed=SEEDS))
    assert same_bits(layer.eval()(x, dropout_seed=SEEDS), plain(x))
    with pytest.raises(ValueError, match="dropout_p must be 0, or from"):
        SelfAttention(32, 4, dropout_p=1.0)


def test_no_dropout_has_the_bits_that_it_had() -> None:
    inputs = random_inputs(100, 100, (2, 1), 8, batch=2)
    assert_same_bits(run_ours(inputs, Causal(), dropout_p=0.0, dropout_seed=SEEDS), run_ours(inputs, Causal()))


Q = torch.zeros(2, 10, 4, 8)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must be 0, or from 1/65536 to 1 - 1/65536; got 1.0"),
    ({"dropout_p": 1e-6}, ValueError, r"got 1e-06"),
    ({"dropout_p": 1 - 1e-6}, ValueError, r"got 0.999999"),
    ({"dropout_p": True}, ValueError, r"got True"),
    ({"dropout_p": "0.1"}, ValueError, r"got '0.1'"),
    ({"dropout_p": P, "dropout_seed": 5}, TypeError, r"dropout_seed must be a tensor or None; got int"),
    ({"dropout_p": P, "dropout_seed": torch.tensor(5)}, ValueError, r"must be 2 numbers of torch.int64, one per sequence; got .*\(\)"),
    ({"dropout_p": P, "dropout_seed": SEEDS.int()}, ValueError, r"got torch.int32 of shape \(2,\)"),
    ({"dropout_p": P, "dropout_seed": SEEDS.to("meta")}, ValueError, r"dropout_seed must be on the device of q, k and v \(cpu\); got meta"),
    ({"dropout_seed": SEEDS[:1]}, ValueError, r"dropout_seed must be 2 numbers"),
    (
        {"dropout_p": P, "mask": Documents((4, 6))},
        ValueError,
        r"one dropout_seed per document; got dropout_p=0.3 with a mask of 2 documents",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for function in (flash_attn_func, partial(explain, flash_attn_func)):
        with pytest.raises(error, match=message):
            function(Q, Q, Q, **options)


def test_hopper_refuses_by_name() -> None:
    """What it has no kernels for. The control: without dropout, or in order, it has."""
    x = torch.zeros(2, 256, 4, 64, device="meta", dtype=torch.bfloat16)
    unordered: dict[str, Any] = {"accumulation": "unordered", "backend": "hopper", "predict_time": False}
    with pytest.raises(ValueError, match=r"has it without softcap, dropout and ALiBi; got dropout_p=0\.3"):
        explain(flash_attn_func, x, x, x, P, **unordered)
    explain(flash_attn_func, x, x, x, **unordered)
    explain(flash_attn_func, x, x, x, P, backend="hopper", predict_time=False)


def test_explanations_say_so() -> None:
    assert "dropout 0.3, ALiBi" in explain(flash_attn_func, Q, Q, Q, P, alibi_slopes=torch.ones(4)).call


def test_packed_sequences_need_a_seed_each() -> None:
    x, ends = torch.zeros(10, 4, 8), torch.tensor([0, 4, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"dropout_seed must be 2 numbers of torch.int64"):
        flash_attn_varlen_func(x, x, x, ends, ends, 6, 6, P, dropout_seed=torch.arange(3))
