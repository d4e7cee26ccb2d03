"""Models of the torchtitan package on the CPU, for tests. Import this module where torchtitan is.

torchtitan imports Triton kernels for experts, which PyTorch's CPU builds do not bring: where Triton is missing they are left out.
FlexAttention has no backward on the CPU: here a dense one stands for it, with the mask that torchtitan's functions say.
The models, masks and configs are the package's own.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

OF_EXPERTS = "torchtitan.distributed.minimal_async_ep"


class _Missing(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


if importlib.util.find_spec("triton") is None:
    sys.modules.setdefault(f"{OF_EXPERTS}.kernels", _Missing(f"{OF_EXPERTS}.kernels"))

from torchtitan.distributed import parallel_dims  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402

from dash_attn.integrations._torchtitan_calls import attend_documents  # noqa: E402


def dense_flex_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float | None, **_: Any) -> tuple[Tensor, Any]:
    kept = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~kept, float("-inf"))
    return scores.softmax(-1) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


attention.FlexAttention._compiled_flex_attn = dense_flex_attention
attention._compiled_create_block_mask = create_block_mask
LENGTH, VOCABULARY = 150, 2048


def config(attn_backend: str = "varlen", layers: int = 2) -> Any:
    """torchtitan's debug model of Llama 3 with fewer layers."""
    found = model_registry("debugmodel", attn_backend=attn_backend).model
    found.layers = found.layers[:layers]
    return found


def built(model_config: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net: Any = model_config.build()
    net.init_states()
    return net  # type: ignore[no-any-return]


def batch(rows: int = 2, documents: bool = True) -> tuple[Tensor, Tensor]:
    """Tokens, and their positions: each row has documents of two lengths, or is one."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).repeat(rows, 1)
    if documents:
        for row, first in zip(positions, (60, 100), strict=False):
            row[first:] -= first
    return tokens, positions


def loss_and_gradients(net: Any, documents: bool = True, masks: Any = None) -> dict[str, Tensor]:
    tokens, positions = batch(documents=documents)
    net.zero_grad()
    masks = net.get_attention_masks(positions) if masks is None else masks
    loss = nn.functional.cross_entropy(net(tokens, positions, masks).flatten(0, 1), tokens.flatten())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in net.named_parameters()}


def _first_call(net: Any) -> tuple[list[Tensor], Any, Any]:
    """What the first layer's attention asks of our functions in a forward: tensors, documents, and the rest."""
    tokens, positions = batch(documents=False)  # one is long enough for three tiles: two have one sum
    calls: list[Any] = []

    def noted(*given: Any) -> Tensor:
        calls.append(given)
        return attend_documents(*given)

    with patch("dash_attn.integrations.torchtitan.attend_documents", noted):
        net(tokens, positions, net.get_attention_masks(positions))
    q, k, v, documents, asked = calls[0]
    return [x.detach() for x in (q, k, v)], documents, asked


def _gradients(inputs: list[Tensor], documents: Any, asked: Any) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(attend_documents(*leaves, documents, asked).square().sum(), leaves))


def sharded_llama(rank: int) -> dict[str, list[bool]]:
    """What each of two tensor-parallel ranks finds in its own heads, against the heads of a whole model."""
    from dash_attn.integrations.torchtitan import enable

    whole, documents, asked = _first_call(built(enable(config())))
    shared = enable(config())
    set_llama3_sharding_config(shared, enable_sp=False)
    net: Any = built(shared)
    with patch.object(parallel_dims, "device_type", "cpu"):
        ranks = parallel_dims.ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2, spmd_backend="partial_dtensor")
        ranks.build_mesh()
        net.parallelize(ranks)
        mine, _, asked_here = _first_call(net)
    heads = slice(8 * rank, 8 * rank + 8)
    expected = [x[:, :, heads] for x in _gradients(whole, documents, asked)]
    elsewhere = asked_here._replace(head_offset=asked_here.head_offset + 1)
    found, other = (_gradients(mine, documents, asked) for asked in (asked_here, elsewhere))
    return {
        "same_inputs": [torch.equal(x, y[:, :, heads]) for x, y in zip(mine, whole, strict=True)],
        "same": [torch.equal(x, y) for x, y in zip(found, expected, strict=True)],
        "same_elsewhere": [torch.equal(x, y) for x, y in zip(other, expected, strict=True)],
        "offset": [asked_here.head_offset == 8 * rank],
    }
