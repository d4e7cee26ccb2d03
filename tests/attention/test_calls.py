"""How training programs call attention: checkpointing, autocast, one tensor three times. Both devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from budget import FLOOR
from dash_attn import Causal, Mask, Window, flash_attn_func, flash_attn_qkvpacked_func
from dense import assert_same_bits, dense, largest_error, run_ours, same_bits
from devices import dim_features, make_inputs, on_each_device, require
from families import NAMES, assert_same, family, named_gradients


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [True, False])
@on_each_device
def test_checkpointing_recomputes_the_same_bits(device: str, reentrant: bool, name: str) -> None:
    chosen = family(name, device)
    inputs = chosen.inputs(device)
    attend = chosen.attention()
    calls = []

    def counted(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return attend(*tensors)

    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], *inputs[4:])]
    out, lse = checkpoint(counted, *leaves, use_reentrant=reentrant)
    out.backward(inputs[3])
    gradients = named_gradients([leaf.grad for leaf in leaves])
    assert len(calls) == 2, "the control: it was computed again"
    assert_same({"out": out.detach(), "lse": lse.detach(), **gradients}, chosen.run(inputs))


class Layer(nn.Module):
    """What users put autocast around: projections in fp32, attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 3 * 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(-1, (3, 2, 64))
        return qkv, self.out(flash_attn_qkvpacked_func(qkv, causal=True).flatten(-2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_each_device
def test_autocast_around_a_layer(device: str, dtype: torch.dtype) -> None:
    """Projections hand 16-bit tensors over; attention computes as it does outside, and weights get fp32 gradients."""
    torch.manual_seed(0)
    layer = Layer().to(device)
    x = torch.randn(2, 150, 128, device=device)
    with torch.autocast(device, dtype):
        qkv, result = layer(x)
        inside = flash_attn_qkvpacked_func(qkv.detach(), causal=True)
    assert qkv.dtype == result.dtype == dtype
    assert same_bits(inside, flash_attn_qkvpacked_func(qkv.detach(), causal=True))
    result.float().square().sum().backward()
    first = [parameter.grad.clone() for parameter in layer.parameters()]
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() and gradient.any() for gradient in first[::2])


@on_each_device
def test_autocast_leaves_inputs_alone(device: str) -> None:
    """16-bit inputs give the same bits under autocast to the other 16-bit dtype, in the backward too."""
    inputs = make_inputs(device, (150, 150))
    expected = run_ours(inputs, Causal())
    with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
        assert_same_bits(run_ours(inputs, Causal()), expected)


@pytest.mark.gpu
def test_fp32_under_autocast_is_refused_on_the_gpu() -> None:
    """Nothing is rounded behind the caller's back."""
    q, k, v, _ = make_inputs("cuda", (64, 64), dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(ValueError, match=r"takes bfloat16 and float16; got torch.float32"):
        flash_attn_func(q, k, v)


@on_each_device
def test_mixed_dtypes_under_autocast_are_refused(device: str) -> None:
    """A rotary embedding in fp32 promotes q and k, not v."""
    q, k, v, _ = make_inputs(device, (64, 64))
    with (
        torch.autocast(device, torch.bfloat16),
        pytest.raises(ValueError, match=r"one dtype; got torch.float32, torch.float32, torch.bfloat16"),
    ):
        flash_attn_func(q.float(), k.float(), v)


@pytest.mark.parametrize("dim", [64, 128, 111])
@pytest.mark.parametrize("mask", [Causal(), Window(60, 20)], ids=str)
@on_each_device
def test_one_tensor_as_q_k_and_v(device: str, mask: Mask, dim: int) -> None:
    require(device, *dim_features(dim))
    x, *_, dout = make_inputs(device, (300, 300), (2, 2), (dim, 0))

    def gradient(attention: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(attention(leaf), leaf, dout.to(dtype))[0]

    with x.device:
        exact, plain = (gradient(lambda leaf: dense(leaf, leaf, leaf, mask)[0], dtype) for dtype in (torch.float64, x.dtype))
    ours = gradient(lambda leaf: flash_attn_func(leaf, leaf, leaf, mask=mask), x.dtype)
    assert largest_error(ours, exact) <= 2 * largest_error(plain, exact) + FLOOR * exact.abs().amax().item()
    alone = run_ours((x, x, x, dout), mask)
    assert largest_error(alone.dq, exact) > 10 * largest_error(ours, exact), "the control: one of three gradients is not enough"
