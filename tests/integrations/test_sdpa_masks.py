"""attn_mask of scaled_dot_product_attention: PyTorch's meaning, every shape that broadcasts, our bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from dash_attn import BooleanMask, Causal, flash_attn_func
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
    """Each query attends to a key."""
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


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("lengths", [(150, 200), (150, 150)], ids=str)
def test_causal_biases_of_pytorch_are_masks_by_name(bias: Callable[..., Tensor], lengths: tuple[int, int]) -> None:
    inputs = [x.transpose(1, 2) for x in random_inputs(*lengths, (4, 4), 16, torch.float64, batch=2)]
    expected = run(inputs, bias(*lengths))
    with sdpa.enable():
        ours = run(inputs, bias(*lengths))
    for mine, theirs in zip(ours, expected, strict=True):
        assert largest_error(mine, theirs) < 1e-12
    aligned = {"mask": Causal()} if bias is causal_lower_right else {"window_size": (-1, 0)}
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    k, v = (x if bias is causal_lower_right else x[:, : q.shape[1]] for x in (k, v))
    assert same_bits(ours[0].transpose(1, 2), flash_attn_func(q, k, v, **aligned))


PAD = torch.zeros(2, 12, dtype=torch.bool)
PAD[0, 8:] = True
SQUARE = nn.Transformer.generate_square_subsequent_mask(12)
MODULES: dict[str, tuple[Callable[[], nn.Module], int, Callable[[Any, Tensor], Tensor]]] = {
    "padding": (lambda: nn.MultiheadAttention(32, 4, batch_first=True), 1, lambda m, x: m(x, x, x, PAD, need_weights=False)[0]),
    "matrix": (
        lambda: nn.MultiheadAttention(32, 4, batch_first=True),
        1,
        lambda m, x: m(x, x, x, attn_mask=SQUARE < 0, need_weights=False)[0],
    ),
    "both, one sequence": (
        lambda: nn.MultiheadAttention(32, 4, batch_first=True),
        1,
        lambda m, x: m(x[0], x[0], x[0], PAD[0], attn_mask=SQUARE < 0, need_weights=False)[0],
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2),
        2,
        lambda m, x: m(x, src_key_padding_mask=PAD)[~PAD],  # PyTorch's own gives zeros at padding in evaluation
    ),
    "transformer": (
        lambda: nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True),
        3,
        lambda m, x: m(x, x, tgt_mask=SQUARE < 0, src_key_padding_mask=PAD, memory_key_padding_mask=PAD),
    ),
}


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_modules_of_pytorch_with_boolean_masks_call_us(name: str, trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make 0 and -inf of them. In evaluation they would take a path of their own, which is the control."""
    build, calls, run_it = MODULES[name]
    torch.manual_seed(0)
    module, x = build().double().train(trains), torch.randn(2, 12, 32, dtype=torch.float64)
    made: list[int] = []
    monkeypatch.setattr(sdpa, "flash_attn_func", lambda *args, **kwargs: made.append(1) or flash_attn_func(*args, **kwargs))
    with torch.set_grad_enabled(trains):
        expected = run_it(module, x)
        with sdpa.enable():
            ours = run_it(module, x)
            assert len(made) == calls
            with monkeypatch.context() as patch:
                patch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
                run_it(module, x)
    assert (len(made) == 2 * calls) == (trains or "one sequence" in name)
    assert largest_error(ours, expected) < 1e-12


WARNING = r"nn.MultiheadAttention and .* with need_weights=True, their default: this attention is PyTorch's, not dash_attn's"


def test_weights_that_are_computed_elsewhere_are_warned_about() -> None:
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 12, 32)
    projections = layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0, layer.out_proj.weight, layer.out_proj.bias
    original = functional.multi_head_attention_forward
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = layer(x, x, x)
        with sdpa.enable():
            layer(x, x, x, need_weights=False)
            with pytest.raises(UserWarning, match=WARNING):
                layer(x, x, x)
            function = partial(functional.multi_head_attention_forward, x, x, x, 32, 4, *projections)
            for asked in ({}, {"need_weights": True}, {"training": True}):
                with pytest.raises(UserWarning, match=WARNING):
                    function(**asked)
            with pytest.raises(UserWarning, match=WARNING):
                function(True, None, True)
            function(need_weights=False)
            function(True, None, False)
        assert all(map(same_bits, layer(x, x, x), expected))
    assert functional.multi_head_attention_forward is original
    assert torch.backends.mha.get_fastpath_enabled()


def test_one_warning_serves_many_calls() -> None:
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 12, 32)
    with warnings.catch_warnings(record=True) as heard, sdpa.enable():
        warnings.simplefilter("default")
        for _ in range(3):
            layer(x, x, x)
    assert len(heard) == 1


def test_masks_of_batches_of_batches() -> None:
    """As many dimensions before the heads as the query has."""
    q, mask = torch.randn(3, 2, 4, 10, 8), torch.rand(2, 4, 10, 10) < 0.5
    expected = functional.scaled_dot_product_attention(q, q, q, mask)
    with sdpa.enable():
        assert largest_error(functional.scaled_dot_product_attention(q, q, q, mask), expected) < 1e-5
        with pytest.raises(ValueError, match=r"must broadcast to \(3, 2, 'heads', 'queries', 'keys'\); got shape \(3, 4, 10, 10\)"):
            functional.scaled_dot_product_attention(q, q, q, torch.ones(3, 4, 10, 10, dtype=torch.bool))
