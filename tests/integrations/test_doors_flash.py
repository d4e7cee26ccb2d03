"""flash-attn's functions with random arguments: what its documentation says is computed, or the call is refused clearly.

flash-attn itself needs a GPU, so the original is dense attention written from its documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_attn import Full, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from dash_attn.attention import known
from dash_attn.call import options
from dense import dense
from doors import assert_as_good, random_tensor, refused
from strategies import examples, seeds

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dense": flash_attn_func,
    "qkv": flash_attn_qkvpacked_func,
    "kv": flash_attn_kvpacked_func,
    "varlen": flash_attn_varlen_func,
}
TENSORS = {"dense": ("q", "k", "v"), "qkv": ("qkv",), "kv": ("q", "kv"), "varlen": ("q", "k", "v")}
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
ARGUMENTS = (
    *("q", "k", "v", "qkv", "kv", "KV", "dtype", *PACKED),
    *("dropout_p", "dropout", "softmax_scale", "causal", "window_size", "window", "softcap", "alibi_slopes", "deterministic"),
    *("return_attn_probs", "block_table", "num_splits", "seqused_k", "meta"),
)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """One call. `lengths` are (queries, keys) of each sequence, `sizes` KV heads, query heads per KV head, head dim and that of v.

    `odd` maps names of arguments before dropout_p to what is passed instead of them.
    """

    form: str
    lengths: tuple[tuple[int, int], ...]
    sizes: tuple[int, int, int, int]
    dtype: torch.dtype
    seed: int
    rest: dict[str, Any] = field(default_factory=dict)
    odd: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Any]:
        """What is passed as tensors."""
        heads, group, dim, v_dim = self.sizes
        if self.form == "varlen":
            queries, keys = ((sum(pair[side] for pair in self.lengths),) for side in (0, 1))
        else:
            queries, keys = ((len(self.lengths), self.lengths[0][side]) for side in (0, 1))
        shapes = {
            "q": (*queries, heads * group, dim),
            "k": (*keys, heads, dim),
            "v": (*keys, heads, v_dim),
            "kv": (*keys, 2, heads, dim),
            "qkv": (*queries, 3, heads, dim),
        }
        made = {name: random_tensor(self.seed + i, shapes[name], self.dtype) for i, name in enumerate(TENSORS[self.form])}
        return {name: self.odd.get(name, x) for name, x in made.items()}

    def places(self) -> dict[str, Any]:
        """What is passed of packed sequences."""
        if self.form != "varlen":
            return {}
        sides = [[pair[side] for pair in self.lengths] for side in (0, 1)]
        ends = [torch.tensor(list(accumulate(side, initial=0)), dtype=torch.int32) for side in sides]
        made = dict(zip(PACKED, (*ends, *map(max, sides)), strict=True))
        return {name: self.odd.get(name, value) for name, value in made.items()}

    def run(self) -> dict[str, Tensor]:
        leaves = {name: _as_leaf(x) for name, x in self.tensors().items()}
        results = FUNCTIONS[self.form](*leaves.values(), *self.places().values(), **self.rest)
        if not self.rest.get("return_attn_probs"):
            return self._with_gradients({"out": results}, leaves)
        assert results[2] is None
        return self._with_gradients({"out": results[0], "lse": results[1]}, leaves)

    def original(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """From the documentation, in the dtype given or that of the tensors."""
        leaves = {name: _as_leaf(x.to(dtype or x.dtype)) for name, x in self.tensors().items()}
        out, lse = self._documented(leaves)
        return self._with_gradients({"out": out, "lse": lse} if self.rest.get("return_attn_probs") else {"out": out}, leaves)

    def from_rounded_output(self) -> dict[str, Tensor]:
        """Gradients of a backward that is exact, but starts from the output as it is returned.

        It takes delta = dout . out off each dP, so delta's error r gives dS an error of P r. P is also what the LSE passes on to the
        scores: r as its gradient adds the same.
        """
        leaves = {name: _as_leaf(x.double()) for name, x in self.tensors().items()}
        out, lse = self._documented(leaves)
        dout, returned = self._dout(out), out.to(self._given_dtype())
        r = (dout * (out - returned.double())).detach().sum(-1).transpose(-1, -2)
        attends = lse.isfinite()
        gradients = torch.autograd.grad([out, lse[attends]], list(leaves.values()), [dout, r[attends]])
        return {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}

    def _documented(self, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Output and LSE."""
        q, k, v = (part for name, x in leaves.items() for part in (x.unbind(2) if name in ("qkv", "kv") else (x,)))
        if self.form != "varlen":
            return self._attend(q, k, v)
        q_lengths, kv_lengths = (self.places()[name].diff().tolist() for name in PACKED[:2])
        parts = zip(q.split(q_lengths), k.split(kv_lengths), v.split(kv_lengths), strict=True)
        every = [self._attend(*(x[None] for x in part)) for part in parts]
        return torch.cat([out[0] for out, _ in every]), torch.cat([lse[0] for _, lse in every], -1)

    def _with_gradients(self, answer: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        out = answer["out"]
        gradients = torch.autograd.grad(out, list(leaves.values()), self._dout(out))
        return {name: x.detach() for name, x in answer.items()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}

    def _dout(self, out: Tensor) -> Tensor:
        return random_tensor(self.seed + 9, out.shape, self._given_dtype()).to(out.dtype)

    def _given_dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(x.dtype for x in self.tensors().values())
        return dtype

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keep = documented_mask(q.shape[1], k.shape[1], self.rest.get("causal", False), self.rest.get("window_size", (-1, -1)))
        return dense(q, k, v, keep, self.rest.get("softmax_scale"), self.rest.get("softcap", 0.0))


def documented_mask(q_len: int, kv_len: int, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """Keys from i + kv_len - q_len - left to i + kv_len - q_len + right; -1 is no limit, and causal is right = 0."""
    left, right = (int(width) for width in window_size)
    distance = torch.arange(kv_len) - (torch.arange(q_len)[:, None] + kv_len - q_len)
    keep = torch.ones(q_len, kv_len, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        keep &= distance >= -left
    if right >= 0:
        keep &= distance <= right
    return keep


def _as_leaf(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


lengths = st.one_of(st.integers(0, 12), st.integers(0, 150))
widths = st.one_of(st.just(-1), st.integers(0, 20), st.integers(0, 200), st.just(2**31 - 1))


@st.composite
def served_calls(draw: st.DrawFn) -> Call:
    form = draw(st.sampled_from(list(FUNCTIONS)))
    heads, group, dim = draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 2, 3))), draw(st.integers(1, 20))
    v_dim = draw(st.sampled_from((dim, draw(st.integers(1, 20))))) if form in ("dense", "varlen") else dim
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=3))
    if form == "qkv" or draw(st.booleans()):
        pairs = [(q_len, q_len) for q_len, _ in pairs]
    if form == "qkv":
        group = 1
    if form != "varlen":  # one length for all, and maybe no sequence
        pairs = pairs[:1] * draw(st.integers(1, 2))
    rest: dict[str, Any] = {}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "dropout_p": st.sampled_from((0.0, 0, np.float32(0))),
        "softmax_scale": st.one_of(st.none(), st.floats(0.05, 2), st.floats(-1, -0.05), st.sampled_from((1, np.float32(0.5)))),
        "causal": st.sampled_from((True, False, np.bool_(True))),
        "window_size": st.one_of(st.tuples(widths, widths), st.lists(widths, min_size=2, max_size=2), st.just((np.int64(7), np.int32(0)))),
        "softcap": st.one_of(st.just(0), st.floats(0.5, 20), st.just(5)),
        "deterministic": st.booleans(),
        "return_attn_probs": st.booleans(),
    }
    for name, values in optional.items():
        if draw(st.booleans()):
            rest[name] = draw(values)
    return Call(form, tuple(pairs), (heads, group, dim, v_dim), draw(st.sampled_from(FLOATS)), draw(seeds), rest)


NAN, INF = float("nan"), float("inf")
FLAGS = (1, 0, "False", None, np.bool_(False), torch.tensor(True), torch.ones(2), np.ones(2), [])
NUMBERS = (0, NAN, INF, -1.0, "1", None, True, 1j, 10**400, [1.0], torch.tensor(0.5), torch.ones(2), np.ones(2))
ODD: dict[str, tuple[Any, ...]] = {
    "dropout_p": (1, -0.1, 1.5, 1e-7, 1 - 1e-7, *NUMBERS),
    "softmax_scale": NUMBERS,
    "softcap": NUMBERS,
    "causal": FLAGS,
    "deterministic": FLAGS,
    "return_attn_probs": FLAGS,
    "window_size": (
        *(None, 5, "ab", (), (1,), (1, 2, 3), (None, 0), (1.5, 0), (True, 0), ("1", 0), (NAN, 0), {1, 2}),
        *((-2, 0), (0, -5), (2**31, 0), (2**70, 0), np.array([3, 0]), torch.tensor([3, 0]), (torch.tensor(3), 0), ([1], 2)),
    ),
    "alibi_slopes": (torch.ones(9), torch.ones(1, dtype=torch.int64), 0.0, False),
    "block_table": (torch.zeros(1, 1, dtype=torch.int32), False),
    "num_splits": (1,),
    "seqused_k": (None,),
}
ODD_TENSORS = ([[1.0]], None, np.zeros((1, 5, 2, 8)), torch.zeros(1, 5, 2, 8, device="meta"), torch.zeros(1, 5, 2, 8).to_sparse())
ODD_PLACES = (
    *(None, [0, 5], np.array([0, 5], dtype=np.int32), torch.tensor(5, dtype=torch.int32), torch.tensor([], dtype=torch.int32)),
    *(torch.tensor([0], dtype=torch.int32), torch.tensor([0, 5]), torch.tensor([0.0, 5.0]), torch.tensor([[0, 5]], dtype=torch.int32)),
    *(torch.tensor(x, dtype=torch.int32) for x in ([0, -5], [1, 5], [0, 2**31 - 1], [0, 7, 5], [5, 0], [0, 0, 0, 0, 0, 0])),
    *(torch.tensor([0, 1, 5, 7], dtype=torch.int32)[::2], torch.zeros(2, dtype=torch.int32, device="meta")),
    *(torch.zeros(2, dtype=torch.int32).to_sparse(), torch.tensor([False, True])),
)
ODD_LONGEST = (-1, None, "5", 1.5, True, NAN, torch.tensor(5), torch.ones(2), 2**70, 0, 1)


@st.composite
def any_calls(draw: st.DrawFn) -> Call:
    """A call that is served, and then one or two things are changed, most of which are wrong."""
    call = draw(served_calls())
    for change in draw(st.lists(st.sampled_from((with_argument, with_tensor, with_places)), min_size=1, max_size=2)):
        call = change(draw, call)
    return call


def with_argument(draw: st.DrawFn, call: Call) -> Call:
    name = draw(st.sampled_from(list(ODD)))
    return replace(call, rest={**call.rest, name: draw(st.sampled_from(ODD[name]))})


def with_tensor(draw: st.DrawFn, call: Call) -> Call:
    """Another type, dtype, shape or device of one tensor."""
    name, tensors = draw(st.sampled_from(TENSORS[call.form])), call.tensors()
    x = tensors[name]
    if name in call.odd:
        return call
    dimension = draw(st.integers(0, x.ndim - 1))
    shape = [draw(st.sampled_from((0, 1, 3, 7))) if i == dimension else size for i, size in enumerate(x.shape)]
    others = (x.to(torch.int64), x.half(), x.double(), x.to(torch.complex64), x.to("meta"), x[None], x.flatten(-2), x.new_zeros(shape))
    choices = (*others, x.to(torch.float8_e4m3fn), *ODD_TENSORS)
    return replace(call, odd={**call.odd, name: choices[draw(st.integers(0, len(choices) - 1))]})


def with_places(draw: st.DrawFn, call: Call) -> Call:
    if call.form != "varlen":
        return with_argument(draw, call)
    name = draw(st.sampled_from(PACKED))
    choices = ODD_PLACES if name.startswith("cu") else ODD_LONGEST
    return replace(call, odd={**call.odd, name: choices[draw(st.integers(0, len(choices) - 1))]})


def check_served(call: Call) -> None:
    agree(call, call.run())


def check_any(call: Call) -> None:
    ours = refused(call.run, ARGUMENTS)
    if ours is not None:
        agree(call, ours)


def agree(call: Call, ours: dict[str, Tensor]) -> None:
    plain, truth = call.original(), call.original(torch.float64)
    if "lse" in plain:  # ours is fp32 for 16-bit inputs
        plain["lse"] = plain["lse"].to(torch.float64 if plain["lse"].dtype == torch.float64 else torch.float32)
    assert_as_good(ours, plain, truth, call.from_rounded_output())


@given(call=served_calls())
@examples(300)
def test_served_calls_are_as_documented(call: Call) -> None:
    check_served(call)


@given(call=any_calls())
@examples(800)
def test_any_call_is_as_documented_or_refused(call: Call) -> None:
    check_any(call)


ONE_WEIGHT = [  # one key has nearly all of the weight
    Call("dense", ((1, 40),), (1, 1, dim, dim), torch.bfloat16, seed, {"softmax_scale": 2.0}) for seed, dim in ((520, 16), (1178, 20))
]


@pytest.mark.parametrize("call", ONE_WEIGHT, ids=["dq", "dk"])
def test_gradients_that_cancel_are_as_good_as_their_terms(call: Call) -> None:
    """The control: an error of three times the size is found."""
    ours, truth = call.run(), call.original(torch.float64)
    agree(call, ours)
    for name in ("dq", "dk"):
        off = {**ours, name: (truth[name] + 3 * (ours[name] - truth[name])).to(ours[name].dtype)}
        with pytest.raises(AssertionError, match=f"{name} is off by"):
            agree(call, off)


WINDOW = Call("dense", ((9, 5),), (1, 2, 4, 4), torch.float32, 0, {"window_size": (2, 1)})
FAULTS: dict[str, tuple[Call, Callable[..., Any]]] = {
    "choose_mask": (WINDOW, lambda *_: Full()),
    "is_zero": (replace(WINDOW, rest={"dropout_p": np.zeros(2)}), lambda value: value == 0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each check notices what it is there for."""
    call, fault = FAULTS[name]
    check_any(call)
    monkeypatch.setattr(options, name, fault)
    options._kept.cache_clear()
    known._known.cache_clear()
    with pytest.raises(AssertionError, match=r"off by|raised by chance"):
        check_any(call)
    options._kept.cache_clear()


@pytest.mark.exhaustive
@given(call=served_calls())
@examples(10000)
def test_many_served_calls_are_as_documented(call: Call) -> None:
    check_served(call)


@pytest.mark.exhaustive
@given(call=any_calls())
@examples(15000)
def test_many_calls_are_as_documented_or_refused(call: Call) -> None:
    check_any(call)
