"""schedule= takes a Schedule or its JSON text: the order that was saved is the order that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn import (
    Causal,
    Documents,
    Full,
    Mask,
    ScheduleError,
    Window,
    explain,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from dash_attn.backends.cpu.recorder import record_backward
from dash_attn.call.call import Call, Grads, Saved
from dash_attn.call.options import AttentionOptions, Choices, options_for
from dash_attn.execution.interleaving import interleaving
from dash_attn.integrations import sdpa
from dash_attn.nn import SelfAttention
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.scheduling.order import ALL_GUARANTEES, RUN_TO_RUN, HeadOrder, Order, turn_within
from dense import assert_same_bits, random_inputs, run_ours, same_bits

LENGTH = 600


def saved(name: str, mask: Mask, length: int = LENGTH, workers: int = 16, **rest: int) -> Schedule:
    return generate(name, Problem(mask, length, length, 64, 128, **rest), workers)


def shuffled(mask: Mask, length: int = LENGTH) -> Schedule:
    """An order of no generator, which claims everything."""
    problem = Problem(mask, length, length, 64, 128)
    start = np.random.default_rng(3).permutation(problem.kv_tiles)
    chain, q_tile = np.nonzero(problem.kept.T)
    kind = HeadOrder.build(chain, q_tile, turn_within(q_tile, np.argsort(start)[chain]), np.zeros(problem.kv_tiles, dtype=np.int64))
    return Schedule.build(problem, Order("weave", (kind,), ALL_GUARANTEES), (start,), 16)


def leaves(*shape: int, count: int = 3) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("mask", [Causal(), Full(), Window(200, 50), Documents((450, 150))], ids=str)
@pytest.mark.parametrize("name", ["weave", "alternating", "ascending"])
def test_a_saved_schedule_has_the_bits_of_its_name(name: str, mask: Mask) -> None:
    """It was saved for one sequence of one head; this is a batch of two with grouped heads."""
    inputs, schedule = random_inputs(LENGTH, LENGTH, (4, 2), batch=2), saved(name, mask)
    expected = run_ours(inputs, mask, schedule=name)
    ways = (schedule.to_json(), schedule, f"\n {schedule.to_json()}\n", Schedule.from_json(schedule.to_json()))
    for given in ways if mask == Causal() else ways[:1]:
        assert_same_bits(run_ours(inputs, mask, schedule=given), expected)
    other = run_ours(inputs, mask, schedule="descending")
    assert not all(map(same_bits, other, expected)), "the control: another order has other bits"


def test_an_order_of_ones_own() -> None:
    inputs, schedule = random_inputs(LENGTH, LENGTH, (4, 2), batch=2), shuffled(Causal())
    expected = run_ours(inputs, Causal(), schedule=schedule)
    for name in ("auto", "weave", "ascending", "spt"):
        assert not same_bits(run_ours(inputs, Causal(), schedule=name).dq, expected.dq), name
    for seed in range(4):
        with interleaving(seed, threads=seed == 3, workers=7):
            assert_same_bits(run_ours(inputs, Causal(), schedule=schedule), expected, f"interleaving {seed}")


def test_explain_tells_what_is_proven() -> None:
    q = torch.zeros(2, LENGTH, 4, 16)
    named, given = (explain(flash_attn_func, q, q, q, causal=True, schedule=s) for s in ("weave", saved("weave", Causal())))
    assert (given.schedule, given.order_hash, given.guarantees) == ("weave (given)", named.order_hash, named.guarantees)
    own = explain(flash_attn_func, q, q, q, causal=True, schedule=shuffled(Causal()))
    assert (own.schedule, own.guarantees) == ("weave (given)", (RUN_TO_RUN,))
    assert own.order_hash != named.order_hash


def test_explain_on_hopper() -> None:
    """Tiles of head dim 64 there are 128 x 128."""
    q = torch.zeros(2, LENGTH, 32, 64, device="meta", dtype=torch.bfloat16)
    k = q[:, :, :2]  # groups of 16 in three parts
    schedule = generate("weave", Problem(Causal(), LENGTH, LENGTH, 128, 128), 132)
    named, given = (explain(flash_attn_func, q, k, k, causal=True, backend="hopper", schedule=s) for s in ("weave", schedule))
    assert replace(given, schedule="weave") == named
    with pytest.raises(ScheduleError, match=r"for tile_q 64; the call has tile_q 128\."):
        explain(flash_attn_func, q, k, k, causal=True, backend="hopper", schedule=saved("weave", Causal()))


MISFITS: list[tuple[str, str | Schedule, str]] = [
    ("mask", saved("weave", Full()), "for mask full; the call has mask causal"),
    ("lengths", saved("weave", Causal(), 601), "for q_len 601, kv_len 601; the call has q_len 600, kv_len 600"),
    ("tiles", generate("weave", Problem(Causal(), LENGTH, LENGTH, 128, 128), 8), "for tile_q 128; the call has tile_q 64"),
    ("no JSON", "{weave}", "a schedule"),
    ("no schedule", "{}", "the JSON of a schedule lacks problem"),
]


@pytest.mark.parametrize(("schedule", "said"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_what_does_not_fit_is_refused_before_anything_runs(schedule: str | Schedule, said: str) -> None:
    q, k, v, _ = random_inputs(LENGTH, LENGTH)
    with pytest.raises(ValueError, match=said):
        flash_attn_func(q, k, v, causal=True, schedule=schedule)  # no gradient asked for, no backward
    with pytest.raises(ValueError, match=said):
        explain(flash_attn_func, q, k, v, causal=True, schedule=schedule)
    flash_attn_func(q, k, v, causal=True, schedule=saved("weave", Causal()))


def test_packed_sequences_take_none() -> None:
    q, ends = torch.zeros(LENGTH, 2, 16), torch.tensor([0, LENGTH], dtype=torch.int32)
    arguments: Any = (q, q, q, ends, ends, LENGTH, LENGTH)
    for given in (saved("weave", Causal()), saved("weave", Causal()).to_json()):
        with pytest.raises(ValueError, match=r"planned one by one.*got the schedule weave \(given\)"):
            flash_attn_varlen_func(*arguments, causal=True, schedule=given)
    with pytest.raises(Exception, match="planned one by one"):  # what the compiler makes of a ValueError
        compiled(flash_attn_varlen_func)(*arguments, causal=True, schedule=saved("weave", Causal()).to_json())
    flash_attn_varlen_func(*arguments, causal=True, schedule="weave")


def test_a_gang_runs_on_fewer_workers() -> None:
    inputs = random_inputs(17 * 128, 17 * 128, (1, 1), dim=8)
    schedule = saved("shift_blocks", Full(), 17 * 128, workers=132)
    expected = run_ours(inputs, Full(), schedule="shift_blocks")
    for workers in (1, schedule.gang - 1, schedule.gang):
        with interleaving(0, workers=workers):
            assert_same_bits(run_ours(inputs, Full(), schedule=schedule), expected)


def test_options_hold_the_text_once() -> None:
    schedule = saved("weave", Causal())
    options = options_for(Choices(schedule=schedule), 64)
    assert options.schedule is schedule.to_json()
    assert options_for(Choices(schedule=schedule.to_json()), 64) is options
    assert options == AttentionOptions(Full(), 0.125, schedule=saved("weave", Causal()).to_json())
    assert options != AttentionOptions(Full(), 0.125, schedule=saved("spt", Causal()).to_json())
    assert options.gives_schedule
    assert not AttentionOptions(Full(), 0.125).gives_schedule


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_a_compiled_program_takes_the_text() -> None:
    tensors, schedule = leaves(1, LENGTH, 2, 16), saved("weave", Causal())

    def run(function: Any, schedule: str | Schedule) -> list[Tensor]:
        return list(torch.autograd.grad(function(*tensors, causal=True, schedule=schedule).square().sum(), tensors))

    attend = compiled(flash_attn_func)
    for given in (schedule.to_json(), shuffled(Causal()).to_json()):
        assert all(map(same_bits, run(attend, given), run(flash_attn_func, given)))
    with pytest.raises(Exception, match=r"pass schedule\.to_json\(\)"):
        run(attend, schedule)


def test_an_exported_program_keeps_the_text() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flash_attn_func(q, q, q, causal=True, schedule=TEXT)

    q = torch.randn(1, LENGTH, 2, 16)
    assert same_bits(torch.export.export(Model(), (q,)).module()(q), Model()(q))


TEXT = saved("weave", Causal()).to_json()


def test_a_module_keeps_it_as_text() -> None:
    torch.manual_seed(0)
    layer = SelfAttention(32, 2, schedule=shuffled(Causal()))
    named = SelfAttention(32, 2, schedule="weave")
    named.load_state_dict(layer.state_dict())
    assert "schedule='weave (given)'" in repr(layer)
    x = torch.randn(1, LENGTH, 32)
    ours, again, compared, traced = (torch.autograd.grad(f(x).square().sum(), layer.qkv.weight if f is not named else named.qkv.weight)[0]
                                     for f in (layer, layer, named, compiled(layer)))  # fmt: skip
    assert same_bits(ours, again)
    assert same_bits(ours, traced)
    assert not same_bits(ours, compared)


def test_other_doors() -> None:
    schedule = shuffled(Causal())
    q, k, v = leaves(1, LENGTH, 2, 16)
    expected = torch.autograd.grad(flash_attn_func(q, k, v, causal=True, schedule=schedule).sum(), q)
    with sdpa.enable(schedule=schedule):
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True)
    assert same_bits(torch.autograd.grad(out.sum(), q)[0], expected[0])
    qkv = torch.stack([q, k, v], 2)
    out = flash_attn_qkvpacked_func(qkv, causal=True, schedule=schedule)
    assert same_bits(torch.autograd.grad(out.sum(), q)[0], expected[0])


def test_it_can_be_recorded() -> None:
    q, k, v, dout = random_inputs(LENGTH, LENGTH)
    options = AttentionOptions(Causal(), 0.1, schedule=shuffled(Causal()).to_json())
    out, lse = flash_attn_func(q, k, v, causal=True, softmax_scale=0.1, return_lse=True)
    times = record_backward(Call(q, k, v, options), Saved(out, lse), Grads(dout), workers=4)
    assert len(times.q_tile) == Problem(Causal(), LENGTH, LENGTH, heads=2).tasks
