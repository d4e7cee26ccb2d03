"""Rotary embedding in a call with a cache: FlashAttention's meaning, and the bits of training that turns q and k by the same formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_with_kvcache
from dense import largest_error, random_inputs, same_bits

LENGTH, SLOTS, DIM, TURNING = 150, 192, 32, 24


def table(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.arange(SLOTS)[:, None] * 10000.0 ** -(torch.arange(TURNING // 2) / (TURNING // 2))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x: Tensor, first: int, interleaved: bool) -> Tensor:
    """The definition: pairs are complex numbers, (batch, length, heads, dim) in float64."""
    cos, sin = (one[first : first + x.shape[1]].double() for one in table())
    part = x[..., :TURNING].double()
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    product = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
    found = torch.view_as_real(product)
    return torch.cat([(found if interleaved else found.transpose(-1, -2)).flatten(-2), x[..., TURNING:].double()], -1)


def decoded(steps: list[int], interleaved: bool, dtype: torch.dtype = torch.float32, pad: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """The outputs of all steps, and the cache of keys."""
    q, k, v, _ = random_inputs(LENGTH, LENGTH, (4, 2), DIM, dtype, batch=2)
    caches = [torch.zeros(2, SLOTS, 2, DIM, dtype=dtype) for _ in range(2)]
    cos, sin = table(torch.float64 if dtype == torch.float64 else torch.float32)
    outputs, done = [], 0
    leftpad = torch.full((2,), pad, dtype=torch.int32) if pad else None
    for step in steps:
        new = slice(done, done + step)
        places = {"cache_seqlens": torch.full((2,), pad + done, dtype=torch.int32), "cache_leftpad": leftpad, "causal": True}
        rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        outputs.append(flash_attn_with_kvcache(q[:, new], *caches, k[:, new], v[:, new], **{**places, **rotary, **options}))
        done += step
    return torch.cat(outputs, 1), caches[0]


@pytest.mark.parametrize("interleaved", [True, False])
def test_it_means_what_the_definition_says(interleaved: bool) -> None:
    out, keys = decoded([100, 49, 1], interleaved, torch.float64)
    q, k, v, _ = random_inputs(LENGTH, LENGTH, (4, 2), DIM, torch.float64, batch=2)
    assert largest_error(keys[:, :LENGTH], turned(k, 0, interleaved)) < 1e-6
    expected = flash_attn_func(turned(q, 0, interleaved), turned(k, 0, interleaved), v, causal=True)
    assert largest_error(out, expected) < 1e-6
    assert largest_error(out, flash_attn_func(turned(q, 0, not interleaved), turned(k, 0, not interleaved), v, causal=True)) > 1e-3


@pytest.mark.parametrize("pad", [0, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_have_the_bits_of_one_call(dtype: torch.dtype, pad: int) -> None:
    """The control: windows."""
    whole, keys = decoded([LENGTH], True, dtype, pad)
    steps, same_keys = decoded([70, 1, 78, 1], True, dtype, pad)
    assert same_bits(steps, whole)
    assert same_bits(same_keys, keys)
    assert not same_bits(decoded([LENGTH], True, dtype, pad, window_size=(20, 0))[0], whole)


@pytest.mark.parametrize("interleaved", [True, False])
def test_padding_is_not_taken_off(interleaved: bool) -> None:
    """As in FlashAttention keys turn by their slots: those of a prompt may have been turned so elsewhere. The control: positions."""
    out, keys = decoded([100, 50], interleaved, torch.float64, pad=33)
    q, k, v, _ = random_inputs(LENGTH, LENGTH, (4, 2), DIM, torch.float64, batch=2)
    assert largest_error(keys[:, 33 : 33 + LENGTH], turned(k, 33, interleaved)) < 1e-6
    assert largest_error(out, flash_attn_func(turned(q, 33, interleaved), turned(k, 33, interleaved), v, causal=True)) < 1e-6
    assert largest_error(keys[:, 33 : 33 + LENGTH], turned(k, 0, interleaved)) > 1e-3


def test_where_every_key_is_attended_all_queries_turn_as_the_first_new_key() -> None:
    q, k, v, _ = random_inputs(3, 5, (4, 2), DIM, torch.float64, batch=2)
    caches = [torch.zeros(2, SLOTS, 2, DIM, dtype=torch.float64) for _ in range(2)]
    cos, sin = table(torch.float64)
    out = flash_attn_with_kvcache(q, *caches, k, v, cos, sin, cache_seqlens=7)
    at_7 = torch.cat([turned(q[:, i : i + 1], 7, True) for i in range(3)], 1)
    assert largest_error(out, flash_attn_func(at_7, caches[0][:, :12], caches[1][:, :12])) < 1e-6
    assert largest_error(caches[0][:, 7:12], turned(k, 7, True)) < 1e-6


def test_a_compiled_step_has_the_same_bits() -> None:
    def run(step: Any) -> Tensor:
        q, k, v, _ = random_inputs(1, 1, (4, 2), DIM, torch.float32, batch=2)
        caches = [torch.ones(2, SLOTS, 2, DIM) for _ in range(2)]
        places = torch.tensor([5, 9], dtype=torch.int32)
        out: Tensor = step(q, *caches, k, v, *table(), cache_seqlens=places, causal=True)
        return torch.cat([out.flatten(), caches[0].flatten()])

    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    assert same_bits(run(compiled), run(flash_attn_with_kvcache))


COS, SIN = table()
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rotary_sin": None}, TypeError, r"rotary_sin must be a tensor; got NoneType"),
    ({"rotary_cos": COS[:-1], "rotary_sin": SIN[:-1]}, ValueError, r"rotary_cos must have a row for each of the 192 positions; got 191"),
    ({"rotary_sin": SIN[:, 1:]}, ValueError, r"must both be \(positions, dims\), dims at most half of the head dim 32; got .* \(192, 11\)"),
    ({"rotary_cos": COS.to("meta"), "rotary_sin": SIN.to("meta")}, ValueError, r"must be on the device of q \(cpu\); got meta and meta"),
    ({"k": None, "v": None}, ValueError, r"k and v must be given with rotary_cos; got none"),
    ({"q": torch.zeros(2, 2, 4, DIM)}, ValueError, r"need as many queries as new keys; got 2 and 1"),
    ({"first_position": torch.zeros(2, dtype=torch.int32)}, ValueError, r"first_position must be a number"),
    ({"cache_seqlens": SLOTS}, ValueError, r"the cache is full: sequence 0 has 192 of 192 slots in use and 1 new keys"),
    ({"rotary_cos": COS.clone().requires_grad_()}, ValueError, r"no backward, and rotary_cos requires a gradient"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_cannot_be_turned_raises(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    cache, new = torch.zeros(2, SLOTS, 2, DIM), torch.zeros(2, 1, 2, DIM)
    given = {
        "q": torch.zeros(2, 1, 4, DIM),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "k": new,
        "v": new,
        "cache_seqlens": 3,
        "causal": True,
    }
    given |= {"rotary_cos": COS, "rotary_sin": SIN}
    flash_attn_with_kvcache(**given)  # the control
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**{**given, **changes})
