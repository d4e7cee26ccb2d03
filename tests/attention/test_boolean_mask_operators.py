"""Boolean masks in compiled programs, checkpoints and modules, and as a Hopper GPU plans them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dash_attn import BooleanMask, Causal, TileMap, explain, flash_attn_func
from dash_attn.attention.torch_ops import VERSION
from dash_attn.call.explain import Explanation
from dash_attn.nn import SelfAttention
from dense import Results, assert_same_bits, random_inputs, run_ours, same_bits


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(q_len: int, kv_len: int, density: float = 0.5, seed: int = 0) -> Tensor:
    return torch.rand(q_len, kv_len, generator=source(seed)) < density


def on_hopper(mask: Any) -> Explanation:
    q, k = torch.empty(2, 256, 4, 64, device="meta", dtype=torch.bfloat16), torch.empty(2, 256, 2, 64, device="meta", dtype=torch.bfloat16)
    return explain(flash_attn_func, q, k, k, mask=mask, backend="hopper", predict_time=False)


def test_hopper_plans_all_of_them() -> None:
    """A GPU's results are in tests/gpu/test_gpu_boolean_masks.py, its kernels on the host in tests/backends/test_mask_bits.py."""
    blocks = torch.eye(4).bool().repeat_interleave(64, 0).repeat_interleave(64, 1)
    as_map = on_hopper(TileMap(np.eye(4, dtype=bool), 64, 64))
    assert on_hopper(blocks) == on_hopper(BooleanMask(blocks)) == as_map
    assert on_hopper(blocks & matrix(256, 256)).order_hash == as_map.order_hash, "the same tiles are visited"
    triangle, causal = torch.ones(256, 256).tril().bool(), on_hopper(Causal())
    assert on_hopper(triangle).order_hash == causal.order_hash
    each = on_hopper(torch.stack([blocks, blocks, triangle, triangle]))
    assert each.order_hash not in (as_map.order_hash, causal.order_hash)
    assert each.schedule == f"{as_map.schedule} and {causal.schedule}"
    assert each.prediction_note == "heads of several patterns run one after the other"
    with pytest.raises(ValueError, match="must not be on the meta device"):
        on_hopper(torch.ones(256, 256, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("leading", [(), (2, 1), (1, 4)], ids=str)
def test_a_compiled_call_has_the_same_bits(leading: tuple[int, ...]) -> None:
    q, k, v, dout = inputs = random_inputs(150, 200, (4, 2), 8, batch=2)
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):  # the same program, another mask
        mask = torch.rand(*leading, 150, 200, generator=source(seed)) < 0.4
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = compiled(*leaves, mask=mask, return_lse=True)
        assert_same_bits(Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)), run_ours(inputs, mask))
    with pytest.raises(Exception, match="takes a boolean mask as a tensor"):
        compiled(q, k, v, mask=BooleanMask(mask))
    with pytest.raises(Exception, match=r"-inf elsewhere; got 1"):
        compiled(q, k, v, mask=mask.float())
    with pytest.raises(Exception, match="gets no gradient"):
        torch.compile(flash_attn_func, backend="aot_eager")(q, k, v, mask=torch.where(mask, 0.0, -torch.inf).requires_grad_())


def test_only_calls_with_a_matrix_keep_out_of_cuda_graphs() -> None:
    """The host reads the matrix. torch.compile then leaves the operator out of the graphs that it makes, or makes none."""
    for operator, reads in (("attention", False), ("attention_of_matrix", True)):
        for name in (operator, f"{operator}_backward"):
            assert (torch.Tag.cudagraph_unsafe in getattr(torch.ops.dash_attn, name).default.tags) == reads


def test_the_operator_is_checked() -> None:
    q, k, v, _ = random_inputs(70, 140, (4, 2), 8, torch.float64, batch=2)
    rest = ([], 0.25, 0.0, "auto", "ordered", "auto", 0, 0.0, VERSION)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    given = (*leaves, None, None, None, None, None, matrix(70, 140), 0, 0)
    torch.library.opcheck(torch.ops.dash_attn.attention_of_matrix.default, (*given, "tensor", *rest))
    for wrong in ((*given, "full", *rest), (*leaves, *(None,) * 6, 0, 0, "tensor", *rest)):
        with pytest.raises(ValueError, match="mask 'tensor' and mask_tensor come together"):
            torch.ops.dash_attn.attention_of_matrix(*wrong)


def test_checkpoints_and_modules_take_it() -> None:
    inputs, mask = random_inputs(100, 100, (2, 2), 16), matrix(100, 100)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = checkpoint(lambda *x: flash_attn_func(*x, mask=mask), *leaves, use_reentrant=False)
    gradients = torch.autograd.grad(out, leaves, inputs[3])
    assert all(map(same_bits, gradients, run_ours(inputs, mask)[2:]))
    torch.manual_seed(0)
    layer, x = SelfAttention(32, 2, causal=False, mask=BooleanMask(torch.ones(30, 30).tril().bool())), torch.randn(2, 30, 32)
    causal = SelfAttention(32, 2)
    causal.load_state_dict(layer.state_dict())
    assert same_bits(layer(x), causal(x))
