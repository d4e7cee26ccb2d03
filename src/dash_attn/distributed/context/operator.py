"""context_parallel_attention as torch operators, for torch.compile. They are never looked into: messages are part of a call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention.operators import define_operator, formula
from ...attention.torch_ops import check_version, empty_gradients, empty_results, schedule_text
from ...call.call import Call, Given, Grads, Saved
from ...call.options import choose_mask
from ...masks.encoding import decode_mask, encode_mask
from ...scheduling.ranks.sharding import Sharding
from ..peers import Group, Peers, process_group
from .asked import Asked
from .of_rank import OfRank

# Part of every traced program, so that one whose operators meant something else is refused, not run.
VERSION = 5
CHOSEN = {  # of Choices, in the form in which they are given
    "softmax_scale": "float?",
    "softcap": "float",
    "schedule": "str",
    "backend": "str",
    "head_offset": "SymInt",
    "dropout_p": "float",
}
REST = {  # what the operators take behind q, k and v, in the order of their schema
    **dict.fromkeys(Given._fields, "Tensor?"),
    "group": "str",  # its name; empty: this process is alone
    "sharding": "str",  # a name; empty: lengths and owners say it
    "lengths": "SymInt[]",
    "owners": "SymInt[]",
    "ulysses": "int",
    "cu_seqlens": "SymInt[]?",
    "mask": "str",
    "mask_sizes": "SymInt[]",
    "differentiable": "bool",
    "version": "int",
    **CHOSEN,
}
INPUTS = ", ".join(["Tensor q, Tensor k, Tensor v", *(f"{kind} {name}" for name, kind in REST.items())])
FORWARD = f"({INPUTS}) -> (Tensor, Tensor, Tensor)"
BACKWARD = f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor number, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
TENSORS = 3 + len(Given._fields)  # of these


def traced_attention(asked: Asked, group: Group) -> tuple[Tensor, Tensor]:
    """The operator."""
    q, k, v, given, choices, sharding, ulysses, cu_seqlens = asked
    if isinstance(cu_seqlens, Tensor):
        raise TypeError("a traced program takes cu_seqlens as whole numbers: pass cu_seqlens.tolist(), made outside of the program")
    chunks = ("", list(sharding.lengths), list(sharding.owners)) if isinstance(sharding, Sharding) else (sharding, list[int](), list[int]())
    ends = None if cu_seqlens is None else list(cu_seqlens)
    mask = encode_mask(choose_mask(choices.mask, choices.causal, choices.window_size))
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, given.sinks))
    shared = _name_of(group), *chunks, ulysses, ends, *mask, differentiable, VERSION
    chosen = [getattr(choices._replace(schedule=schedule_text(choices.schedule)), name) for name in CHOSEN]
    out, lse, _ = torch.ops.dash_attn.context_parallel_attention(q, k, v, *given, *shared, *chosen)
    return out, lse


def _name_of(group: Group) -> str:
    found = process_group(group)
    return "" if found is None else str(found.group_name)


# A group stands in a traced program by its name. (As torch.compiler.assume_constant_result does, which imports the whole compiler.)
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _rank(q: Tensor, k: Tensor, v: Tensor, rest: Sequence[Any], backward_of: int | None = None) -> tuple[OfRank, Call]:
    """rest: what follows these tensors."""
    found = dict(zip(REST, rest, strict=True))
    check_version(found["version"], VERSION, "operators")
    ends, mask = found["cu_seqlens"], decode_mask(found["mask"], found["mask_sizes"])
    peers = Peers.named(found["group"]) if found["group"] else Peers.alone()
    sharding = found["sharding"] or Sharding(tuple(found["lengths"]), tuple(found["owners"]))
    read = {"q": q, "k": k, "v": v, "mask": mask, "sharding": sharding, "cu_seqlens": None if ends is None else list(ends)}
    asked = Asked.by_name({**found, **read})
    rank = OfRank.agreed(asked, peers, found["differentiable"], backward_of)
    return rank, Call(q, k, v, rank.part.options, None, asked.given.sinks, asked.given.modifiers)


def _run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The last result is the number of the call, on the host, for its backward."""
    rank, call = _rank(q, k, v, rest)
    out, lse = rank.forward(call)
    return out, lse, torch.tensor(rank.number, device="cpu")


def _run_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, number: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last result is empty where there are no sinks: an operator returns tensors only."""
    rank, call = _rank(q, k, v, rest, int(number))
    dq, dk, dv, dsinks = rank.backward(call, Saved(out, lse), Grads(dout, dlse))
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *empty_results(q, v.shape[-1]), torch.empty((), dtype=torch.int64, device="cpu")


def _shapes_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(*arguments[5:9])


FORMULA = formula(lambda _: torch.ops.dash_attn.context_parallel_attention_backward, TENSORS, alone=False)
define_operator(f"context_parallel_attention{FORWARD}", _run, _shapes, FORMULA)
define_operator(f"context_parallel_attention_backward{BACKWARD}", _run_backward, _shapes_backward)
