"""attn_mask of scaled_dot_product_attention: PyTorch's meaning, every shape that broadcasts, our bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dash_attn import BooleanMask
from dash_attn.integrations import sdpa
from dash_attn.integrations.sdpa import scaled_dot_product_attention
from dense import largest_error, random_inputs, run_ours, same_bits

SHAPES = [
    (150, 200),
    (1, 200),
    (150, 1),
    (4, 150, 200),
    (2, 1, 150, 200),
    (1, 4, 150, 200),
    (2, 4, 150, 200),
    (2, 1, 1, 200),
    (1, 1, 150, 1),
]


def run(inputs: list[Tensor], mask: Tensor, enable_gqa: bool = False) -> list[Tensor]:
    """Output and gradients of whatever the name stands for now."""
    *tensors, dout = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=enable_gqa)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def inputs_of(kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.transpose(1, 2) for x in random_inputs(150, 200, (4, kv_heads), 16, dtype, batch=2)]


def mask_of(shape: tuple[int, ...]) -> Tensor:
    """Each query attends a key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_means_what_pytorch_means(shape: tuple[int, ...], kv_heads: int) -> None:
    inputs, mask = inputs_of(kv_heads), mask_of(shape)
    expected = run(inputs, mask, kv_heads == 2)
    with sdpa.enable():
        ours = run(inputs, mask, kv_heads == 2)
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.shape == theirs.shape
        assert largest_error(mine, theirs) < 1e-12


def test_bits_are_those_of_flash_attn_func() -> None:
    inputs, mask = inputs_of(2, torch.bfloat16), mask_of((2, 4, 150, 200))
    expected = run_ours(tuple(x.transpose(1, 2) for x in inputs), mask)
    with sdpa.enable():
        ours = run(inputs, mask, enable_gqa=True)
    assert all(same_bits(a.transpose(1, 2), b) for a, b in zip(ours, (expected.out, *expected[2:]), strict=True))


def test_a_query_that_attends_nothing_has_output_zero() -> None:
    """PyTorch's CPU kernels say the same since 2.5. A softmax that is written out, as in older versions, says NaN."""
    inputs, mask = inputs_of(4), mask_of((150, 200))
    mask[7] = False
    with sdpa.enable():
        out, dq, dk, dv = run(inputs, mask)
    assert not out[:, :, 7].any()
    assert not dq[:, :, 7].any()
    assert not any(x.isnan().any() for x in (dk, dv))
    scores = (inputs[0] @ inputs[1].mT).masked_fill(~mask, -torch.inf)
    assert torch.softmax(scores, -1)[:, :, 7].isnan().all()
    others = [row for row in range(150) if row != 7]
    assert largest_error(out[:, :, others], functional.scaled_dot_product_attention(*inputs[:3], attn_mask=mask)[:, :, others]) < 1e-12


def test_compiled_programs_take_it() -> None:
    inputs = inputs_of(4, torch.float32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with sdpa.enable():
        for shape in ((150, 200), (2, 1, 1, 200)):
            mask = mask_of(shape)
            assert same_bits(program(*inputs[:3], mask), run(inputs, mask)[0])


@pytest.mark.parametrize(
    "mask", [[[True]], BooleanMask(torch.ones(10, 10, dtype=torch.bool)), "causal"], ids=["list", "BooleanMask", "text"]
)
def test_other_types_raise(mask: object) -> None:
    x = torch.zeros(1, 1, 10, 8)
    with pytest.raises(TypeError, match=r"attn_mask must be a boolean tensor or None; got"):
        scaled_dot_product_attention(x, x, x, attn_mask=mask)  # type: ignore[arg-type]


def test_ranks_that_share_a_sequence_take_none() -> None:
    x = torch.zeros(1, 1, 10, 8)
    with pytest.raises(ValueError, match="ranks that share a sequence take no attn_mask"):
        scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(10, 10, dtype=torch.bool), context_parallel=object())


def test_plain_calls_beside_those_of_pytorchs_context_parallel_take_it() -> None:
    """An encoder's, for example. Outside PyTorch's block no sequence is shared."""
    inputs = [x.transpose(1, 2) for x in random_inputs(150, 200, (2, 2), 8)]
    mask = torch.rand(150, 200) < 0.5
    with sdpa.enable():
        alone = run(inputs, mask)
    with sdpa.enable(context_parallel="torch"):
        beside = run(inputs, mask)
    assert all(map(same_bits, alone, beside))
