"""Views of all kinds: where the elements of a tensor lie in memory does not reach the bits. Both devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from budget import assert_near
from dash_attn import Causal, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from dense import Results, assert_same_bits, run_ours, same_bits
from devices import dim_features, make_inputs, on_each_device, require
from packed_batches import places

DIMS = [64, 128, 111]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(x: Tensor) -> Tensor:
    """One of several tensors side by side, as one projection makes them."""
    return torch.stack([x, x + 1, x - 1], 2)[:, :, 0]


def every_second(x: Tensor) -> Tensor:
    """Every second token of a longer sequence."""
    return torch.stack([x, x + 1], 2).flatten(1, 2)[:, ::2]


def flipped(x: Tensor) -> Tensor:
    """The head dim is not the one whose elements lie side by side."""
    return x.transpose(1, 3).contiguous().transpose(1, 3)


def offset(x: Tensor) -> Tensor:
    """Starts one element behind the beginning of its memory."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("view", [transposed, sliced, every_second, flipped, offset])
@pytest.mark.parametrize("dim", DIMS)
@on_each_device
def test_views(device: str, dim: int, view: Callable[[Tensor], Tensor]) -> None:
    require(device, *dim_features(dim))
    inputs = make_inputs(device, (150, 200), (4, 2), (dim, 0), batch=2)
    views = tuple(view(x) for x in inputs)
    assert all(torch.equal(a, b) for a, b in zip(views, inputs, strict=True))
    expected = run_ours(inputs, Causal())
    assert_same_bits(run_ours(views, Causal()), expected, "all of them")
    for place in range(4):
        assert_same_bits(run_ours((*inputs[:place], views[place], *inputs[place + 1 :]), Causal()), expected, f"input {place}")


@pytest.mark.parametrize("dim", DIMS)
@on_each_device
def test_keys_and_values_expanded_over_the_batch_and_over_heads(device: str, dim: int) -> None:
    """Stride 0: every element of the view has a gradient of its own, and PyTorch adds them up."""
    require(device, *dim_features(dim))
    q, k, v, dout = make_inputs(device, (150, 200), (4, 1), (dim, 0), batch=3)
    for what, small_k, small_v, shape in (("batch", k[:1], v[:1], (3, -1, -1, -1)), ("heads", k, v, (-1, -1, 4, -1))):
        leaves = [x.detach().requires_grad_() for x in (q, small_k, small_v)]
        wide = [leaf.expand(shape) for leaf in leaves[1:]]
        assert 0 in wide[0].stride()
        out, lse = flash_attn_func(leaves[0], *wide, causal=True, return_lse=True)
        gradients = torch.autograd.grad(out, [leaves[0], *wide, *leaves[1:]], dout)
        expected = run_ours((q, *(x.detach().contiguous() for x in wide), dout), Causal())
        assert_same_bits(Results(out.detach(), lse, *gradients[:3]), expected, what)
        for leaf, added, parts in zip(leaves[1:], gradients[3:], gradients[1:3], strict=True):
            assert added.shape == leaf.shape
            torch.testing.assert_close(added.float(), parts.float().sum_to_size(leaf.shape), rtol=0.02, atol=0.05)


@on_each_device
def test_the_gradient_of_packed_qkv_has_its_layout(device: str) -> None:
    q, k, v, dout = inputs = make_inputs(device, (200, 200), (2, 2), batch=2)
    qkv = torch.stack((q, k, v), 2).requires_grad_()
    out, lse = flash_attn_qkvpacked_func(qkv, causal=True, return_lse=True)
    (gradient,) = torch.autograd.grad(out, qkv, dout)
    ours = Results(out.detach(), lse, *gradient.unbind(2))
    assert_same_bits(ours, run_ours(inputs, Causal()))
    assert_near(ours, inputs, Causal())


@on_each_device
def test_views_of_a_packed_batch(device: str) -> None:
    """q, k and v as slices of one projection of all tokens."""
    require(device, "varlen")
    ends = places([70, 1, 129], device)
    tokens = [x[0] for x in make_inputs(device, (200, 200), (2, 2))]
    qkv = torch.stack(tokens[:3], 1).requires_grad_()
    arguments = (ends, ends, 129, 129)
    leaves = [x.clone().requires_grad_() for x in tokens[:3]]
    separate, packed = (flash_attn_varlen_func(*three, *arguments, causal=True) for three in (leaves, qkv.unbind(1)))
    assert same_bits(separate, packed)
    (gradient,) = torch.autograd.grad(packed, qkv, tokens[3])
    for one, other in zip(torch.autograd.grad(separate, leaves, tokens[3]), gradient.unbind(1), strict=True):
        assert same_bits(one, other)


@on_each_device
def test_a_gradient_that_is_one_number(device: str) -> None:
    """`out.sum().backward()` hands the backward an expanded scalar."""
    q, k, v, dout = make_inputs(device, (150, 200))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    flash_attn_func(*leaves, causal=True).sum().backward()
    expected = run_ours((q, k, v, torch.ones_like(dout)), Causal())
    for leaf, gradient in zip(leaves, expected[2:], strict=True):
        assert same_bits(leaf.grad, gradient)
