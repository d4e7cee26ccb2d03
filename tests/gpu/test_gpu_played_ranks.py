"""Devices that share a sequence, played by one process on one GPU: the bits of the whole call, whatever the devices and the sharding."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, Mask, Prefix, Window, flash_attn_func
from dash_attn.call.call import Call
from dash_attn.call.options import Choices, options_for
from dash_attn.distributed.context.loopback import play_all_ranks
from dash_attn.distributed.context.shared_call import SharedCall
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.scheduling.ranks.units import Unit
from dense import Results, assert_same_bits
from gpu_helpers import DEVICE, hopper, patched_backend, poisoned_memory
from inputs import make_inputs
from played_ranks import Case, in_random_order, play_forward, play_ranks

pytestmark = pytest.mark.gpu

REPEATS = 20
DIMS = [(64, 64), (128, 128), (96, 96), (192, 128), (192, 192), (256, 256), (59, 40)]
MASKS = [Causal(), Window(700, 0), Window(300, 200), Full()]
dims = pytest.mark.parametrize("dims", DIMS, ids=str)
masks = pytest.mark.parametrize("mask", MASKS, ids=str)


def whole_call(case: Case, sinks: Tensor | None = None) -> tuple[Results, tuple[Tensor, ...]]:
    """Of one device that has everything, and its q, k, v and dO."""
    rows = case.sharding.rows
    tensors = make_inputs(DEVICE, (rows, rows), case.heads, case.dims, case.dtype, case.batch)
    q, k, v, dout = tensors
    inputs = [x.requires_grad_() for x in (q, k, v)]
    chosen = {"mask": case.mask, "schedule": case.schedule, "softcap": case.softcap, "head_offset": case.head_offset}
    out, lse = flash_attn_func(*inputs, sinks=sinks, return_lse=True, **chosen)
    gradients = torch.autograd.grad(out, inputs, dout)
    return Results(out.detach(), lse.detach(), *gradients), tuple(x.detach() for x in tensors)


def shared_call(case: Case, tensors: tuple[Tensor, ...], **rest: object) -> Results:
    """The same from devices that have their own rows alone."""
    q, k, v, dout = tensors
    out, lse = play_forward(case, q, k, v)
    return Results(out, lse, *play_ranks(case, (dout, q, k, v, out, lse), **rest).gradients)  # type: ignore[arg-type]


def assert_same(case: Case, **rest: object) -> None:
    expected, tensors = whole_call(case)
    with poisoned_memory():
        found = shared_call(case, tensors, **rest)
    assert_same_bits(found, expected, str(case))


@dims
@masks
@pytest.mark.parametrize("devices", [2, 4])
def test_bits_of_the_whole_call(devices: int, mask: Mask, dims: tuple[int, int]) -> None:
    assert_same(Case(mask, Sharding.zigzag(2048, devices), (4, 4), dims, together=2))


@dims
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eight_devices(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    assert_same(Case(Causal(), Sharding.zigzag(4096, 8), (4, 2), dims, dtype=dtype, together=2))
    assert_same(Case(Causal(), Sharding.contiguous(4096, 8), (2, 2), dims, dtype=dtype))


@dims
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
@pytest.mark.parametrize(("rows", "heads"), [(4096, (8, 2)), (1536, (10, 2)), (2048, (7, 1))], ids=str)
def test_groups_in_parts(rows: int, heads: tuple[int, int], mask: Mask, dims: tuple[int, int]) -> None:
    """Parts of several query heads and of one; sums of one kind and of two."""
    for offset, together, batch in ((0, 1, 1), (1, 3, 1), (0, 6, 2)):
        assert_same(Case(mask, Sharding.zigzag(rows, 2), heads, dims, head_offset=offset, together=together, batch=batch))


@dims
def test_uneven_chunks(dims: tuple[int, int]) -> None:
    uneven = Sharding((128, 256, 128, 128, 256, 200), (0, 1, 2, 2, 1, 0))
    for mask in MASKS:
        assert_same(Case(mask, uneven, (4, 2), dims, batch=2, together=3))


@dims
def test_one_rank_with_many_chunks(dims: tuple[int, int]) -> None:
    """Full masks without gangs: any number of SMs could run it."""
    assert_same(Case(Full(), Sharding((512,) * 8, (0,) * 8), (4, 2), dims, together=4))


@dims
@pytest.mark.parametrize("mask", [Prefix(700), Documents((1000, 40, 1008))], ids=str)
def test_masks_by_row(mask: Mask, dims: tuple[int, int]) -> None:
    assert_same(Case(mask, Sharding.zigzag(2048, 2), (4, 2), dims, schedule="alternating", together=2))


@dims
def test_softcap(dims: tuple[int, int]) -> None:
    assert_same(Case(Causal(), Sharding.zigzag(2048, 2), (4, 2), dims, softcap=10.0, together=2))


@pytest.mark.parametrize("seed", range(3))
def test_another_sequence_of_units(seed: int) -> None:
    for mask in (Causal(), Full()):
        case = Case(mask, Sharding.zigzag(2048, 4), (4, 2), (128, 128), together=2)
        assert_same(case, units=in_random_order(case.shared, seed))


@pytest.mark.parametrize("together", [1, 2, 5])
def test_keys_that_come_in_several_tensors(together: int) -> None:
    assert_same(Case(Causal(), Sharding.zigzag(2048, 2), (8, 4), (128, 128), batch=2, together=together), gathers=2)
    assert_same(Case(Causal(), Sharding.zigzag(2048, 2), (8, 4), (128, 128), together=together), gathers=4)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_the_same_in_every_run(dims: tuple[int, int]) -> None:
    case = Case(Causal(), Sharding.zigzag(8192, 4), (8, 4), dims, together=4)
    expected, tensors = whole_call(case)
    for number in range(REPEATS):
        assert_same_bits(shared_call(case, tensors), expected, f"run {number}")


def test_a_rounded_state_changes_bits() -> None:
    """The control: what travels is float32."""
    case = Case(Causal(), Sharding.zigzag(2048, 2), (4, 4), (128, 128))
    expected, tensors = whole_call(case)

    def round_state(unit: Unit, state: Tensor) -> None:
        if unit.before is not None:
            state.copy_(state.bfloat16().float())

    found = shared_call(case, tensors, change=round_state)
    assert all(torch.equal(a, b) for a, b in zip(expected[:3], found[:3], strict=True)), "O, LSE and dQ need no states"
    assert not torch.equal(expected.dk, found.dk)
    assert not torch.equal(expected.dv, found.dv)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_sinks_and_gradients_of_the_lse(dims: tuple[int, int]) -> None:
    case = Case(Causal(), Sharding.zigzag(2048, 4), (4, 2), dims, batch=2, together=2)
    rows = case.sharding.rows
    q, k, v, dout = make_inputs(DEVICE, (rows, rows), case.heads, case.dims, case.dtype, case.batch)
    sinks = torch.randn(4, device=DEVICE)
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
    out, lse = flash_attn_func(q, k, v, mask=case.mask, sinks=sinks, return_lse=True)
    dlse = torch.randn_like(lse)
    *expected, dsinks = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    q, k, v, sinks, out, lse = (x.detach() for x in (q, k, v, sinks, out, lse))
    assert all(torch.equal(a, b) for a, b in zip((out, lse), play_forward(case, q, k, v, sinks), strict=True))
    played = play_ranks(case, (dout, q, k, v, out, lse), dlse=dlse)
    assert all(torch.equal(a, b) for a, b in zip(expected, played.gradients, strict=True))
    leg_tables = import_module("dash_attn.backends.hopper.calls.leg_tables")
    tiles = [leg_tables.RankRows(case.problem, case.sharding, rank).q_tiles for rank in range(4)]
    place = torch.from_numpy(np.argsort(np.concatenate(tiles))).to(DEVICE)
    gathered = torch.cat([backward.rows_of_sinks for backward in played.backwards], dim=3)[:, :, :, place]
    total = torch.zeros(4, device=DEVICE)
    for part in played.backwards[0].sink_gradients(gathered, sinks):
        total += part
    assert torch.equal(total, dsinks)


@dims
def test_ranks_in_one_process(dims: tuple[int, int]) -> None:
    """What context_parallel_attention does, with keys that come in gathers and states that are copied."""
    case = Case(Causal(), Sharding.zigzag(2048, 4), (12, 6), dims)
    expected, (q, k, v, dout) = whole_call(case)
    found = play_all_ranks(SharedCall(case.options, case.sharding, 1, 6, 2, dims, "hopper"), q, k, v, dout)
    assert_same_bits(Results(found.out, found.lse, found.dq, found.dk, found.dv), expected)


@pytest.mark.parametrize("workers", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_any_number_of_sms(dims: tuple[int, int], workers: int) -> None:
    """A full mask has gangs of up to 16 chains. On fewer SMs the same call runs in legs, with the same bits."""
    q, k, v, dout = make_inputs(DEVICE, (4096, 3000), (4, 2), dims, batch=2)
    sinks = torch.randn(4, device=DEVICE)
    inputs = [x.requires_grad_() for x in (q, k, v, sinks)]

    def run() -> tuple[Tensor, ...]:
        out, lse = flash_attn_func(q, k, v, sinks=sinks, return_lse=True)
        return out, lse, *torch.autograd.grad([out, lse], inputs, [dout, lse.detach()])

    def few(index: int) -> int:
        return workers

    expected = run()
    with patched_backend({(module, "sm_count"): few for module in ("calls.backward_setup", "calls.rank_backward")}), poisoned_memory():
        found = run()
        made = hopper("calls.backward_setup").backward_setup(Call(q, k, v, options_for(Choices(mask=Full()), dims[0])))
        assert (made.legs is not None) == (workers < made.gang)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@dims
@masks
def test_launches_that_overlap(mask: Mask, dims: tuple[int, int]) -> None:
    for sharding in (Sharding.zigzag(2048, 2), Sharding.contiguous(2048, 4), Sharding((512,) * 4, (0,) * 4)):
        assert_same(Case(mask, sharding, (4, 2), dims, together=2), overlap=True)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_overlapping_launches_are_the_same_in_every_run(dims: tuple[int, int]) -> None:
    case = Case(Causal(), Sharding((2048,) * 4, (0,) * 4), (8, 4), dims, together=4)
    expected, tensors = whole_call(case)
    for number in range(REPEATS):
        assert_same_bits(shared_call(case, tensors, overlap=True), expected, f"run {number}")


def test_head_by_head_and_together_are_the_same() -> None:
    case = Case(Causal(), Sharding.zigzag(4096, 2), (8, 4), (128, 128))
    expected, tensors = whole_call(case)
    for together in (1, 2, 4):
        assert_same_bits(shared_call(replace(case, together=together), tensors), expected, f"{together} together")
