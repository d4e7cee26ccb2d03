"""context_parallel_attention as torch operators, for torch.compile. They are never looked into: messages are part of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.options import Choices, choose_mask, text_of
from ...masks.encoding import decode_mask, encode_mask
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.schedule import Schedule
from ..peers import Group, Peers, process_group
from .asked import Asked, Given, Sharing
from .of_rank import OfRank

# Part of every traced program, so that one whose operators meant something else is refused, not run.
VERSION = 5
GIVEN = "Tensor? sinks, Tensor? dropout_seed, Tensor? alibi_slopes"
SHARED = (
    "str group, str sharding, SymInt[] lengths, SymInt[] owners, int ulysses, SymInt[]? cu_seqlens, str mask, SymInt[] mask_sizes,"
    " bool differentiable, int version"
)
CHOSEN = {  # of Choices, in the form in which they are given
    "softmax_scale": "float?",
    "softcap": "float",
    "schedule": "str",
    "backend": "str",
    "head_offset": "SymInt",
    "dropout_p": "float",
}
REST = ", ".join([GIVEN, SHARED, *(f"{kind} {name}" for name, kind in CHOSEN.items())])
FORWARD = f"(Tensor q, Tensor k, Tensor v, {REST}) -> (Tensor, Tensor, Tensor)"
BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor number, Tensor q, Tensor k, Tensor v, {REST})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)

TENSORS = len(Given._fields)


class Shared(NamedTuple):
    """What the operators take of how ranks share a call, and of its mask, in the order of their schema."""

    group: str  # its name; empty: this process is alone
    sharding: str  # a name; empty: lengths and owners say it
    lengths: Sequence[int]
    owners: Sequence[int]
    ulysses: int
    cu_seqlens: Sequence[int] | None
    mask: str
    mask_sizes: Sequence[int]
    differentiable: bool
    version: int


def traced_attention(
    q: Tensor, k: Tensor, v: Tensor, given: Given, group: Group, choices: Choices, sharing: Sharing
) -> tuple[Tensor, Tensor]:
    """The operator."""
    if isinstance(choices.schedule, Schedule) and torch.compiler.is_compiling():
        raise TypeError("a compiled program takes a schedule as JSON text: pass schedule.to_json(), made outside of the program")
    sharding, ulysses, cu_seqlens = sharing
    if isinstance(cu_seqlens, Tensor):
        raise TypeError("a traced program takes cu_seqlens as whole numbers: pass cu_seqlens.tolist(), made outside of the program")
    chunks = ("", list(sharding.lengths), list(sharding.owners)) if isinstance(sharding, Sharding) else (sharding, list[int](), list[int]())
    ends = None if cu_seqlens is None else list(cu_seqlens)
    mask = encode_mask(choose_mask(choices.mask, choices.causal, choices.window_size))
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, given.sinks))
    shared = Shared(_name_of(group), *chunks, ulysses, ends, *mask, differentiable, VERSION)
    chosen = [getattr(choices._replace(schedule=text_of(choices.schedule)), name) for name in CHOSEN]
    out, lse, _ = torch.ops.dash_attn.context_parallel_attention(q, k, v, *given, *shared, *chosen)
    return out, lse


def _name_of(group: Group) -> str:
    found = process_group(group)
    return "" if found is None else str(found.group_name)


# A group stands in a traced program by its name. (As torch.compiler.assume_constant_result does, which imports the whole compiler.)
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _rank(q: Tensor, k: Tensor, v: Tensor, rest: Sequence[Any], backward_of: int | None = None) -> tuple[OfRank, Given]:
    """rest: what follows these tensors."""
    given, shared = Given(*rest[:TENSORS]), Shared(*rest[TENSORS : -len(CHOSEN)])
    if shared.version != VERSION:
        raise RuntimeError(
            f"this program was traced with version {shared.version} of dash_attn's operators, and here they have version {VERSION}:"
            " compile it again"
        )
    peers = Peers.named(shared.group) if shared.group else Peers.alone()
    sharding = shared.sharding or Sharding(tuple(shared.lengths), tuple(shared.owners))
    sharing = Sharing(sharding, shared.ulysses, None if shared.cu_seqlens is None else list(shared.cu_seqlens))
    chosen = dict(zip(CHOSEN, rest[-len(CHOSEN) :], strict=True))
    choices = Choices(mask=decode_mask(shared.mask, shared.mask_sizes), alibi=given.alibi_slopes is not None, **chosen)
    asked = Asked(q, k, v, given, choices, sharing, peers.count)
    return OfRank.agreed(asked, peers, shared.differentiable, backward_of), given


@torch.library.custom_op("dash_attn::context_parallel_attention", mutates_args=(), schema=FORWARD)
def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The last result is the number of the call, on the host, for its backward."""
    rank, given = _rank(q, k, v, rest)
    with rank.everybody.hosts.telling():
        out, lse = rank.forward(q, k, v, given)
    return out, lse, torch.tensor(rank.number, device="cpu")


@torch.library.custom_op("dash_attn::context_parallel_attention_backward", mutates_args=(), schema=BACKWARD)
def backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, number: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last result is empty where there are no sinks: an operator returns tensors only."""
    rank, given = _rank(q, k, v, rest, int(number))
    with rank.everybody.hosts.telling():
        dq, dk, dv, dsinks = rank.backward((dout, q, k, v, out), (lse, dlse), given)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((batch, rows, heads, v.shape[-1])), lse, torch.empty((), dtype=torch.int64, device="cpu")


@backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, sinks = arguments[5:9]
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.choices = inputs[3 + TENSORS :]
    ctx.save_for_backward(*output, *inputs[: 3 + TENSORS])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    out, lse, number, q, k, v, sinks, *modifiers = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    tensors = dout, dlse, out, lse, number, q, k, v, sinks, *modifiers
    dq, dk, dv, dsinks = torch.ops.dash_attn.context_parallel_attention_backward(*tensors, *ctx.choices)
    return dq, dk, dv, None if sinks is None else dsinks, *(None,) * (len(modifiers) + len(ctx.choices))


attention.register_autograd(_differentiate, setup_context=_keep_for_backward)
