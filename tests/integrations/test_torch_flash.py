"""dash_attn as PyTorch's flash attention: registration, and the operators themselves, here on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention, functional

from dash_attn import Causal, Full, Mask, Window, flash_attn_func, flash_attn_varlen_func
from dash_attn.integrations import torch_flash
from dash_attn.integrations.torch_flash import OPERATORS
from dense import random_inputs, run_ours, same_bits

if not hasattr(attention, "restore_flash_attention_impl"):
    pytest.skip("this PyTorch has no plug for flash attention that can be pulled again", allow_module_level=True)

aten = torch.ops.aten
SWITCHES = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
THERE = [name for name in OPERATORS if hasattr(aten, name.split(".")[0])]  # PyTorch 2.11 has fewer, with fewer arguments
SPLITS = "num_splits" in str(aten._flash_attention_forward.default._schema)


def answered(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


def switches() -> list[bool]:
    return [getattr(torch.backends.cuda, f"{name}_enabled")() for name in SWITCHES]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The same functions under the dispatch key of CPU tensors, where PyTorch has no flash operators of its own."""
    active = torch_flash._Activated("CPU")
    yield
    active.remove()


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch's own answers are in use")
def test_one_line_activates_and_one_takes_it_back() -> None:
    before, own = switches(), [*map(answered, THERE)]
    assert any(own) == torch.backends.cuda.is_built()
    assert "dash_attn" in attention.list_flash_attention_impls()
    assert [*map(answered, THERE)] == own  # listed, not active
    torch_flash.enable()
    assert attention.current_flash_attention_impl() == "dash_attn"
    assert all(map(answered, THERE))
    assert switches() == [True, False, False, False]
    torch_flash.disable()
    assert attention.current_flash_attention_impl() is None
    assert [*map(answered, THERE)] == own
    assert switches() == before


def test_activating_another_implementation_ends_ours() -> None:
    before = switches()
    attention.register_flash_attention_impl("other", register_fn=lambda: None)
    torch_flash.enable()
    torch_flash.enable()  # twice is once
    attention.activate_flash_attention_impl("other")
    assert switches() == before
    assert attention.current_flash_attention_impl() is None
    torch_flash.enable()
    torch_flash.disable()
    assert attention.current_flash_attention_impl() is None


def test_a_block_puts_back_what_was_active_before() -> None:
    before = switches()
    with torch_flash.enable():
        with torch_flash.enable():
            pass
        assert attention.current_flash_attention_impl() == "dash_attn"
        assert switches() == [True, False, False, False]
        assert not torch.backends.mha.get_fastpath_enabled(), "nn.MultiheadAttention would go round it in evaluation"
        x = torch.zeros(1, 4, 8)
        with pytest.warns(UserWarning, match=r"with need_weights=True, their default: this attention is PyTorch's"):
            torch.nn.MultiheadAttention(8, 2)(x, x, x)
    assert attention.current_flash_attention_impl() is None
    assert switches() == before
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.filterwarnings("ignore:Flash attention kernel not used", "ignore:Both fused kernels")
@pytest.mark.usefixtures("on_cpu")
def test_what_flash_cannot_serve_raises_instead_of_taking_another_kernel() -> None:
    x = torch.zeros(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"[Nn]o (viable backend|available kernel)"):
        functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def test_a_pytorch_without_the_plug_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"has no torch.nn.attention.register_flash_attention_impl; .*sdpa.enable"):
        torch_flash.enable()


def heads_first(dtype: torch.dtype, heads: tuple[int, int] = (4, 2), q_len: int = 150, kv_len: int = 150) -> list[Tensor]:
    return [x.transpose(1, 2) for x in random_inputs(q_len, kv_len, heads, 16, dtype, batch=2)]


LAYOUTS = {
    "length first": lambda x: x,
    "head first": lambda x: x.contiguous(),
    "slice of a longer tensor": lambda x: torch.cat((x, x), -1)[..., :16],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("on_cpu")
def test_sdpa_operators_have_our_bits_through_pytorchs_autograd(dtype: torch.dtype, is_causal: bool, layout: str) -> None:
    inputs = heads_first(dtype)
    expected = run_ours(tuple(x.transpose(1, 2) for x in inputs), Causal() if is_causal else Full(), softmax_scale=0.3)
    leaves = [LAYOUTS[layout](x).detach().requires_grad_() for x in inputs[:3]]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*leaves, 0.0, is_causal, scale=0.3)
    gradients = torch.autograd.grad(out, leaves, inputs[3])
    assert same_bits(lse, expected.lse)
    for mine, theirs, like in zip((out, *gradients), (expected.out, *expected[2:]), (leaves[0], *leaves), strict=True):
        assert same_bits(mine.detach().transpose(1, 2), theirs)
        assert mine.stride() == torch.empty_like(like).stride()  # what torch.compile is told to expect


WINDOWS: list[tuple[dict[str, Any], bool, Mask]] = [
    ({}, False, Full()),
    ({}, True, Causal()),
    ({"window_size_left": 20, "window_size_right": 5}, False, Window(20, 5)),
    ({"window_size_left": 20}, True, Window(20, 0)),
    ({"window_size_left": -1, "window_size_right": 0} | ({"num_splits": 1} if SPLITS else {}), False, Causal()),
]


@pytest.mark.parametrize(("rest", "is_causal", "mask"), WINDOWS, ids=[str(m) for _, _, m in WINDOWS])
@pytest.mark.usefixtures("on_cpu")
def test_flash_operators_dense_and_packed(rest: dict[str, Any], is_causal: bool, mask: Mask) -> None:
    q, k, v, _ = random_inputs(90, 150, (4, 2), 16)
    out, lse, *_ = aten._flash_attention_forward(q, k, v, None, None, 90, 150, 0.0, is_causal, False, **rest)
    expected = flash_attn_func(q, k, v, mask=mask, return_lse=True)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 30, 90], [0, 100, 150]))
    leaves = [x[0].requires_grad_() for x in (q, k, v)]
    packed, lse, *_ = aten._flash_attention_forward(*leaves, cu_q, cu_k, 60, 100, 0.0, is_causal, False, **rest)
    expected = flash_attn_varlen_func(*leaves, cu_q, cu_k, 60, 100, mask=mask, return_lse=True)
    assert same_bits(packed.detach(), expected[0].detach())
    assert same_bits(lse, expected[1])
    for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (packed, expected[0])), strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.usefixtures("on_cpu")
def test_varlen_attn_of_pytorch_uses_it() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (x[0].requires_grad_() for x in random_inputs(90, 90, (2, 2), 16)[:3])
    cu = torch.tensor([0, 30, 90], dtype=torch.int32)
    out = varlen.varlen_attn(q, k, v, cu, cu, 60, 60, window_size=(-1, 0))
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 60, 60, causal=True)
    assert same_bits(out.detach(), expected.detach())
    for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)), strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.skipif("_flash_attention_forward_no_dropout_inplace" not in THERE, reason="this PyTorch has no such operator")
@pytest.mark.usefixtures("on_cpu")
def test_output_given_by_the_caller() -> None:
    q, k, v, _ = random_inputs(50, 50)
    out = torch.empty_like(q)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, None, None, 50, 50, 0.0, True, False)
    expected = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


X = torch.zeros(1, 2, 10, 8)
T = torch.zeros(10, 2, 8)
CU = torch.tensor([0, 10], dtype=torch.int32)
DENSE = (X, X, X, None, None, 2, 2)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("_scaled_dot_product_flash_attention", (X, X, X, 0.1), {}, r"dropout_p must be 0; got 0.1"),
    ("_scaled_dot_product_flash_attention", (X, X, X, 0.0, False, True), {}, r"return_debug_mask must be False"),
    ("_scaled_dot_product_flash_attention", (X, X[:, :, :5], X[:, :, :5], 0.0, True), {}, r"as many queries as keys; got 10 and 5"),
    ("_scaled_dot_product_flash_attention", (X, X, X[..., :4]), {}, r"has one head dim; got 8 and 4"),
    ("_scaled_dot_product_flash_attention", (X, X, X.double()), {}, r"one dtype"),
    ("_scaled_dot_product_flash_attention", (X, X, X, None, None, None), {}, r"does not support quantized"),
    ("_flash_attention_forward", (*DENSE, 0.1, False, False), {}, r"dropout_p must be 0; got 0.1"),
    ("_flash_attention_forward", (*DENSE, 0.0, False, False), {"alibi_slopes": torch.zeros(2)}, r"does not support alibi_slopes"),
    ("_flash_attention_forward", (*DENSE, 0.0, False, False), {"seqused_k": CU}, r"does not support seqused_k"),
    *([("_flash_attention_forward", (*DENSE, 0.0, False, False), {"num_splits": 4}, r"num_splits must be None or 1")] if SPLITS else []),
    ("_flash_attention_forward", (T, T, T, CU, None, 10, 10, 0.0, False, False), {}, r"need cum_seq_q and cum_seq_k"),
    ("_flash_attention_forward", (T, T, T, CU, CU, 5, 10, 0.0, False, False), {}, r"max_seqlen_q must be at least"),
]


@pytest.mark.parametrize(("name", "arguments", "rest", "message"), BAD, ids=[message for *_, message in BAD])
@pytest.mark.usefixtures("on_cpu")
def test_what_cannot_be_honoured_raises(name: str, arguments: tuple[Any, ...], rest: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(aten, name)(*arguments, **rest)
