"""Autocast at the doors that stand in for PyTorch's functions: the dtypes are PyTorch's, and gradients keep those of the inputs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dash_attn.attention.autocast import under_autocast
from dash_attn.integrations import sdpa
from dash_attn.nn import SelfAttention
from dense import same_bits
from devices import on_each_device

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TARGETS = (torch.bfloat16, torch.float16)


def tensors(*dtypes: torch.dtype, device: str = "cpu") -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 40, 64, generator=source, dtype=torch.float64).to(device, dtype) for dtype in dtypes]


def dtypes_of(attend: Callable[..., Tensor], *inputs: Tensor) -> tuple[torch.dtype, ...] | None:
    """Of the output and the gradients; None where it raises."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    try:
        out = attend(*leaves)
    except (RuntimeError, ValueError):
        return None
    return out.dtype, *(gradient.dtype for gradient in torch.autograd.grad(out.float().sum(), leaves))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtypes", list(product(DTYPES, repeat=3)), ids=str)
@on_each_device
def test_dtypes_are_those_of_pytorch(device: str, dtypes: tuple[torch.dtype, ...], target: torch.dtype) -> None:
    inputs = tensors(*dtypes, device=device)
    with torch.autocast(device, target):
        expected = dtypes_of(functional.scaled_dot_product_attention, *inputs)
        with sdpa.enable():
            ours = dtypes_of(functional.scaled_dot_product_attention, *inputs)
    if device == "cuda" and expected is not None and expected[0] == torch.float64:
        expected = None  # no kernel of ours takes it
    assert ours == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_autocast_nothing_is_cast(dtype: torch.dtype) -> None:
    (x,) = tensors(dtype)
    assert under_autocast(x)[0] is x
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert under_autocast(x)[0] is x
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):  # another device's
        assert under_autocast(x)[0] is x


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_only_floating_point_is_cast(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert under_autocast(x)[0] is x


def test_devices_without_autocast_are_left_alone() -> None:
    x = torch.ones(3, device="meta")
    assert under_autocast(x)[0] is x


def attend_in_a_block(*inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return functional.scaled_dot_product_attention(*inputs, is_causal=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_traces_it(backend: str) -> None:
    """Autocast around the compiled function, in it, and off again."""
    torch.compiler.reset()
    inputs = tensors(torch.float32, torch.float32, torch.bfloat16)
    with sdpa.enable():
        expected = attend_in_a_block(*inputs)
        inside = torch.compile(attend_in_a_block, fullgraph=True, backend=backend)
        around = torch.compile(lambda *x: functional.scaled_dot_product_attention(*x, is_causal=True), fullgraph=True, backend=backend)
        assert same_bits(inside(*inputs), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert same_bits(around(*inputs), expected)
        assert around(*(x.float() for x in inputs)).dtype == torch.float32
        assert dtypes_of(inside, *inputs) == (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)


@pytest.mark.exhaustive
def test_torch_compile_in_a_fresh_process() -> None:
    """PyTorch looks through torch.nn.functional once per process: what stands there must look like a function."""
    code = """
import torch
from torch.nn import functional
from dash_attn.integrations import sdpa
q = torch.randn(1, 2, 5, 8)
original = functional.scaled_dot_product_attention
with sdpa.enable():
    compiled = torch.compile(lambda q: functional.scaled_dot_product_attention(q, q, q), fullgraph=True, backend="eager")
    print(torch.equal(compiled(q), functional.scaled_dot_product_attention(q, q, q)))
print(original in torch.overrides.get_overridable_functions()[functional])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "True\nTrue\n", result.stderr[-2000:]


def in_fp32(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """As rotary embeddings do: the angles are fp32, and so are their products with q and k."""
    angles = torch.ones(q.shape[1], 1, 1)
    return q * angles, k * angles


def test_a_rotation_in_fp32_does_not_undo_autocast() -> None:
    torch.manual_seed(0)
    layer, x = SelfAttention(32, 4, num_kv_heads=2), torch.randn(2, 50, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(layer(x, in_fp32), layer(x))
    layer(x, in_fp32).sum().backward()
    assert layer.qkv.weight.grad.dtype == torch.float32


def test_mixed_dtypes_without_autocast_are_refused_by_name() -> None:
    inputs = tensors(torch.float32, torch.float32, torch.bfloat16)
    with (
        sdpa.enable(),
        pytest.raises(ValueError, match=r"query, key and value must have one dtype; got torch.float32, torch.float32, torch.bfloat16"),
    ):
        functional.scaled_dot_product_attention(*inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this PyTorch has no plug")
def test_pytorchs_plug_runs_below_autocast() -> None:
    from dash_attn.integrations import torch_flash

    inputs = tensors(torch.float32, torch.float32, torch.bfloat16, device="cuda")
    torch_flash.enable()
    try:
        with torch.autocast("cuda", torch.bfloat16):
            found: Any = dtypes_of(functional.scaled_dot_product_attention, *inputs)
    finally:
        torch_flash.disable()
    assert found == (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
