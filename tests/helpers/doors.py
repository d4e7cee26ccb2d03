"""What the tests that call a door with random arguments share: a call agrees with the original, or is refused clearly."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dash_attn
from dense import largest_error

PACKAGE = str(Path(dash_attn.__file__).parent)
REFUSALS = (ValueError, TypeError, NotImplementedError)


def refused(call: Callable[[], Any], arguments: Sequence[str]) -> Any:
    """The call's result, or None where it is refused. A refusal is raised by dash_attn on purpose and names an argument."""
    try:
        return call()
    except Exception as error:
        _check_refusal(error, arguments)
        return None


def _check_refusal(error: Exception, arguments: Sequence[str]) -> None:
    assert isinstance(error, REFUSALS), f"{type(error).__name__}: {error}"
    where = traceback.extract_tb(error.__traceback__)[-1]
    takes_no_such_argument = isinstance(error, TypeError) and "got an unexpected keyword argument" in str(error)  # said by Python
    if not takes_no_such_argument:
        assert where.filename.startswith(PACKAGE), f"raised in {where.filename}: {error}"
        assert (where.line or "").startswith("raise "), f"raised by chance in {where.filename}:{where.lineno}: {error}"
    assert re.search(rf"\b({'|'.join(arguments)})\b", str(error)), f"names no argument: {error}"


def random_tensor(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal, whatever the dtype can hold of it."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype) if dtype.is_floating_point or dtype.is_complex else (3 * x).to(dtype)


def assert_as_good(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], truth: dict[str, Tensor], rounded: dict[str, Tensor] | None = None
) -> None:
    """The dtypes and shapes of the original, and at most twice its error, plus a few roundings.

    With few elements the original may be right by luck. Gradients share one size: where a softmax is flat, dQ and dK are
    small differences of large terms.
    rounded: exact gradients of a backward that starts from the rounded output, where the original's does not. Where a query has one
    weight near 1, dQ and dK are what is left of much larger terms, one of which has that rounding: twice the error of it comes on top.
    """
    assert list(ours) == list(theirs) == list(truth)
    gradients = max([_size(x) for name, x in truth.items() if name.startswith("d")], default=1.0)
    roundings = _roundings(ours["out"].dtype, rounded is not None)  # under autocast gradients are 16-bit numbers stored as fp32
    for name, mine in ours.items():
        original, exact = theirs[name], truth[name]
        assert mine.shape == original.shape, f"{name} has shape {tuple(mine.shape)}, the original's has {tuple(original.shape)}"
        assert mine.dtype == original.dtype, f"{name} is {mine.dtype}, the original's is {original.dtype}"
        allowed = largest_error(original, exact) + (0.0 if rounded is None or name not in rounded else largest_error(rounded[name], exact))
        budget = 2 * allowed + roundings * (gradients if name.startswith("d") else _size(exact))
        error = largest_error(mine, exact)
        assert error <= budget, f"{name} is off by {error:.3g}; the original allows {budget:.3g}"


def _roundings(dtype: torch.dtype, output_seen_to: bool) -> float:
    """Sums of 16-bit numbers are fp32 and are rounded at the end; those of others are rounded at every step.

    Gradients also see the rounding of the output, unless it is counted apart.
    """
    return torch.finfo(dtype).eps * (128 if dtype.itemsize > 2 else 1 if output_seen_to else 4)


def _size(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
