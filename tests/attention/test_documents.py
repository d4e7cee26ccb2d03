"""Documents in a row: each has the bits it has alone, and nothing of its neighbours reaches it, on both devices."""

from __future__ import annotations

import pytest
import torch

from dash_attn import Causal, Documents, Full, explain, flash_attn_func
from dense import Results, assert_same_bits, run_ours, same_bits
from devices import make_inputs, on_each_device

LENGTHS = (300, 1, 37, 302)  # no multiples of a tile


@on_each_device
@pytest.mark.parametrize("causal", [True, False])
def test_a_document_has_the_bits_it_has_alone(device: str, causal: bool) -> None:
    inputs = make_inputs(device, (640, 640), (4, 2), (64, 0), batch=2)
    together = run_ours(inputs, Documents(LENGTHS, causal))
    tokens = [x.split(LENGTHS, 1) for x in inputs]
    by_document = zip(*(x.split(LENGTHS, 2 if i == 1 else 1) for i, x in enumerate(together)), strict=True)
    for part, found in zip(zip(*tokens, strict=True), by_document, strict=True):
        assert_same_bits(Results(*found), run_ours(part, Causal() if causal else Full()), f"{part[0].shape[1]} tokens")
    shifted = run_ours(inputs, Documents((299, 2, 37, 302), causal))
    assert not same_bits(shifted.dq[:, :300], together.dq[:, :300])  # the control


@on_each_device
def test_a_nan_stays_in_its_document(device: str) -> None:
    inputs = make_inputs(device, (640, 640), (4, 2), (64, 0), batch=2)
    clean = run_ours(inputs, Documents(LENGTHS))
    for which in range(4):  # of q, k, v or dO
        poisoned = [x.clone() for x in inputs]
        poisoned[which][0, 310] = torch.nan  # in the third document of the first sequence
        found = run_ours(tuple(poisoned), Documents(LENGTHS))
        for name in ("out", "dq", "dk", "dv"):
            mine, theirs = getattr(found, name), getattr(clean, name)
            elsewhere = torch.ones(mine.shape[:2], dtype=torch.bool, device=device)
            elsewhere[0, 301:338] = False
            assert same_bits(mine[elsewhere], theirs[elsewhere]), f"{name} of another document changed"
        assert any(x.isnan().any() for x in (found.out, found.dq, found.dk, found.dv))  # the control


def test_explain_tells_the_order_of_each_alone() -> None:
    q, k, v, _ = make_inputs("cpu", (640, 640), (4, 2), (64, 0), torch.float32)
    several, whole = explain(flash_attn_func, q, k, v, mask=Documents(LENGTHS)), explain(flash_attn_func, q, k, v, causal=True)
    assert several.order_hash != whole.order_hash
    assert several.order_hash != explain(flash_attn_func, q, k, v, mask=Documents((37, 1, 300, 302))).order_hash
    assert several.schedule == "alternating"
    assert explain(flash_attn_func, q, k, v, mask=Documents(LENGTHS), schedule="weave").schedule == "weave"


def test_a_named_schedule_walks_the_whole_mask() -> None:
    """The same values, but tiles that documents share: other bits."""
    inputs = make_inputs("cpu", (640, 640), (4, 2), (64, 0), torch.float64)
    packed, whole = run_ours(inputs, Documents(LENGTHS)), run_ours(inputs, Documents(LENGTHS), schedule="weave")
    assert all(torch.allclose(a, b) for a, b in zip(packed, whole, strict=True))
    assert not same_bits(packed.dk, whole.dk)


def test_a_row_of_other_strides() -> None:
    inputs = make_inputs("cpu", (640, 640), (4, 2), (64, 0), torch.float32, batch=2)
    expected = flash_attn_func(*inputs[:3], mask=Documents(LENGTHS))
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:3]]
    assert same_bits(flash_attn_func(*views, mask=Documents(LENGTHS)), expected)
