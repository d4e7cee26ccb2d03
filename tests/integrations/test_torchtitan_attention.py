"""What torchtitan's layers ask of an inner attention, without torchtitan: what is computed, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import flash_attn_func
from dash_attn.door import refuse_unknown
from dash_attn.integrations._torchtitan_calls import WHO, WITHOUT_EFFECT, Asked, attend, attend_documents, refuse_masks
from dense import same_bits

ENDS = torch.tensor([0, 60, 150, 250, 300], dtype=torch.int32)  # two documents in each of two rows of 150
DOCUMENTS = SimpleNamespace(cu_seq_q=ENDS, cu_seq_k=ENDS, max_q=100, max_k=100)
CAUSAL = Asked(window=(-1, 0))


def tensors(length: int = 150) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, heads, 16, generator=source).requires_grad_() for heads in (4, 2, 2)]


def test_documents_have_the_bits_they_have_alone() -> None:
    q, k, v = tensors()
    out = attend_documents(q, k, v, DOCUMENTS, CAUSAL)
    out.square().sum().backward()
    for row, part in ((0, slice(0, 60)), (0, slice(60, 150)), (1, slice(0, 100)), (1, slice(100, 150))):
        own = [x.detach()[row : row + 1, part].requires_grad_() for x in (q, k, v)]
        alone = flash_attn_func(*own, causal=True)
        alone.square().sum().backward()
        assert same_bits(out[row : row + 1, part], alone)
        assert all(same_bits(x.grad[row : row + 1, part], y.grad) for x, y in zip((q, k, v), own, strict=True))
    assert not same_bits(out[:, 110:], attend(q, k, v, CAUSAL)[:, 110:])  # the control: one document per row


@pytest.mark.parametrize(("asked", "options"), [
    (Asked(), {}),
    (CAUSAL, {"causal": True}),
    (Asked(scale=0.3, window=(20, 0)), {"softmax_scale": 0.3, "window_size": (20, 0)}),
])  # fmt: skip
def test_masks_and_scales_are_those_of_the_functions(asked: Asked, options: dict[str, Any]) -> None:
    inputs = tensors()
    assert same_bits(attend(*inputs, asked), flash_attn_func(*inputs, **options))


def test_heads_of_a_rank_keep_their_place() -> None:
    """In the backward, whose order depends on it: the second KV head of two, with and without its offset."""
    inputs, parts = tensors(300), (slice(2, 4), slice(1, 2), slice(1, 2))
    attend(*inputs, CAUSAL).square().sum().backward()
    own = [x.detach()[:, :, part].clone().requires_grad_() for x, part in zip(inputs, parts, strict=True)]
    for offset, kept in ((1, True), (0, False)):
        found = torch.autograd.grad(attend(*own, CAUSAL._replace(head_offset=offset)).square().sum(), own)
        assert all(same_bits(x, y.grad[:, :, part]) for x, y, part in zip(found, inputs, parts, strict=True)) is kept


def test_out_transform_gets_the_log_sum_exps() -> None:
    inputs = tensors()
    found: list[Tensor] = []

    def scaled(out: Tensor, lse: Tensor) -> Tensor:
        found.append(lse)
        return out * torch.sigmoid(lse)[..., None]

    out = attend_documents(*inputs, DOCUMENTS, CAUSAL._replace(out_transform=scaled))
    alone, lse = flash_attn_func(*(x[:1, :60] for x in inputs), causal=True, return_lse=True)
    assert same_bits(found[0][:1, :60], lse.transpose(1, 2))
    assert same_bits(out[:1, :60], alone * torch.sigmoid(lse.transpose(1, 2))[..., None])


def test_autocast_is_followed_and_the_dtype_comes_back() -> None:
    inputs = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*inputs, CAUSAL)
    assert out.dtype == torch.float32
    assert same_bits(out, flash_attn_func(*(x.bfloat16() for x in inputs), causal=True).float())


def test_what_is_not_known_raises() -> None:
    refuse_unknown(WHO, {"enable_gqa": True, "score_mod": None}, WITHOUT_EFFECT, "which the layer passed")
    with pytest.raises(ValueError, match=r"torchtitan does not support score_mod \(a .*\), which the layer passed"):
        refuse_unknown(WHO, {"score_mod": print}, WITHOUT_EFFECT, "which the layer passed")
    with pytest.raises(ValueError, match=r"takes torchtitan's VarlenMetadata as attention_masks; got dict"):
        refuse_masks({}, "torchtitan's VarlenMetadata")


def test_sequences_that_ranks_share_raise() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"as many keys as queries; got 75 queries and 150 keys\. Context parallelism"):
        attend(q[:, :75], k, v, CAUSAL)
    with pytest.raises(ValueError, match=r"takes \(batch, length, heads, head dim\); q has shape \(150, 4, 16\)"):
        attend(q[0], k, v, CAUSAL)


def test_tensors_of_several_ranks_raise() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        q, k, v = (DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Shard(1)]) for x in tensors())
        with pytest.raises(ValueError, match=r"q is a DTensor with the placements .*Context parallelism"):
            attend(q, k, v, CAUSAL)
    finally:
        torch.distributed.destroy_process_group()
