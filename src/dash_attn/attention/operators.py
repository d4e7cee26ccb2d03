"""How an operator is made known to PyTorch.

As torch.library.custom_op does it, a compiled program enters Python twice for each operator, for autograd and for what runs, through three
wrappers. Here autograd's entry looks whether anything is left to do but to run, and then runs.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NewType, get_type_hints

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._library.autograd import Info, make_autograd_impl

NAMESPACE = "dash_attn"  # a kernel of the Hub has another one (tools/hub_kernel.py)
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
Version = NewType("Version", int)  # of operators: part of every traced program, so no symbol
KINDS: dict[Any, str] = {
    **{Tensor | None: "Tensor?", int: "SymInt", Sequence[int]: "SymInt[]", Version: "int"},
    **{float: "float", float | None: "float?", str: "str"},
}


def in_schema(arguments: type) -> str:
    """The fields of a NamedTuple, as an operator's schema has them."""
    return ", ".join(f"{KINDS[kind]} {name}" for name, kind in get_type_hints(arguments).items())


def define_operator(
    schema: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    formula: tuple[Callable[..., Any] | None, Callable[..., Any] | None] = (None, None),
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """shapes: what `run` returns for fake tensors. formula: a backward, and what keeps its inputs; without them it raises."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, _disable_dynamo(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=LIBRARY)
    differentiate = make_autograd_impl(getattr(getattr(torch.ops, NAMESPACE), name).default, Info(*formula))

    def enter(keys: Any, *given: Any) -> Any:
        has_gradient = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
        return differentiate(keys, *given) if has_gradient or not _only_runs(keys.raw_repr()) else run(*given)

    LIBRARY.impl(name, _disable_dynamo(enter), "Autograd", with_keyset=True)


def formula(backward: Callable[[Any], Any], tensors: int, alone: bool = True) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The backward of an operator that gives output and LSE, and what keeps its inputs. The first of these are so many tensors: q, k, v,
    sinks and others.

    backward: gives the operator for the last of these tensors. alone: nobody waits for a backward in which there is nothing to do.
    """

    def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        (out, *saved), unused = ctx.saved_tensors, (None,) * (tensors - 4 + len(ctx.choices))
        if dout is None:
            if dlse is None and alone:
                return (None,) * 4 + unused
            dout = torch.zeros_like(out)  # only the LSE was used
        dq, dk, dv, dsinks = backward(saved[-1])(dout, dlse, out, *saved, *ctx.choices)
        return dq, dk, dv, None if saved[3 - tensors] is None else dsinks, *unused

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.choices = inputs[tensors:]
        ctx.save_for_backward(*output, *inputs[:tensors])
        ctx.set_materialize_grads(False)

    return differentiate, keep


@lru_cache
def _only_runs(keys: int) -> bool:
    """Whether behind autograd a call comes to its backend: nobody traces it, no mode or subclass of tensors wants to see it."""
    left = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    return left.highestPriorityTypeId() in BACKENDS
