"""context_parallel_attention as torch operators, for torch.compile. They are never looked into: messages are part of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.mask_arguments import decode_mask, encode_mask
from ...call.given_schedule import text_of
from ...call.options import Choices, choose_mask
from ...scheduling.ranks.sharding import Sharding
from ...scheduling.schedule import Schedule
from ..peers import Group, Peers, process_group
from .asked import Asked, Given, Sharing
from .of_rank import OfRank

VERSION = 4  # part of every traced program, so that one whose operators meant something else is refused, not run
CHOICES = (
    "str group, str sharding, SymInt[] lengths, SymInt[] owners, int ulysses, SymInt[]? cu_seqlens, str mask, SymInt[] mask_sizes,"
    " float? scale, float softcap, str schedule, str backend, SymInt head_offset, float dropout_p, bool differentiable, int version"
)
GIVEN = "Tensor? sinks, Tensor? dropout_seed, Tensor? alibi_slopes"
FORWARD = f"(Tensor q, Tensor k, Tensor v, {GIVEN}, {CHOICES}) -> (Tensor, Tensor, Tensor)"
BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor number, Tensor q, Tensor k, Tensor v, {GIVEN}, {CHOICES})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)

TENSORS = len(Given._fields)


class Arguments(NamedTuple):
    """What the operators take beside tensors, in the order of their schema."""

    group: str  # its name; empty: this process is alone
    sharding: str  # a name; empty: lengths and owners say it
    lengths: Sequence[int]
    owners: Sequence[int]
    ulysses: int
    cu_seqlens: Sequence[int] | None
    mask: str
    mask_sizes: Sequence[int]
    scale: float | None
    softcap: float
    schedule: str
    backend: str
    head_offset: int
    dropout_p: float
    differentiable: bool
    version: int

    @property
    def choices(self) -> Choices:
        """The tensors say whether there is ALiBi."""
        return Choices(
            mask=decode_mask(self.mask, self.mask_sizes),
            softmax_scale=self.scale,
            softcap=self.softcap,
            schedule=self.schedule,
            backend=self.backend,
            head_offset=self.head_offset,
            dropout_p=self.dropout_p,
        )


def traced_attention(
    q: Tensor, k: Tensor, v: Tensor, given: Given, group: Group, choices: Choices, sharing: Sharing
) -> tuple[Tensor, Tensor]:
    """The operator."""
    if isinstance(choices.schedule, Schedule) and torch.compiler.is_compiling():
        raise TypeError("a compiled program takes a schedule as JSON text: pass schedule.to_json(), made outside of the program")
    sharding, ulysses, cu_seqlens = sharing
    if isinstance(cu_seqlens, Tensor):
        raise TypeError("a traced program takes cu_seqlens as whole numbers: pass cu_seqlens.tolist(), made outside of the program")
    name, sizes = encode_mask(choose_mask(choices.mask, choices.causal, choices.window_size))
    arguments = Arguments(
        group=_name_of(group),
        sharding="" if isinstance(sharding, Sharding) else sharding,
        lengths=list(sharding.lengths) if isinstance(sharding, Sharding) else [],
        owners=list(sharding.owners) if isinstance(sharding, Sharding) else [],
        ulysses=ulysses,
        cu_seqlens=None if cu_seqlens is None else list(cu_seqlens),
        mask=name,
        mask_sizes=sizes,
        scale=choices.softmax_scale,
        softcap=choices.softcap,
        schedule=text_of(choices.schedule),
        backend=choices.backend,
        head_offset=choices.head_offset,
        dropout_p=choices.dropout_p,
        differentiable=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, given.sinks)),
        version=VERSION,
    )
    out, lse, _ = torch.ops.dash_attn.context_parallel_attention(q, k, v, *given, *arguments)
    return out, lse


def _name_of(group: Group) -> str:
    found = process_group(group)
    return "" if found is None else str(found.group_name)


# A group stands in a traced program by its name. (As torch.compiler.assume_constant_result does, which imports the whole compiler.)
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _rank(q: Tensor, k: Tensor, v: Tensor, given: Given, arguments: Arguments, backward_of: int | None = None) -> OfRank:
    if arguments.version != VERSION:
        raise RuntimeError(
            f"this program was traced with version {arguments.version} of dash_attn's operators, and here they have version {VERSION}:"
            " compile it again"
        )
    peers = Peers.named(arguments.group) if arguments.group else Peers.alone()
    sharding = arguments.sharding or Sharding(tuple(arguments.lengths), tuple(arguments.owners))
    ends = None if arguments.cu_seqlens is None else list(arguments.cu_seqlens)
    choices, sharing = arguments.choices._replace(alibi=given.alibi_slopes is not None), Sharing(sharding, arguments.ulysses, ends)
    asked = Asked(q, k, v, given, choices, sharing, peers.count)
    return OfRank.agreed(asked, peers, arguments.differentiable, backward_of)


def _split(rest: tuple[Any, ...]) -> tuple[Given, Arguments]:
    return Given(*rest[:TENSORS]), Arguments(*rest[TENSORS:])


@torch.library.custom_op("dash_attn::context_parallel_attention", mutates_args=(), schema=FORWARD)
def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The last result is the number of the call, on the host, for its backward."""
    given, arguments = _split(rest)
    rank = _rank(q, k, v, given, arguments)
    with rank.everybody.hosts.telling():
        out, lse = rank.forward(q, k, v, given)
    return out, lse, torch.tensor(rank.number, device="cpu")


@torch.library.custom_op("dash_attn::context_parallel_attention_backward", mutates_args=(), schema=BACKWARD)
def backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, number: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last result is empty where there are no sinks: an operator returns tensors only."""
    given, arguments = _split(rest)
    rank = _rank(q, k, v, given, arguments, int(number))
    with rank.everybody.hosts.telling():
        dq, dk, dv, dsinks = rank.backward((dout, q, k, v, out), (lse, dlse), given)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, heads, _ = q.shape
    lse = q.new_empty((batch, heads, rows), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((batch, rows, heads, v.shape[-1])), lse, torch.empty((), dtype=torch.int64, device="cpu")


@backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
