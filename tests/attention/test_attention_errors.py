"""What flash_attn_func refuses: every error says what was asked and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dash_attn import Causal, Documents, Full, Prefix, ScheduleError, TileMap, Window, flash_attn_func
from dash_attn.backends import import_backend, resolve
from dash_attn.call.options import BACKENDS, AttentionOptions, Choices, options_for
from dense import random_inputs


def zeros(*shape: int, **rest: Any) -> torch.Tensor:
    return torch.zeros(*shape, **rest)


Q, K = zeros(2, 10, 4, 16), zeros(2, 12, 2, 16)

BAD_TENSORS = [
    ((Q[0], K, K), r"q must be 4-d .*got shape \(10, 4, 16\)"),
    ((Q, K, K[..., 0]), r"v must be 4-d"),
    ((Q, K.double(), K), r"one dtype; got torch.float32, torch.float64, torch.float32"),
    ((Q.int(), K.int(), K.int()), r"dtype must be one of torch.float64.*got torch.int32"),
    ((Q, K.to("meta"), K), r"one device; got cpu, meta, cpu"),
    ((Q[:1], K, K), r"one batch size; got q \(1, 10, 4, 16\)"),
    ((Q, K[..., :8], K), r"same head dim; got .*k \(2, 12, 2, 8\)"),
    ((Q, zeros(2, 12, 3, 16), zeros(2, 12, 3, 16)), r"multiple of KV heads"),
    ((Q, K, K[:, :-1]), r"k and v must have the same length"),
    ((Q, K, K[:, :, :1]), r"k and v must have the same heads"),
    ((Q[..., :0], K[..., :0], K), r"at least one head"),
    ((Q, K[:, :, :0], K[:, :, :0]), r"at least one head"),
]


@pytest.mark.parametrize(("tensors", "message"), BAD_TENSORS, ids=[m for _, m in BAD_TENSORS])
def test_bad_tensors(tensors: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*tensors)


def test_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="v must be a tensor; got list"):
        flash_attn_func(Q, K, [1.0])


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dropout_p": -0.1}, ValueError, r"dropout_p must be 0, or from 1/65536 to 1 - 1/65536; got -0.1"),
    ({"alibi_slopes": 0.5}, TypeError, r"alibi_slopes must be a tensor or None; got float"),
    ({"softmax_scale": float("nan")}, ValueError, r"softmax_scale must be a finite number other than 0; got nan"),
    ({"softmax_scale": float("inf")}, ValueError, r"softmax_scale .*got inf"),
    ({"softmax_scale": 0.0}, ValueError, r"softmax_scale .*got 0.0"),
    ({"softmax_scale": "1"}, ValueError, r"softmax_scale .*got '1'"),
    ({"softcap": -1.0}, ValueError, r"softcap must be .*got -1.0"),
    ({"softcap": float("nan")}, ValueError, r"softcap must be .*got nan"),
    ({"window_size": (-2, 0)}, ValueError, r"window_size must be \(left, right\).*got \(-2, 0\)"),
    ({"window_size": (1.5, 0)}, ValueError, r"window_size must be"),
    ({"window_size": (1, 2, 3)}, ValueError, r"window_size must be"),
    ({"window_size": (1,)}, ValueError, r"window_size must be .*got \(1,\)"),
    ({"window_size": (True, 0)}, ValueError, r"window_size must be"),
    ({"window_size": 5}, ValueError, r"window_size must be .*got 5"),
    ({"window_size": (-1, -2), "causal": True}, ValueError, r"window_size must be"),
    ({"mask": Causal(), "causal": True}, ValueError, r"either mask or causal/window_size"),
    ({"mask": Full(), "window_size": (3, 3)}, ValueError, r"either mask or causal/window_size"),
    ({"mask": "causal"}, TypeError, r"mask must be a dash_attn mask .*got 'causal'"),
    ({"mask": torch.ones(10, 12)}, ValueError, r"a mask tensor of numbers must have 0 .*; got 1.0"),
    ({"mask": Documents((5, 5))}, ValueError, r"documents need as many queries as keys.*got 10 queries and 12 keys"),
    ({"mask": Prefix(13)}, ValueError, r"prefix length must be at most the number of keys, 12"),
    ({"mask": TileMap([[True]], 64, 8)}, ValueError, r"needs shape \(1, 2\); got \(1, 1\)"),
    ({"schedule": "fastest"}, ValueError, r"unknown schedule 'fastest'; choose from auto, ascending"),
    ({"schedule": "alternate"}, ValueError, r"its JSON text; did you mean alternating\?$"),
    ({"schedule": Causal()}, ValueError, r"unknown schedule"),
    ({"schedule": ["auto"]}, ValueError, r"unknown schedule \['auto'\]"),
    ({"accumulation": "atomic"}, ValueError, r"unknown accumulation 'atomic'; choose from ordered, unordered"),
    ({"accumulation": "unordered", "deterministic": True}, ValueError, r"contradicts"),
    ({"backend": "cuda"}, ValueError, r"unknown backend 'cuda'; choose from auto, cpu, hopper, triton"),
    ({"backend": "hopper"}, ValueError, r"backend 'hopper' needs cuda tensors; got tensors on cpu"),
    ({"head_offset": -1}, ValueError, r"head_offset must be a whole number >= 0 and below 2\^31; got -1"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=[str(o) for o, _, _ in BAD_OPTIONS])
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_func(Q, K, K, **options)


def test_our_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        flash_attn_func(Q, K, K, 0.0, None, False, (-1, -1), 0.0, None, False, False, Causal())  # type: ignore[misc]


def test_a_backend_runs_only_on_its_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda:1")
    assert [resolve(name, cpu) for name in ("auto", "cpu")] == ["cpu", "cpu"]
    assert [resolve(name, cuda) for name in ("auto", "hopper")] == ["hopper", "hopper"]
    with pytest.raises(ValueError, match="backend 'cpu' needs cpu tensors; got tensors on cuda:1"):
        resolve("cpu", cuda)
    with pytest.raises(ValueError, match="no backend runs on meta"):
        resolve("auto", torch.device("meta"))


def test_a_backend_that_is_not_built_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.backends.find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"backend 'hopper' \(cuda tensors\) is not part of this build"):
        import_backend.__wrapped__("hopper")  # past the cache: another test may have loaded it


def test_meta_tensors_are_refused_even_when_empty() -> None:
    q = zeros(0, 4, 1, 8, device="meta")
    with pytest.raises(ValueError, match="no backend runs on meta"):
        flash_attn_func(q, q, q)


def test_a_schedule_that_does_not_serve_the_mask_says_so() -> None:
    q, k, v, _ = random_inputs(300, 300)
    out = flash_attn_func(q.requires_grad_(), k, v, causal=True, schedule="shift")
    with pytest.raises(ScheduleError, match="shift serves full masks only"):
        out.sum().backward()


def test_options_are_values() -> None:
    options = AttentionOptions(Causal(), 1)
    assert options == AttentionOptions(Causal(), 1.0)
    assert hash(options) == hash(AttentionOptions(Causal(), 1.0))
    assert options.backend == BACKENDS[0] == "auto"
    assert options.ordered


def test_options_of_repeated_calls_are_kept_but_types_are_told_apart() -> None:
    choices = Choices(causal=True, window_size=(3, -1), softmax_scale=0.5)
    assert options_for(choices, 64) is options_for(Choices(causal=True, window_size=[3, -1], softmax_scale=0.5), 16)
    assert options_for(choices, 64).mask == Window(3, 0)
    assert options_for(Choices(mask=Documents((1, 2))), 16) == AttentionOptions(Documents((1, 2)), 0.25)
    for wrong in (3.0, True):  # equal or comparable to a kept value, and still wrong
        with pytest.raises(ValueError, match="window_size must be"):
            options_for(choices._replace(window_size=(wrong, -1)), 64)
    with pytest.raises(ValueError, match="head_offset must be a whole number"):
        options_for(choices._replace(head_offset=False), 64)
