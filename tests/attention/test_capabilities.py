"""The list of what is missing tells the truth: what it names is refused, with a word on what was asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dash_attn import Causal, flash_attn_func, flash_attn_varlen_func
from dense import run_ours
from devices import MISSING, make_inputs


def attend(device: str, dims: tuple[int, int] = (128, 0), **options: object) -> None:
    run_ours(make_inputs(device, (130, 130), dims=dims), Causal(), **options)


def attend_packed(device: str) -> None:
    q, k, v, _ = (x[0] for x in make_inputs(device, (130, 130)))
    places = torch.tensor([0, 100, 130], dtype=torch.int32, device=device)
    flash_attn_varlen_func(q, k, v, places, places, 100, 100)


def attend_with_sinks(device: str) -> None:
    q, k, v, _ = make_inputs(device, (130, 130))
    flash_attn_func(q, k, v, sinks=torch.zeros(4, device=device))  # type: ignore[call-arg]


TRIES: dict[str, Callable[[str], None]] = {
    "head dim 96": lambda device: attend(device, (96, 0)),
    "head dim 192": lambda device: attend(device, (192, 0)),
    "head dim 256": lambda device: attend(device, (256, 0)),
    "padded head dims": lambda device: attend(device, (111, 0)),
    "value head dim": lambda device: attend(device, (192, 128)),
    "other value head dims": lambda device: attend(device, (64, 128)),
    "softcap": lambda device: attend(device, softcap=20.0),
    "varlen": attend_packed,
    "sinks": attend_with_sinks,
}
UNTRIED = {"varlen in graphs"}  # a capture that fails may leave the process unusable for other tests
EVERYTHING = [pytest.param(device, feature, marks=pytest.mark.gpu if device == "cuda" else ()) for device in MISSING for feature in TRIES]


def test_only_known_features_are_listed() -> None:
    assert set().union(*MISSING.values()) <= set(TRIES) | UNTRIED


@pytest.mark.parametrize(("device", "feature"), EVERYTHING)
def test_what_is_missing_is_refused_and_the_rest_works(device: str, feature: str) -> None:
    if feature not in MISSING[device]:
        TRIES[feature](device)
        return
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=r"head dim|softcap|packed|sinks"):
        TRIES[feature](device)
