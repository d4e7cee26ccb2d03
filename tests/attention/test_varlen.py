"""Packed batches: every sequence has the bits it has alone, and lengths that make no sense are refused."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from budget import assert_within_budget
from dash_attn import Causal, Documents, Full, Mask, Window, flash_attn_func, flash_attn_varlen_func
from dash_attn.attention.autograd import attention_backward
from dash_attn.call.call import Call, Gradients, Grads, Saved
from dense import Results, assert_same_bits, random_inputs, run_dense, run_ours

LENGTHS = [(70, 70), (0, 0), (200, 330), (1, 1), (0, 5), (140, 90)]  # (queries, keys) of each sequence
BOTH = {"heads": (4, 2), "dim": 16}


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


def sequences(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, ...]]:
    return [random_inputs(q_len, kv_len, dtype=dtype, seed=i, **BOTH) for i, (q_len, kv_len) in enumerate(LENGTHS)]


def run_varlen(parts: list[tuple[Tensor, ...]], **options: Any) -> list[Results]:
    """Pack, run once, and cut the results back into sequences."""
    q, k, v, dout = (torch.cat([part[i][0] for part in parts]) for i in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    q_lengths, kv_lengths = ([part[i].shape[1] for part in parts] for i in (0, 1))
    arguments = (offsets(q_lengths), offsets(kv_lengths), max(q_lengths), max(kv_lengths))
    out, lse = flash_attn_varlen_func(*leaves, *arguments, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    cut = [x.detach().split(n) for x, n in ((out, q_lengths), (dq, q_lengths), (dk, kv_lengths), (dv, kv_lengths))]
    lse_parts = lse.split(q_lengths, 1)
    return [Results(o[None], part[None], *(g[None] for g in grads)) for o, part, *grads in zip(cut[0], lse_parts, *cut[1:], strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(50, 10)], ids=str)
def test_every_sequence_has_its_own_bits_and_is_right(mask: Mask, dtype: torch.dtype) -> None:
    parts = sequences(dtype)
    for part, packed in zip(parts, run_varlen(parts, mask=mask), strict=True):
        assert_same_bits(packed, run_ours(part, mask), f"length {part[0].shape[1]}")
        if part[0].numel():
            assert_within_budget(packed, run_dense(part, mask, dtype), run_dense(part, mask, torch.float64))


def test_bits_do_not_depend_on_the_neighbours() -> None:
    parts = sequences()
    forward, backward = run_varlen(parts, causal=True), run_varlen(parts[::-1], causal=True)[::-1]
    for one, other in zip(forward, backward, strict=True):
        assert_same_bits(one, other)
    changed = [*parts[:2], tuple(x + 1 for x in parts[2]), *parts[3:]]
    again = run_varlen(changed, causal=True)
    assert not torch.equal(again[2].out, forward[2].out)
    for place in (0, 1, 3, 4, 5):
        assert_same_bits(again[place], forward[place])


def test_nothing_but_empty_sequences() -> None:
    nothing = torch.zeros(0, 2, 8)
    out, lse = flash_attn_varlen_func(nothing, nothing, nothing, offsets([0, 0]), offsets([0, 0]), 0, 0, return_lse=True)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)


def test_queries_without_keys_get_zeros() -> None:
    q, k = torch.ones(5, 2, 8), torch.ones(3, 2, 8)
    out, lse = flash_attn_varlen_func(q, k, k, offsets([2, 3]), offsets([0, 3]), 3, 3, return_lse=True)
    assert not out[:2].any()
    assert (lse[:, :2] == -torch.inf).all()
    assert (out[2:] == 1).all()


def test_positional_order_is_flash_attentions() -> None:
    q, k, v, _ = (x[0] for x in random_inputs(100, 100))
    cu = offsets([100])
    positional = flash_attn_varlen_func(q, k, v, cu, cu, 100, 100, 0.0, 0.3, True, (40, 40), 5.0, None, True, True, None)
    named = flash_attn_func(q[None], k[None], v[None], softmax_scale=0.3, mask=Window(40, 0), softcap=5.0, return_lse=True)
    assert torch.equal(positional[0], named[0][0])
    assert torch.equal(positional[1], named[1][0])
    assert positional[2] is None
    assert torch.equal(flash_attn_varlen_func(q, k, v, cu, cu, 100, 100), flash_attn_func(q[None], k[None], v[None])[0])


GOOD: dict[str, Any] = {
    "q": torch.zeros(10, 4, 16),
    "k": torch.zeros(12, 2, 16),
    "v": torch.zeros(12, 2, 16),
    "cu_seqlens_q": offsets([4, 6]),
    "cu_seqlens_k": offsets([7, 5]),
    "max_seqlen_q": 6,
    "max_seqlen_k": 7,
}
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(1, 10, 4, 16)}, ValueError, r"q must be 3-d \(tokens, heads, head dim\); got shape \(1, 10, 4, 16\)"),
    ({"k": [1.0]}, TypeError, r"k must be a tensor; got list"),
    ({"v": torch.zeros(11, 2, 16)}, ValueError, r"same number of tokens; got .*v \(11, 2, 16\)"),
    ({"v": torch.zeros(12, 2, 16).double()}, ValueError, r"one dtype"),
    ({"cu_seqlens_q": [0, 4, 10]}, TypeError, r"cu_seqlens_q must be a tensor; got list"),
    ({"cu_seqlens_q": offsets([4, 6]).long()}, ValueError, r"cu_seqlens_q must be a 1-d int32 tensor .*got torch.int64"),
    ({"cu_seqlens_k": offsets([7, 5])[None]}, ValueError, r"cu_seqlens_k must be a 1-d int32 .*got torch.int32 of shape \(1, 3\)"),
    ({"cu_seqlens_k": offsets([])}, ValueError, r"at least two; got torch.int32 of shape \(1,\)"),
    ({"cu_seqlens_q": offsets([4, 6]) + 1}, ValueError, r"cu_seqlens_q must start at 0 and end at .*\(10\); got 1 and 11"),
    ({"cu_seqlens_q": offsets([4, 5])}, ValueError, r"cu_seqlens_q must start at 0 and end at .*\(10\); got 0 and 9"),
    ({"cu_seqlens_k": offsets([14, -2])}, ValueError, r"cu_seqlens_k must not decrease; got 14 followed by 12 at entry 2"),
    (
        {"cu_seqlens_k": torch.tensor([0, 9, 7, 9, 12, 9], dtype=torch.int32)[::2]},
        ValueError,
        r"cu_seqlens_k must be contiguous; got stride 2",
    ),
    ({"cu_seqlens_q": offsets([4, 6]).to("meta")}, ValueError, r"cu_seqlens_q must be on the device of q, k and v \(cpu\); got meta"),
    ({"cu_seqlens_k": offsets([7, 3, 2])}, ValueError, r"cu_seqlens_q and cu_seqlens_k must have the same length; got 3 and 4"),
    ({"max_seqlen_q": 5}, ValueError, r"max_seqlen_q must be at least the longest sequence \(6\); got 5"),
    ({"max_seqlen_k": 7.0}, ValueError, r"max_seqlen_k must be a whole number >= 0; got 7.0"),
    ({"block_table": torch.zeros(2, 1)}, ValueError, r"k_cache must be 4-d"),
    ({"dropout_p": 1}, ValueError, r"dropout_p must be 0, or from 1/65536 to 1 - 1/65536; got 1"),
    ({"dropout_seed": torch.zeros(3, dtype=torch.int64)}, ValueError, r"dropout_seed must be 2 numbers of torch.int64, one per sequence"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes must be floating-point numbers of shape \(4,\).*or \(2, 4\)"),
    ({"mask": Documents((4,))}, ValueError, r"documents need as many queries as keys.*got 4 queries and 7 keys"),
    ({"backend": "hopper"}, ValueError, r"needs cuda tensors"),
    ({"shedule": "auto"}, TypeError, r"unexpected keyword"),
]


def test_the_arguments_that_the_errors_start_from_are_good() -> None:
    assert flash_attn_varlen_func(**GOOD).shape == (10, 4, 16)


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**{**GOOD, **changes})


class Recorder:
    """A backend that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def forward(self, call: Call) -> Saved:
        self.calls.append(call)
        return Saved(torch.empty_like(call.q), call.q.new_empty(call.q.shape[1], len(call.q), dtype=torch.float32))

    def prepared(self, call: Call) -> None:
        """Nothing."""

    def backward(self, call: Call, saved: Saved, grads: Grads) -> Gradients:
        self.calls.append(call)
        return Gradients(*(x.clone() for x in call.tensors))


def test_on_the_gpu_lengths_are_not_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whoever reads one gets an error."""
    backend = Recorder()
    monkeypatch.setattr("dash_attn.backends.run.backend_for", lambda name, device: backend)
    monkeypatch.setattr("dash_attn.attention.functions.is_traced", lambda *_: False)  # or fake tensors would not come as far as a backend
    with FakeTensorMode():
        x = torch.empty(12, 2, 64, dtype=torch.bfloat16, device="cuda")
        cu = torch.empty(3, dtype=torch.int32, device="cuda")
        with pytest.raises(RuntimeError):  # the control
            cu.tolist()
        out, lse = flash_attn_varlen_func(x, x, x, cu, cu, 7, 7, causal=True, return_lse=True)
        # The engine itself cannot run on fake GPU tensors in a build without CUDA.
        attention_backward(backend.calls[0], Saved(out, lse), Grads(out))
        with pytest.raises(ValueError, match="cu_seqlens_k must be on the device of q, k and v \\(cuda:0\\); got cpu"):
            flash_attn_varlen_func(x, x, x, cu, torch.empty(3, dtype=torch.int32), 7, 7)
    assert len(backend.calls) == 2
    for call in backend.calls:
        assert (call.options.mask, call.sinks) == (Causal(), None)
        offsets = call.offsets
        assert offsets is not None
        assert (offsets.cu_seqlens_q is cu, offsets.max_seqlen_q, offsets.max_seqlen_k) == (True, 7, 7)


def test_a_packed_batch_is_one_differentiable_step() -> None:
    q, k, v, _ = (x[0] for x in random_inputs(100, 100))
    cu = offsets([40, 60])
    out = flash_attn_varlen_func(q.requires_grad_(), k, v, cu, cu, 60, 60)
    assert type(out.grad_fn).__name__ == "AttentionBackward"
    assert out.grad_fn.next_functions[0][0].variable is q


def test_changing_the_lengths_before_the_backward_is_noticed() -> None:
    q, k, v, _ = (x[0] for x in random_inputs(100, 100))
    cu = offsets([40, 60])
    out = flash_attn_varlen_func(q.requires_grad_(), k, v, cu, cu.clone(), 60, 60)
    cu[1] = 41
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
