"""What torchtitan asks of an inner attention, computed or refused. Nothing here imports torchtitan."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..attention.autocast import under_autocast
from ..attention.functions import flash_attn_func
from ..attention.varlen import flash_attn_varlen_func

WHO = "dash_attn's attention for torchtitan"
WITHOUT_EFFECT = ("enable_gqa",)  # of what layers pass: it says nothing that the shapes do not


class Asked(NamedTuple):
    """What a layer asks of its inner attention, beside tensors and masks."""

    scale: float | None = None
    head_offset: int = 0
    window: tuple[int, int] = (-1, -1)
    out_transform: Callable[[Tensor, Tensor], Tensor] | None = None  # of the output and its log-sum-exps, (batch, length, heads)

    def options(self) -> dict[str, Any]:
        causal = self.window[1] == 0
        return {"softmax_scale": self.scale, "causal": causal, "window_size": self.window, "head_offset": self.head_offset}


def attend(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
    """Where torchtitan would call scaled_dot_product_attention. (batch, length, heads, head dim), as torchtitan has it."""
    check_tensors(q, k, v)
    mine = under_autocast(q, k, v)
    out: Tensor = flash_attn_func(mine[0], mine[1], mine[2], **asked.options())
    return out.to(q.dtype)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, documents: Any, asked: Asked) -> Tensor:
    """Where torchtitan would call varlen_attn; documents is its VarlenMetadata, which counts through all rows of the batch."""
    check_tensors(q, k, v)
    tokens = [x.flatten(0, 1) for x in under_autocast(q, k, v)]
    ends = documents.cu_seq_q, documents.cu_seq_k, documents.max_q, documents.max_k
    packed, lse = flash_attn_varlen_func(tokens[0], tokens[1], tokens[2], *ends, **asked.options(), return_lse=True)
    out: Tensor = packed.unflatten(0, q.shape[:2]).to(q.dtype)
    return out if asked.out_transform is None else asked.out_transform(out, lse.transpose(0, 1).unflatten(0, q.shape[:2]))


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{WHO} takes this rank's own tensors; {name} is a DTensor with the placements {tensor.placements}."
                " Context parallelism (context_parallel_degree) must be 1"
            )
        if tensor.ndim != 4:
            raise ValueError(f"{WHO} takes (batch, length, heads, head dim); {name} has shape {tuple(tensor.shape)}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{WHO} takes as many keys as queries; got {q.shape[1]} queries and {k.shape[1]} keys."
            " Context parallelism (context_parallel_degree) must be 1"
        )


def refuse_masks(found: object, wanted: str) -> None:
    raise ValueError(f"{WHO} takes {wanted} as attention_masks; got {type(found).__name__}")
