"""scaled_dot_product_attention with random arguments: inside sdpa.enable() a call is PyTorch's call, or is refused clearly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dash_attn import Causal
from dash_attn.integrations import sdpa
from doors import assert_as_good, random_tensor, refused
from strategies import examples, seeds

NAMES = ("query", "key", "value")
ARGUMENTS = (*NAMES, "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "backend")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "length first", "every second", "expanded", "heads backwards")


@dataclass(frozen=True)
class Call:
    """One call. `odd` maps tensors' names to what is passed instead of them."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3
    layouts: tuple[str, ...] = ("contiguous",) * 3
    wants_gradient: tuple[bool, ...] = (True,) * 3
    autocast: torch.dtype | None = None
    seed: int = 0
    rest: dict[str, Any] = field(default_factory=dict)
    odd: dict[str, Any] = field(default_factory=dict)

    def run(self, exact: bool = False) -> dict[str, Tensor]:
        """Output and gradients of whatever the name stands for now; exact: in float64."""
        leaves, passed = [], []
        for i in range(3):
            leaf, tensor = self._tensor(i, exact)
            leaves.append(leaf)
            passed.append(self.odd.get(NAMES[i], tensor))
        with nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast):
            out = functional.scaled_dot_product_attention(*passed, **self.rest)
        results = {"out": out.detach()}
        wanted = {f"d{name}": leaf for name, leaf in zip(NAMES, leaves, strict=True) if leaf.requires_grad}
        if out.requires_grad and not self.odd:
            dout = random_tensor(self.seed + 9, out.shape, out.dtype)
            results |= zip(wanted, torch.autograd.grad(out, list(wanted.values()), dout), strict=True)
        return results

    def _tensor(self, i: int, exact: bool) -> tuple[Tensor, Tensor]:
        """A leaf, and what is passed of it: a view of the shape that was asked for."""
        shape, dtype, layout = self.shapes[i], self.dtypes[i], self.layouts[i]
        layout = "contiguous" if len(shape) != 4 else layout
        stored = {
            "length first": lambda b, h, n, d: (b, n, h, d),
            "every second": lambda b, h, n, d: (b, h, 2 * n, d),
            "expanded": lambda b, h, n, d: (min(b, 1), h, n, d),
        }.get(layout, lambda *sizes: sizes)(*shape)
        view: Callable[[Tensor], Tensor] = {
            "length first": lambda x: x.transpose(1, 2),
            "every second": lambda x: x[:, :, ::2],
            "expanded": lambda x: x.expand(shape),
            "heads backwards": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        }.get(layout, lambda x: x)
        leaf = random_tensor(self.seed + i, stored, dtype)
        leaf = leaf.double() if exact else leaf
        if dtype in FLOATS:
            leaf.requires_grad_(self.wants_gradient[i])
        return leaf, view(leaf)


@st.composite
def served_calls(draw: st.DrawFn) -> Call:
    """Calls that docs/migration.md says are served."""
    batch, kv_heads, group = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 2, 3)))
    q_len, kv_len = draw(st.integers(0, 90)), draw(st.integers(0, 150))
    if draw(st.booleans()):
        kv_len = q_len
    dim = draw(st.integers(1, 20))
    v_dim = draw(st.sampled_from((dim, dim, draw(st.integers(1, 20)))))
    autocast = draw(st.sampled_from((None, None, torch.bfloat16, torch.float16)))
    dtype = draw(st.sampled_from(FLOATS))
    dtypes = (dtype,) * 3
    if autocast is not None and dtype != torch.float64:
        dtypes = tuple(draw(st.sampled_from(FLOATS[1:])) for _ in range(3))
    rest: dict[str, Any] = {}
    if group > 1 or draw(st.booleans()):
        rest["enable_gqa"] = group > 1 or draw(st.booleans())
    if draw(st.booleans()):
        rest["is_causal"] = draw(st.booleans())
    if draw(st.booleans()):
        rest["scale"] = draw(
            st.one_of(st.none(), st.floats(0.05, 2), st.floats(-2, -0.05), st.sampled_from((1, np.float32(0.5), np.int64(1))))
        )
    if draw(st.booleans()):
        rest["dropout_p"] = draw(st.sampled_from((0.0, 0, False, -0.0, np.float32(0))))
    shapes = (batch, kv_heads * group, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)
    layouts = tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(3))
    gradients = tuple(draw(st.sampled_from((True, True, False))) for _ in range(3))
    if draw(st.booleans()):
        shapes = other_leading(draw, shapes, rest.get("enable_gqa", False))
    return Call(shapes, dtypes, layouts, gradients, autocast, draw(seeds), rest)


def other_leading(draw: st.DrawFn, shapes: tuple[tuple[int, ...], ...], gqa: bool) -> tuple[tuple[int, ...], ...]:
    """No batch, no heads either, two batches, or sizes that broadcast."""
    how = draw(st.sampled_from(("no batch", "two batches", "one sequence for all", "one KV head", "no heads")))
    if how == "no batch":
        return tuple(shape[1:] for shape in shapes)
    if how == "two batches":
        return tuple((2, *shape) for shape in shapes)
    if how == "one sequence for all":
        return shapes[0], *((1, *shape[1:]) for shape in shapes[1:])
    if how == "one KV head":
        return shapes[0], *((shape[0], 1, *shape[2:]) for shape in shapes[1:])
    return tuple(shape[-3:] if gqa else shape[-2:] for shape in shapes)


NAN, INF = float("nan"), float("inf")
ODD_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "dropout_p": (1.0, -0.1, 1.5, NAN, "0", None, True, np.float64(1e-7), torch.zeros(()), torch.zeros(2), np.zeros(2), 0j),
    "is_causal": (1, 0, "False", None, np.bool_(True), torch.tensor(True), np.ones(2), []),
    "enable_gqa": (1, 0, "no", None, np.bool_(False), torch.ones(2)),
    "scale": (0, 0.0, NAN, INF, -INF, "1", True, 1j, 10**400, [1.0], torch.tensor(0.5), torch.ones(2), np.ones(2)),
    "attn_mask": (torch.ones(1, dtype=torch.bool), torch.zeros(1), torch.zeros(2, 1, 1, 1), False, "causal", 0),
    "mask": (None, "causal"),
}
x4 = torch.zeros(1, 2, 5, 8)
ODD_TENSORS = (
    [[1.0]],
    None,
    np.zeros((1, 2, 5, 8)),
    x4.to("meta"),
    x4.to_sparse(),
    torch.nested.nested_tensor([torch.ones(2, 3, 8)], layout=torch.jagged),
    torch.nested.nested_tensor([torch.ones(2, 3, 8)]),
)
OTHER_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


@st.composite
def any_calls(draw: st.DrawFn) -> Call:
    """A call that is served, and then one or two things are changed, most of which are wrong."""
    call = draw(served_calls())
    for change in draw(st.lists(st.sampled_from((with_argument, with_tensor, with_dtype, with_shape, with_ndim)), min_size=1, max_size=2)):
        call = change(draw, call)
    return call


def with_argument(draw: st.DrawFn, call: Call) -> Call:
    name = draw(st.sampled_from(list(ODD_ARGUMENTS)))
    return replace(call, rest={**call.rest, name: draw(st.sampled_from(ODD_ARGUMENTS[name]))})


def with_tensor(draw: st.DrawFn, call: Call) -> Call:
    names = draw(st.sampled_from([*((name,) for name in NAMES), NAMES]))
    odd = draw(st.sampled_from(range(len(ODD_TENSORS))))
    return replace(call, odd={**call.odd, **dict.fromkeys(names, ODD_TENSORS[odd])})


def with_dtype(draw: st.DrawFn, call: Call) -> Call:
    dtype, places = draw(st.sampled_from((*FLOATS, *OTHER_DTYPES))), draw(st.sampled_from(((0,), (1,), (2,), (1, 2), (0, 1, 2))))
    return replace(call, dtypes=tuple(dtype if i in places else old for i, old in enumerate(call.dtypes)))


def with_shape(draw: st.DrawFn, call: Call) -> Call:
    """Another size of one dimension, of one tensor or of two."""
    places, dimension = draw(st.sampled_from(((0,), (1,), (2,), (1, 2)))), draw(st.integers(-4, -1))
    size = draw(st.sampled_from((0, 1, 2, 3, 7)))
    shapes = [list(shape) for shape in call.shapes]
    for i in places:
        if -dimension <= len(shapes[i]):
            shapes[i][dimension] = size
    return replace(call, shapes=tuple(map(tuple, shapes)))


def with_ndim(draw: st.DrawFn, call: Call) -> Call:
    places, change = draw(st.sampled_from(((0,), (1, 2), (0, 1, 2)))), draw(st.sampled_from((-3, -2, -1, 1)))
    shapes = [((2, *shape) if change > 0 else shape[-change:]) if i in places else shape for i, shape in enumerate(call.shapes)]
    return replace(call, shapes=tuple(shapes))


def check_agrees(call: Call, ours: dict[str, Tensor]) -> None:
    """PyTorch's flash kernel for the CPU gives NaN where the scale is negative and keys are masked. NumPy's truth values, which it refuses,
    are answered as its own. Under autocast it refuses masks of numbers beside float64, so it is given boolean ones."""
    call = replace(call, rest={name: bool(value) if isinstance(value, np.bool_) else value for name, value in call.rest.items()})
    mask = call.rest.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        call = replace(call, rest={**call.rest, "attn_mask": mask == 0})
    assert call.rest.get("dropout_p", 0) == 0, "a random call was answered"
    scale = call.rest.get("scale")
    with sdpa_kernel(SDPBackend.MATH):
        truth, plain = call.run(exact=True), call.run()
    assert_as_good(ours, plain if scale is not None and scale < 0 else call.run(), truth)
    if call.layouts[0] == "contiguous":
        assert ours["out"].is_contiguous()


def check_served(call: Call) -> None:
    with sdpa.enable():
        ours = call.run()
    check_agrees(call, ours)


def check_any(call: Call) -> None:
    """Ours runs first: PyTorch reads past the end of a value that is shorter than the key."""
    with sdpa.enable():
        ours = refused(call.run, ARGUMENTS)
    if ours is not None:
        check_agrees(call, ours)


@given(call=served_calls())
@examples(500)
def test_served_calls_are_pytorchs(call: Call) -> None:
    check_served(call)


@given(call=any_calls())
@examples(1000)
def test_any_call_is_pytorchs_or_refused(call: Call) -> None:
    check_any(call)


ALIGNED = Call(((1, 2, 9, 4), (1, 2, 5, 4), (1, 2, 5, 4)), rest={"is_causal": True})
MIXED = Call(((1, 2, 9, 4),) * 3, dtypes=(torch.float32, torch.float32, torch.bfloat16), autocast=torch.bfloat16)
FAULTS = {
    "_first_aligned": (ALIGNED, lambda *_: Causal()),
    "under_autocast": (replace(MIXED, dtypes=(torch.float32,) * 3), lambda *tensors: tensors),
    "_check_tensors": (replace(MIXED, autocast=None, shapes=((1, 2, 9, 4), (1, 3, 9, 4), (1, 3, 9, 4))), lambda *_: None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each check notices what it is there for."""
    call, fault = FAULTS[name]
    check_any(call)
    monkeypatch.setattr(sdpa, name, fault)
    with pytest.raises(AssertionError, match=r"off by|is torch.float32, the original's is torch.bfloat16|names no argument|a random call"):
        check_any(call)


@pytest.mark.exhaustive
@given(call=served_calls())
@examples(15000)
def test_many_served_calls_are_pytorchs(call: Call) -> None:
    check_served(call)


@pytest.mark.exhaustive
@given(call=any_calls())
@examples(30000)
def test_many_calls_are_pytorchs_or_refused(call: Call) -> None:
    check_any(call)
