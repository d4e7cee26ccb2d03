"""PyTorch's FlexAttention, compiled, as its users write it: a rule per mask, and a map of the blocks the rule leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...masks import Documents, Mask, Prefix, Window
from .candidates import Candidate, Runner, Tensors, runner
from .matrices import Matrix
from .shape import Shape

FLEX = "FlexAttention"
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key indices


def flex() -> Candidate:
    def prepare(shape: Shape, tensors: Tensors) -> Runner:
        device = tensors.q.device
        attend = _compiled() if device.type == "cuda" else _flex_attention()  # elsewhere it has no backward, and says so
        return runner(attention_of(shape, device, attend), tensors, heads_first=True)

    return Candidate(FLEX, prepare)


def attention_of(shape: Shape, device: torch.device, attend: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of (batch, heads, length, head dim) tensors for one shape."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    rule = rule_of(shape, device)
    blocks = None if rule is None else create_block_mask(rule, None, None, shape.q_seqlen, shape.seqlen, device=device)
    cap = shape.softcap
    options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": shape.group > 1}
    if cap:
        options["score_mod"] = lambda score, b, h, q, kv: cap * torch.tanh(score / cap)

    def attention(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        if not sinks:
            out: Tensor = attend(q, k, v, **options)
            return out
        out, more = attend(q, k, v, return_aux=AuxRequest(lse=True), **options)
        share = torch.sigmoid(more.lse - sinks[0].float()[:, None])  # of the softmax that the sink leaves to the keys
        return (out * share[..., None]).to(q.dtype)

    return attention


def rule_of(shape: Shape, device: torch.device) -> Rule | None:
    if not isinstance(shape.attended, Matrix):
        return shifted(mask_rule(shape.attended, device), shape.shift)
    table = torch.from_numpy(shape.attended.elements(shape.q_seqlen, shape.seqlen)).to(device)
    return lambda b, h, q, kv: table[q, kv]


def shifted(rule: Rule | None, shift: int) -> Rule | None:
    """The rule where the first query is aligned with a later key."""
    if rule is None or not shift:
        return rule
    return lambda b, h, q, kv: rule(b, h, q + shift, kv)


def mask_rule(mask: Mask, device: torch.device) -> Rule | None:
    """Whether a query attends a key, written as in FlexAttention's own examples; None: always."""
    if mask.is_full:
        return None
    if mask.is_causal:
        return lambda b, h, q, kv: q >= kv
    if isinstance(mask, Window):
        left, right = (2**30 if side < 0 else side for side in (mask.left, mask.right))
        return lambda b, h, q, kv: (q - kv <= left) & (kv - q <= right)
    if isinstance(mask, Prefix):
        length = mask.length
        return lambda b, h, q, kv: (kv < length) | (q >= kv)
    if isinstance(mask, Documents):
        lengths = torch.tensor(mask.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(mask.lengths), device=device), lengths)
        if mask.causal:
            return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)
        return lambda b, h, q, kv: document[q] == document[kv]
    raise NotImplementedError(f"no rule for a {type(mask).__name__} mask")


def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def _compiled() -> Callable[..., Any]:
    """Compiled for one shape. Earlier shapes are forgotten: past a few of them PyTorch would stop compiling and run it unfused."""
    import torch._functorch.config as settings

    torch.compiler.reset()
    settings.donated_buffer = False  # a graph that is kept is run backward many times
    return torch.compile(_flex_attention(), dynamic=False, fullgraph=True)
