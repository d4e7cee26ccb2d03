"""How an operator is made known to PyTorch.

As torch.library.custom_op does it, a compiled program enters Python twice for each operator, for autograd and for what runs, through three
wrappers. Here autograd's entry looks whether anything is left to do but to run, and then runs.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._library.autograd import Info, make_autograd_impl

NAMESPACE = "dash_attn"  # a kernel of the Hub has another one (tools/hub_kernel.py)
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


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


@lru_cache
def _only_runs(keys: int) -> bool:
    """Whether behind autograd a call comes to its backend: nobody traces it, no mode or subclass of tensors wants to see it."""
    left = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    return left.highestPriorityTypeId() in BACKENDS
