"""Programs a call cannot stand in raise; none of them gives a wrong derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dense import random_inputs

Q = random_inputs(20, 20, dim=8, dtype=torch.float64)[0]
ENDS = torch.tensor([0, 5, 20], dtype=torch.int32)


def dense(x: Tensor) -> Tensor:
    return flash_attn_func(x, x, x, causal=True)


def packed(x: Tensor) -> Tensor:
    return flash_attn_varlen_func(x[0], x[0], x[0], ENDS, ENDS, 15, 15)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(Q),
    "vjp": lambda f: torch.func.vjp(f, Q),
    "jvp": lambda f: torch.func.jvp(f, (Q,), (Q,)),
    "vmap": lambda f: torch.func.vmap(f)(Q[None]),
    "jacrev": lambda f: torch.func.jacrev(f)(Q),
}


@pytest.mark.parametrize("attend", [dense, packed])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_raise(name: str, attend: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"does not run under torch.func transforms .*loss.backward\(\)"):
        TRANSFORMS[name](attend)


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap"])
def test_compiled_transforms_raise(name: str) -> None:
    """Without the check, the forward mode of a compiled call was zero."""
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"does not run under torch\.func transforms"):
        torch.compile(lambda: TRANSFORMS[name](dense), backend="eager", fullgraph=True)()
    torch._dynamo.reset()
    assert torch.compile(dense, backend="eager", fullgraph=True)(Q).shape == Q.shape  # the control


def test_forward_mode_raises() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(Q, Q)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            dense(dual)


@pytest.mark.parametrize("attend", [dense, packed])
def test_jit_trace_raises(attend: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"does not run under torch.jit.trace; use torch.compile or torch.export"):
        torch.jit.trace(attend, (Q,))


class Subclass(torch.Tensor):
    """A tensor that is not plain: its calls go through the operator."""


@pytest.mark.parametrize("flag", ["causal", "deterministic", "return_lse", "return_attn_probs"])
def test_flags_are_checked_for_traced_calls_too(flag: str) -> None:
    x = Q.as_subclass(Subclass)
    with pytest.raises(TypeError, match=f"{flag} must be True or False; got 'False'"):
        flash_attn_func(x, x, x, **{flag: "False"})
    with pytest.raises(TypeError, match=f"{flag} must be True or False; got 'False'"):
        flash_attn_varlen_func(x[0], x[0], x[0], ENDS, ENDS, 15, 15, **{flag: "False"})
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"{flag} must be True or False"):
        torch.compile(lambda: flash_attn_func(Q, Q, Q, **{flag: "False"}), backend="eager", fullgraph=True)()


def test_nested_tensors_are_named() -> None:
    nested = torch.nested.nested_tensor([Q[0], Q[0, :5]], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"q must be dense \(layout torch.strided\); got a nested tensor"):
        flash_attn_func(nested, nested, nested)
    with pytest.raises(ValueError, match=r"q must be dense \(layout torch.strided\); got a nested tensor"):
        flash_attn_varlen_func(nested, nested, nested, ENDS, ENDS, 15, 15)


@pytest.mark.parametrize(("tokens", "q_ends", "k_ends"), [((0, 3), (0, -5), (0, 3)), ((6, 0), (0, 99), (0, 7))])
def test_lengths_are_checked_where_there_is_nothing_to_compute(tokens: Any, q_ends: Any, k_ends: Any) -> None:
    q, k = (torch.zeros(n, 1, 8) for n in tokens)
    ends = [torch.tensor(x, dtype=torch.int32) for x in (q_ends, k_ends)]
    with pytest.raises(ValueError, match="cu_seqlens_q must"):
        flash_attn_varlen_func(q, k, k, *ends, 9, 9)
