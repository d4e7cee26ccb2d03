"""context_parallel_attention: the rows of one rank in, the rows of one rank out."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from ...attention.autograd import Attention
from ...attention.pytorch import is_traced, refuse_transforms
from ...attention.signatures import ChoiceKeywords, No, OutAndLse, Yes
from ...call.call import Given
from ...call.options import BackendName, Choices
from ...call.tensor_checks import check_flags
from ...masks import Mask
from ...scheduling.generators import ScheduleName
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.schedule import Schedule
from ..hosts import ATTENTION
from ..peers import Group, Peers
from .asked import Asked
from .of_rank import OfRank
from .rows import Offsets

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Choices(ChoiceKeywords, total=False):
    """For overloads: what does not change the type of the result."""

    mask: Mask | None
    schedule: ScheduleName | Schedule
    backend: BackendName
    sharding: str | Sharding
    ulysses: int
    cu_seqlens: Offsets | None


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, return_lse: No = ..., **choices: Unpack[_Choices]
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, return_lse: Yes, **choices: Unpack[_Choices]
) -> OutAndLse: ...
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, return_lse: bool = ..., **choices: Unpack[_Choices]
) -> Tensor | OutAndLse: ...
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: Mask | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    schedule: ScheduleName | Schedule = "auto",
    backend: BackendName = "auto",
    head_offset: int = 0,
    sharding: str | Sharding = "zigzag",
    ulysses: int = 1,
    cu_seqlens: Offsets | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence that the ranks of a group share, with the bits that one rank would give.

    q is (batch, rows, q_heads, dim), k and v are (batch, rows, kv_heads, dim): this rank's rows of one sequence. The output, and the
    gradients, are those of these rows. All ranks must call it, in the same order and with the same choices.

    group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
    sharding: which rows a rank has. "zigzag" (as PyTorch's context_parallel and Megatron deal them: of 2P chunks, rank p has p and
        2P - 1 - p), "contiguous", or a Sharding with chunks of other lengths. Chunks are multiples of a tile (128 rows; errors
        say which lengths fit).
    ulysses: a factor of the group's size. That many neighbouring ranks exchange heads for rows; between these groups, states travel.
        It must divide the KV heads. On its own (ulysses = the group's size) no state travels.
    cu_seqlens: where documents in the row begin, 0 first and the whole row's length last: a tuple, a list, or a tensor on the host.
        `causal`, `window_size` and `mask` are then those of each document, whose bits are those it has alone. mask=Documents(...)
        does the same. Chunks need not be multiples of a tile.
    sinks: the same on every rank. Their gradient is complete on the first rank of the group and zero on the others, so that the sum
        over ranks, which every replicated parameter needs, is the gradient.
    dropout_seed: with dropout_p, one number per sequence, the same on every rank. It must be given: each rank has its own generator.
    head_offset: index of the first KV head in the unsharded model, for tensor-parallel ranks.
    The other arguments are those of flash_attn_func, for the whole sequence. Sums are always ordered.

    Returns out, or (out, lse) with `return_lse`. Masks whose order would make ranks wait in a circle raise and name
    schedule="alternating".
    """
    of_scores = mask, causal, window_size, softmax_scale, softcap
    choices = Choices(*of_scores, schedule, "ordered", backend, head_offset, dropout_p, alibi_slopes is not None)
    given = Given(sinks, dropout_seed, alibi_slopes)
    asked = Asked(q, k, v, given, choices, sharding, ulysses, cu_seqlens)
    if is_traced(q, k, v, *given):
        from .operator import traced_attention

        _check_program(return_lse)
        out, lse = traced_attention(asked, group)
    else:
        peers = Peers.of(group)
        with peers.hosts.refusing(ATTENTION):
            _check_program(return_lse)
        differentiable = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, sinks))
        rank = OfRank.agreed(asked, peers, differentiable)
        out, lse = Attention.apply(q, k, v, sinks, rank.part.options, None, given.modifiers, rank)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


def _check_program(return_lse: bool) -> None:
    refuse_transforms()
    check_flags(return_lse=return_lse)
