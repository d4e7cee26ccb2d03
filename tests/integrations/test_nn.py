"""The self-attention module against the same layer written with dense attention."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import BooleanMask, Causal, Full, Mask, Window, flash_attn_func
from dash_attn.nn import MORE_RESULTS, OPTIONS, SelfAttention
from dense import dense, largest_error

CASES: list[tuple[dict[str, Any], Mask]] = [
    ({}, Causal()),
    ({"causal": False}, Full()),
    ({"window_size": (30, 0)}, Window(30, 0)),
    ({"causal": False, "window_size": (30, 10), "softcap": 2.0}, Window(30, 10)),
    ({"num_kv_heads": 2, "bias": True}, Causal()),
    ({"num_kv_heads": 1}, Causal()),
]


def layer_of(dtype: torch.dtype = torch.float64, **choices: Any) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(32, 4, **choices).to(dtype)


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 150, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def double_and_negate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * q, -k


def dense_layer(layer: SelfAttention, x: Tensor, mask: Mask, softcap: float, rotate: Any) -> Tensor:
    q_width, kv_width = 32, 8 * layer.num_kv_heads
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in layer.qkv(x).split((q_width, kv_width, kv_width), -1))
    if rotate is not None:
        q, k = rotate(q, k)
    return layer.out(dense(q, k, v, mask, softcap=softcap)[0].reshape(x.shape))


@pytest.mark.parametrize("rotate", [None, double_and_negate])
@pytest.mark.parametrize(("choices", "mask"), CASES, ids=[str(choices) for choices, _ in CASES])
def test_values_and_gradients_are_those_of_dense_attention(choices: dict[str, Any], mask: Mask, rotate: Any) -> None:
    layer, x = layer_of(**choices), tokens().requires_grad_()
    ours = layer(x, rotate)
    expected = dense_layer(layer, x, mask, choices.get("softcap", 0.0), rotate)
    leaves = [x, *layer.parameters()]
    gradients = zip(torch.autograd.grad(ours.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves), strict=True)
    for mine, theirs in ((ours.detach(), expected.detach()), *gradients):
        assert largest_error(mine, theirs) < 1e-11


def test_rotation_matters() -> None:
    """The control of the test above."""
    layer, x = layer_of(), tokens()
    assert largest_error(layer(x), layer(x, double_and_negate)) > 1e-3


def test_rotation_gets_queries_and_keys() -> None:
    shapes = []

    def look(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        shapes.extend([q.shape, k.shape])
        return q, k

    layer_of(num_kv_heads=2)(tokens(), look)
    assert shapes == [(2, 150, 4, 8), (2, 150, 2, 8)]


def test_options_arrive() -> None:
    x = torch.randn(1, 700, 32, generator=torch.Generator().manual_seed(1))

    def gradient(schedule: str) -> Tensor:
        layer = layer_of(torch.float32, schedule=schedule)
        layer(x).square().sum().backward()
        return layer.qkv.weight.grad

    assert torch.equal(gradient("auto"), gradient("auto"))
    assert not torch.equal(gradient("auto"), gradient("ascending"))


def test_parameters_and_description() -> None:
    layer = layer_of(num_kv_heads=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"qkv.weight": (64, 32), "out.weight": (32, 32)}
    assert "num_heads=4, num_kv_heads=2, head_dim=8, causal=True" in repr(layer)


@pytest.mark.parametrize("shape", [(150, 32), (1, 2, 150, 32), (2, 150, 31), (32,)], ids=str)
def test_inputs_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"x must be 3-d \(batch, length, 32\); got shape {re.escape(str(shape))}"):
        layer_of()(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("name", ["return_lse", "return_attn_probs"])
def test_options_that_change_what_is_returned(name: str) -> None:
    with pytest.raises(TypeError, match=f"does not take {name}; got {name}=True"):
        layer_of(**{name: True})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"window_size": (1, 2, 3)}, "window_size must be"),
    ({"softcap": -1.0}, "softcap must be a finite number"),
    ({"softmax_scale": 0}, "softmax_scale must be a finite number"),
    ({"schedule": "fastest"}, "unknown schedule 'fastest'"),
    ({"accumulation": "any"}, "unknown accumulation 'any'"),
    ({"accumulation": "unordered", "deterministic": True}, "deterministic=True contradicts"),
    ({"backend": "tpu"}, "unknown backend 'tpu'"),
    ({"head_offset": -1}, "head_offset must be a whole number"),
    ({"mask": Causal()}, "give either mask or causal"),
    ({"mask": BooleanMask(torch.ones(4, 4).bool())}, "give either mask or causal"),
]


@pytest.mark.parametrize(("choices", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_options_that_no_call_could_have(choices: dict[str, Any], message: str) -> None:
    """Said where they are given, not at the first call. The control: the defaults."""
    with pytest.raises(ValueError, match=message):
        layer_of(**choices)
    arguments = inspect.signature(flash_attn_func).parameters
    layer_of(**{name: arguments[name].default for name in choices})


def test_options_are_those_of_the_function() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'shedule'; .* schedule, accumulation"):
        layer_of(shedule="weave")
    own = {*inspect.signature(SelfAttention).parameters, *inspect.signature(SelfAttention.forward).parameters, "q", "k", "v"}
    assert {*OPTIONS, *MORE_RESULTS} == set(inspect.signature(flash_attn_func).parameters) - own


BAD = [
    ((30, 4), r"embed_dim must be a multiple of num_heads.*embed_dim=30, num_heads=4"),
    ((32, 4, 3), r"num_heads of num_kv_heads.*num_kv_heads=3"),
    ((32, 0), r"whole numbers >= 1; got .*num_heads=0"),
    ((32, 4.0), r"whole numbers >= 1; got .*num_heads=4.0"),
    ((32, 4, -1), r"whole numbers >= 1; got .*num_kv_heads=-1"),
]


@pytest.mark.parametrize(("sizes", "message"), BAD, ids=[message for _, message in BAD])
def test_sizes_that_do_not_fit(sizes: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfAttention(*sizes)


@pytest.mark.parametrize("bias", [3, "no", None])
def test_bias_is_true_or_false(bias: Any) -> None:
    with pytest.raises(TypeError, match=f"bias must be True or False; got {bias!r}"):
        SelfAttention(32, 4, bias=bias)
