"""The error budget is what it says: each result at its border passes, and one beyond it does not."""

from __future__ import annotations

import pytest
import torch

from budget import SIXTEEN_BITS, Slack, assert_in_budget, few_roundings
from dense import Results, WithSinks

SIZES = {"out": 2.0, "lse": 3.0, "dq": 0.5, "dk": 4.0, "dv": 0.25, "dsinks": 0.125}
LARGEST_GRADIENT = 4.0
PLAIN_ERROR = 0.25


def results(kind: type[Results] | type[WithSinks], **off: float) -> Results | WithSinks:
    """A row of equal numbers each, one of which is off by so much."""
    made = {name: torch.full((8,), SIZES[name], dtype=torch.float64) for name in kind._fields}
    for name, error in off.items():
        made[name][3] += error
    return kind(**made)


def allowed(name: str, slack: Slack) -> float:
    if name == "lse" and slack.lse is not None:
        return slack.lse
    return 2 * PLAIN_ERROR + slack.relative * (LARGEST_GRADIENT if name.startswith("d") else SIZES[name])


@pytest.mark.parametrize("slack", [SIXTEEN_BITS, few_roundings(torch.float32), few_roundings(torch.float64)], ids=str)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in (Results, WithSinks) for name in kind._fields])
def test_the_border(kind: type[Results] | type[WithSinks], name: str, slack: Slack) -> None:
    plain = results(kind, **dict.fromkeys(kind._fields, PLAIN_ERROR))
    border = allowed(name, slack)
    assert_in_budget(results(kind, **{name: border * (1 - 1e-6)}), plain, results(kind), slack)
    with pytest.raises(AssertionError, match=f"{name} is off by .*; the budget is"):
        assert_in_budget(results(kind, **{name: border * (1 + 1e-6)}), plain, results(kind), slack)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_and_infinity_are_never_within_it(wrong: float) -> None:
    with pytest.raises(AssertionError, match=r"NaN in a result|infinities in different places"):
        assert_in_budget(results(Results, out=wrong), results(Results, out=1e9), results(Results))


def test_shapes_are_compared() -> None:
    with pytest.raises(AssertionError, match=r"dk has shape \(7,\), expected \(8,\)"):
        assert_in_budget(results(Results)._replace(dk=torch.zeros(7)), results(Results), results(Results))
