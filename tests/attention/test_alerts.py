"""torch.use_deterministic_algorithms: unordered sums raise or warn, ordered ones never alert."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dense import random_inputs

MESSAGE = "accumulation='unordered' adds gradients in order of arrival"


@pytest.fixture(autouse=True)
def _setting_restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def dense_call(accumulation: str) -> torch.Tensor:
    q, k, v, _ = random_inputs(300, 300)
    return flash_attn_func(q.requires_grad_(), k, v, accumulation=accumulation)


def packed_call(accumulation: str) -> torch.Tensor:
    q, k, v, _ = (x[0] for x in random_inputs(300, 300))
    cu = torch.tensor([0, 100, 300], dtype=torch.int32)
    return flash_attn_varlen_func(q.requires_grad_(), k, v, cu, cu, 200, 200, accumulation=accumulation)


BOTH = pytest.mark.parametrize("call", [dense_call, packed_call], ids=["dense", "packed"])


@BOTH
def test_unordered_raises(call: Callable[[str], torch.Tensor]) -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        call("unordered")


@BOTH
def test_unordered_raises_in_a_backward_too(call: Callable[[str], torch.Tensor]) -> None:
    out = call("unordered")
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        out.sum().backward()


@BOTH
def test_unordered_warns_with_warn_only(call: Callable[[str], torch.Tensor]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match=MESSAGE):
        out = call("unordered")
    with pytest.warns(UserWarning, match=MESSAGE):
        out.sum().backward()


@pytest.mark.parametrize("warn_only", [False, True])
@BOTH
def test_ordered_never_alerts(call: Callable[[str], torch.Tensor], warn_only: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("ordered").sum().backward()


@BOTH
def test_unordered_runs_where_the_setting_is_off(call: Callable[[str], torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("unordered").sum().backward()
