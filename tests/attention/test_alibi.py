"""ALiBi: slope times distance is taken off every score."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, Mask, Window, explain, flash_attn_func
from dash_attn.nn import SelfAttention
from dense import Results, assert_same_bits, random_inputs, run_ours, same_bits
from kept_pairs import dense_modified
from packed_batches import run_packed

BY_HEAD = torch.tensor([0.5, 0.25, 0.1, 0.0])
BY_SEQUENCE = torch.stack([BY_HEAD, BY_HEAD.flip(0) + 0.3])


@pytest.mark.parametrize("slopes", [BY_HEAD, BY_SEQUENCE], ids=["by head", "by sequence"])
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(40, 10)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_results_are_those_of_the_definition(mask: Mask, slopes: Tensor, softcap: float) -> None:
    """FlashAttention's: the last query is at the last key; the bias comes behind the softcap."""
    q, k, v, dout = random_inputs(150, 180, (4, 2), 8, torch.float64, batch=2)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.zeros(4, dtype=torch.float64))]
    own: dict[str, Any] = {"sinks": leaves[3], "softcap": softcap}
    ours = flash_attn_func(q, k, v, mask=mask, alibi_slopes=slopes, return_lse=True, **own)
    truth = dense_modified(q, k, v, mask, slopes=slopes, **own)
    gradients = [torch.autograd.grad(pair, leaves, (dout, pair[1].detach())) for pair in (ours, truth)]
    for one, other in zip((*ours, *gradients[0]), (*truth, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def with_slopes(inputs: tuple[Tensor, ...], slopes: Tensor, mask: Mask = Causal(), **options: Any) -> Results:  # noqa: B008  frozen
    return run_ours(inputs, mask, alibi_slopes=slopes, **options)


def test_bits_do_not_depend_on_the_batch_or_on_packing() -> None:
    batch = random_inputs(150, 150, (4, 2), 8, batch=2)
    together = with_slopes(batch, BY_SEQUENCE)
    parts = [tuple(x[i : i + 1] for x in batch) for i in (0, 1)]
    packed = run_packed(parts, Causal(), alibi_slopes=BY_SEQUENCE)  # type: ignore[arg-type]
    for i, part in enumerate(parts):
        alone = with_slopes(part, BY_SEQUENCE[i])
        assert_same_bits(Results(*(x[i : i + 1] for x in together)), alone)
        assert_same_bits(packed[i], alone)
    assert not same_bits(with_slopes(batch, BY_SEQUENCE.flip(0)).out, together.out)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_as_alone(causal: bool) -> None:
    batch = random_inputs(150, 150, (4, 2), 8, batch=2)
    found = with_slopes(batch, BY_SEQUENCE, Documents((60, 90), causal=causal))
    for sequence in (0, 1):
        for rows in (slice(0, 60), slice(60, 150)):
            part = tuple(x[sequence : sequence + 1, rows] for x in batch)
            alone = with_slopes(part, BY_SEQUENCE[sequence], Causal() if causal else Full())
            assert same_bits(found.out[sequence, rows], alone.out[0])
            assert same_bits(found.dk[sequence, rows], alone.dk[0])


def test_slopes_of_zero_are_none() -> None:
    inputs = random_inputs(100, 100, (4, 2), 8)
    assert_same_bits(with_slopes(inputs, torch.zeros(4)), run_ours(inputs, Causal()))
    assert not same_bits(with_slopes(inputs, BY_HEAD).out, run_ours(inputs, Causal()).out)


def test_modules_keep_them() -> None:
    torch.manual_seed(0)
    layer, x = SelfAttention(32, 4, alibi_slopes=BY_HEAD), torch.randn(2, 20, 32)
    assert "alibi_slopes" in layer.state_dict()
    flat = SelfAttention(32, 4, alibi_slopes=torch.zeros(4))
    flat.load_state_dict(layer.state_dict())
    assert same_bits(layer(x), flat(x))
    with pytest.raises(ValueError, match="alibi_slopes must be a tensor of 4 numbers, one per head"):
        SelfAttention(32, 4, alibi_slopes=torch.zeros(3))


Q = torch.zeros(2, 10, 4, 8)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (0.5, TypeError, r"alibi_slopes must be a tensor or None; got float"),
    (torch.ones(2), ValueError, r"of shape \(4,\), one per query head, or \(2, 4\); got torch.float32 of shape \(2,\)"),
    (torch.ones(4, dtype=torch.int64), ValueError, r"must be floating-point numbers .*got torch.int64"),
    (torch.ones(4, device="meta"), ValueError, r"on the device of q, k and v \(cpu\); got meta"),
    (torch.ones(4, requires_grad=True), ValueError, r"alibi_slopes get no gradient.*pass alibi_slopes.detach\(\)"),
]


@pytest.mark.parametrize(("slopes", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_is_refused(slopes: Any, error: type[Exception], message: str) -> None:
    for function in (flash_attn_func, partial(explain, flash_attn_func)):
        with pytest.raises(error, match=message):
            function(Q, Q, Q, alibi_slopes=slopes)


def test_parameters_may_be_slopes_where_nobody_differentiates() -> None:
    with torch.no_grad():
        flash_attn_func(Q, Q, Q, alibi_slopes=torch.nn.Parameter(BY_HEAD.clone()))


def test_hopper_refuses_by_name() -> None:
    x = torch.zeros(2, 256, 4, 64, device="meta", dtype=torch.bfloat16)
    slopes: dict[str, Any] = {"alibi_slopes": torch.ones(4, device="meta"), "backend": "hopper", "predict_time": False}
    with pytest.raises(ValueError, match="has it without softcap, dropout and ALiBi; got alibi_slopes"):
        explain(flash_attn_func, x, x, x, accumulation="unordered", **slopes)
    with pytest.raises(ValueError, match=r"softcap with dropout or with ALiBi, not with both; got softcap=5\.0, dropout_p=0\.1"):
        explain(flash_attn_func, x, x, x, 0.1, softcap=5.0, **slopes)
    explain(flash_attn_func, x, x, x, 0.1, **slopes)
    explain(flash_attn_func, x, x, x, softcap=5.0, **slopes)
