"""The doors on the GPU: SDPA, torch.compile and Hugging Face models reach the same kernels, with the same bits as the function itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.integrations import sdpa, torch_flash
from dense import largest_error
from gpu_helpers import DEVICE, gpu_inputs

pytestmark = pytest.mark.gpu


def gradients(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients; the last input is that of the output."""
    *leaves, dout = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def by_pytorchs_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_sdpa_in_a_block() -> None:
    inputs = gpu_inputs(700, 700, (4, 4))
    expected = gradients(causal, inputs)
    with sdpa.enable():
        assert_equal(gradients(by_pytorchs_name, inputs), expected)


@pytest.mark.skipif(not hasattr(torch.nn.attention, "restore_flash_attention_impl"), reason="this PyTorch has no plug")
def test_sdpa_by_pytorchs_plug() -> None:
    inputs = gpu_inputs(700, 700, (4, 4))
    expected = gradients(causal, inputs)
    torch_flash.enable()
    try:
        assert_equal(gradients(by_pytorchs_name, inputs), expected)
    finally:
        torch_flash.disable()


def test_compiled() -> None:
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (300, 517):
        inputs = gpu_inputs(length, length)
        assert_equal(gradients(compiled, inputs), gradients(causal, inputs))


def test_compiled_packed() -> None:
    lengths = (100, 1, 300)
    places = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, places, places, 300, 300, causal=True)

    inputs = tuple(x[0] for x in gpu_inputs(sum(lengths), sum(lengths)))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, inputs), gradients(attend, inputs))


def trained(name: str, implementation: str, dtype: torch.dtype, **arguments: Any) -> list[Tensor]:
    import hf_models

    model = hf_models.model_of(name, implementation, dtype).to(DEVICE)
    return hf_models.step(model, **{key: value.to(DEVICE) for key, value in arguments.items()})


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_hugging_face(name: str, packed: bool) -> None:
    pytest.importorskip("transformers")
    from dash_attn.integrations import huggingface
    from hf_models import PACKED, TOKENS

    huggingface.enable()
    arguments = {"tokens": TOKENS[:1], "position_ids": PACKED} if packed else {"tokens": TOKENS}
    ours, again = (trained(name, "dash_attn", torch.bfloat16, **arguments) for _ in range(2))
    assert_equal(ours, again)
    truth, eager = (trained(name, "eager", dtype, **arguments) for dtype in (torch.float64, torch.bfloat16))
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        floor = 4 * torch.finfo(torch.bfloat16).eps * max(1.0, exact.abs().max().item())
        assert largest_error(mine, exact) <= 2 * largest_error(theirs, exact) + floor
