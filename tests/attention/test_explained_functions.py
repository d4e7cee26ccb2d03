"""One explain for every function: of packed sequences and of tensors side by side it says what it says of the same call in another form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import (
    Causal,
    Documents,
    Full,
    Mask,
    Prefix,
    ScheduleError,
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from dash_attn.call.explain import Explanation
from dash_attn.scheduling import generate
from dash_attn.scheduling.problem import Problem

LENGTHS = (37, 300, 1, 262)
TOKENS = sum(LENGTHS)
CPU: dict[str, Any] = {"device": "cpu"}
HOPPER: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
BACKENDS = {"cpu": CPU, "hopper": HOPPER, "triton": HOPPER}


def ends_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def tokens(backend: str, count: int = TOKENS, heads: tuple[int, int] = (4, 2), dim: int = 64) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(count, n, dim, **BACKENDS[backend]) for n in (heads[0], heads[1], heads[1]))


def packed(
    backend: str, lengths: tuple[int, ...] = LENGTHS, keys: tuple[int, ...] | None = None, longest: int = 0, **options: Any
) -> Explanation:
    """Lengths are on the CPU, wherever the tensors are."""
    keys = lengths if keys is None else keys
    (q, _, _), (_, k, v) = tokens(backend, sum(lengths)), tokens(backend, sum(keys))
    offsets = ends_of(lengths), ends_of(keys), max(longest, *lengths), max(longest, *keys)
    found = explain(flash_attn_varlen_func, q, k, v, *offsets, backend=backend, **options)
    assert isinstance(found, Explanation)
    return found


def dense(backend: str, mask: Mask, length: int = TOKENS, **options: Any) -> Any:
    return explain(flash_attn_func, *(x[None] for x in tokens(backend, length)), mask=mask, backend=backend, **options)


# Packed sequences


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_have_the_order_of_documents(backend: str, causal: bool) -> None:
    found, documents = packed(backend, causal=causal, longest=512), dense(backend, Documents(LENGTHS, causal=causal))
    assert found.order_hash == documents.order_hash
    assert (found.backend, found.schedule, found.guarantees) == (backend, documents.schedule, documents.guarantees)
    same = replace(documents, prediction_note=found.prediction_note)
    assert found == same, "there is room for a document of 512, too"
    assert packed(backend, mask=Causal() if causal else Full(), longest=512) == found
    assert packed(backend, causal=causal).order_hash == found.order_hash


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_decides_their_order(backend: str) -> None:
    first = packed(backend, causal=True).order_hash
    assert packed(backend, causal=True, softcap=3.0).order_hash == first
    others = [
        packed(backend).order_hash,
        packed(backend, LENGTHS[::-1], causal=True).order_hash,
        packed(backend, (37, 300, 263), causal=True).order_hash,
        packed(backend, keys=(337, 1, 262, 300), causal=True).order_hash,
        packed(backend, window_size=(20, 0)).order_hash,
        packed(backend, LENGTHS[::-1], window_size=(20, 0)).order_hash,
    ]
    assert len({first, *others}) == len(others) + 1


def test_a_sequence_without_queries_or_keys_has_no_order() -> None:
    assert packed("cpu", (37, 0, 300), (37, 9, 300)).order_hash == packed("cpu", (37, 300)).order_hash
    assert packed("hopper", (37, 5, 300), (37, 0, 300)).order_hash == packed("hopper", (37, 300)).order_hash


def test_a_mask_of_documents_in_packed_sequences_is_that_of_each() -> None:
    """On the CPU, where each sequence may have several. Each then runs as one sequence with the whole mask."""
    named = dense("cpu", Documents((100, 200)), 300, schedule="alternating")
    found = packed("cpu", (300, 300), mask=Documents((100, 200)), schedule="alternating")
    assert found.schedule == named.schedule == "alternating"
    assert packed("cpu", (300, 300), mask=Documents((100, 200))).backend == "cpu"
    assert packed("cpu", (300, 300), mask=Documents((200, 100))) != packed("cpu", (300, 300), mask=Documents((100, 200)))
    with pytest.raises(ValueError, match="packed sequences on backend 'triton' take"):
        packed("triton", (300, 300), mask=Documents((100, 200)))


def test_what_it_says_of_packed_sequences() -> None:
    found = packed("hopper", causal=True)
    assert found.call == f"q ({TOKENS}, 4, 64), k ({TOKENS}, 2, 64), v ({TOKENS}, 2, 64), bfloat16, causal"
    assert found.prediction_note == "packed sequences are planned on the device, one by one"
    assert (found.predicted_backward_us, found.plan_bytes, found.kernels) == (None, 0, {})
    assert found.workspace_bytes is not None
    assert packed("cpu", causal=True, predict_time=False) == packed("cpu", causal=True)
    long = packed("hopper", (3000,))
    assert f"{long.gang} resident together" in str(long)
    assert (found.gang, long.gang) == (1, dense("hopper", Full(), 3000, predict_time=False).gang)


def test_packed_sequences_on_the_cpu_are_not_run() -> None:
    q, k, v = (torch.full_like(x, torch.nan).requires_grad_() for x in tokens("cpu"))
    ends = ends_of(LENGTHS)
    found = explain(flash_attn_varlen_func, q, k, v, ends, ends, max(LENGTHS), max(LENGTHS), causal=True)
    assert found == packed("cpu", causal=True)


def of_ends(cu_seqlens: Tensor, **options: Any) -> Any:
    q, k, v = tokens("hopper")
    return explain(flash_attn_varlen_func, q, k, v, cu_seqlens, cu_seqlens, TOKENS, TOKENS, **{"backend": "hopper", **options})


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no token": (lambda: packed("cpu", (0, 0)), r"nothing to explain: no sequence has both queries and keys; got q \(0, 4, 64\)"),
    "no key": (lambda: packed("cpu", (5, 0), (0, 7)), "nothing to explain: no sequence has both queries and keys"),
    "no value": (lambda: of_ends(ends_of(LENGTHS).to("meta")), "cu_seqlens must have values; got some on the meta device"),
    "pages": (
        lambda: of_ends(ends_of(LENGTHS), block_table=torch.zeros(4, 9, dtype=torch.int32)),
        "keys in pages have no backward to explain: explain flash_attn_with_kvcache; got a block_table",
    ),
    "lengths": (lambda: of_ends(ends_of((100, 200))), r"must start at 0 and end at the number of tokens \(600\); got 0 and 300"),
    "backend": (lambda: of_ends(ends_of(LENGTHS), backend="auto"), "say which one to explain"),
    "mask": (lambda: packed("hopper", mask=Prefix(3)), "packed sequences"),
    "schedule": (lambda: packed("hopper", schedule="weave"), "packed sequences"),
    "dropout": (lambda: packed("cpu", dropout_p=2.0), "dropout_p"),
    "seeds": (lambda: packed("cpu", dropout_p=0.5, dropout_seed=torch.zeros(3, dtype=torch.int64)), "dropout_seed"),
    "slopes": (lambda: packed("cpu", alibi_slopes=torch.zeros(3, 4)), "alibi_slopes"),
    "sinks": (lambda: packed("cpu", sinks=torch.zeros(3)), "sinks"),
    "dense tensors": (lambda: explain(flash_attn_varlen_func, *(x[None] for x in tokens("cpu")), *(ends_of((600,)),) * 2, 600, 600), "3-d"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    ask, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        ask()


def test_a_given_schedule_fits_no_packed_sequence() -> None:
    schedule = generate("weave", Problem(Causal(), 600, 600, 64, 128), 16)
    with pytest.raises((ScheduleError, ValueError), match="schedule"):
        packed("cpu", causal=True, schedule=schedule)


def test_offsets_are_with_tensors_that_have_memory() -> None:
    q, k, v = tokens("cpu")
    ends = ends_of(LENGTHS).to("meta")
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be on the device of q, k and v \(cpu\); got meta"):
        explain(flash_attn_varlen_func, q, k, v, ends, ends, TOKENS, TOKENS)


# Tensors side by side


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (30, 0), "softcap": 5.0},
    {"mask": Documents((200, 100))},
    {"causal": True, "schedule": "weave", "head_offset": 1},
    {"accumulation": "unordered", "predict_time": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "hopper"])
def test_tensors_side_by_side_are_explained_as_three(backend: str, options: dict[str, Any]) -> None:
    q, k, v = (torch.zeros(2, 300, n, 64, **BACKENDS[backend]) for n in (4, 2, 2))
    by_three = explain(flash_attn_func, q, k, v, backend=backend, **options)
    by_two = explain(flash_attn_kvpacked_func, q, torch.stack([k, v], 2), backend=backend, **options)
    by_one = explain(flash_attn_qkvpacked_func, torch.stack([q, q, q], 2), backend=backend, **options)
    assert (by_two, by_two.call) == (by_three, by_three.call)
    equal = explain(flash_attn_func, q, q, q, backend=backend, **options)
    assert (by_one, by_one.call) == (equal, equal.call)
    assert by_one.call != by_three.call, "the control: other heads"


def test_positional_choices_are_those_of_the_function() -> None:
    qkv = torch.zeros(1, 300, 3, 2, 16)
    x = qkv.unbind(2)
    assert explain(flash_attn_qkvpacked_func, qkv, 0.0, None, True) == explain(flash_attn_func, *x, 0.0, None, True)
    assert explain(flash_attn_kvpacked_func, x[0], qkv[:, :, 1:], 0.0, None, True) == explain(flash_attn_func, *x, causal=True)


def test_what_is_not_side_by_side_is_refused() -> None:
    q = torch.zeros(1, 300, 2, 16)
    with pytest.raises(ValueError, match=r"qkv must be 5-d \(batch, length, 3, heads, head dim\); got shape \(1, 300, 2, 16\)"):
        explain(flash_attn_qkvpacked_func, q)
    with pytest.raises(ValueError, match=r"kv must be 5-d \(batch, length, 2, heads, head dim\)"):
        explain(flash_attn_kvpacked_func, q, q)


# Whatever the function


CALLS: dict[Callable[..., Any], tuple[Any, ...]] = {
    flash_attn_func: (torch.zeros(1, 9, 2, 16),) * 3,
    flash_attn_varlen_func: (*(torch.zeros(9, 2, 16),) * 3, *(ends_of((4, 5)),) * 2, 5, 5),
    flash_attn_qkvpacked_func: (torch.zeros(1, 9, 3, 2, 16),),
    flash_attn_kvpacked_func: (torch.zeros(1, 9, 2, 16), torch.zeros(1, 9, 2, 2, 16)),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_it_takes_what_the_function_takes(function: Callable[..., Any]) -> None:
    """Each argument by its name, and nothing else."""
    given, names = CALLS[function], inspect.signature(function).parameters
    found = explain(function, *given, causal=True)
    by_name = dict(zip(names, given, strict=False))
    named = {name: one.default for name, one in names.items() if name not in by_name and one.kind is not inspect.Parameter.VAR_KEYWORD}
    assert explain(function, **by_name, **{**named, "causal": True}) == found
    for wrong in ("is_causal", "cache_seqlens"):
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{wrong}'"):
            explain(function, *given, **{wrong: True})
    with pytest.raises(TypeError, match="missing a required argument"):
        explain(function, *given[:-1])
    with pytest.raises(TypeError, match="predict_time must be True or False; got 1"):
        explain(function, *given, predict_time=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("unknown", [torch.nn.functional.scaled_dot_product_attention, "flash_attn_func", torch.zeros(1, 9, 2, 16)])
def test_another_function_is_refused_by_name(unknown: Any) -> None:
    """A tensor in its place is a call without its function."""
    with pytest.raises(ValueError, match="explain takes a function of dash_attn and its arguments: flash_attn_func, ") as raised:
        explain(unknown, *CALLS[flash_attn_func])
    for function in CALLS:
        assert function.__name__ in str(raised.value)
    assert "flash_attn_with_kvcache" in str(raised.value)
