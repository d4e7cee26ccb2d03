"""Results as bits: run, compare, hash."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.functions import flash_attn_func
from ...masks import Mask
from ...scheduling.schedule import Schedule
from .cases import Extras, Inputs

NAMES = ("out", "lse", "dq", "dk", "dv")


class Results(NamedTuple):
    """On the CPU, wherever they were computed."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None  # where there were sinks

    def sequence(self, index: int) -> Results:
        """Of one sequence of the batch. The gradient of the sinks is of all of them."""
        return Results(*(self.named[name][index : index + 1] for name in NAMES))

    @property
    def named(self) -> dict[str, Tensor]:
        return {name: x for name, x in self._asdict().items() if x is not None}


def attend(
    inputs: Inputs,
    mask: Mask,
    schedule: str | Schedule = "auto",
    function: Callable[..., Any] = flash_attn_func,
    extras: Extras | None = None,
) -> Results:
    """Forward and backward, with every new tensor filled with NaN before a kernel sees it."""
    *tensors, dout = inputs
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    sinks = [] if extras is None else [extras.sinks.detach().requires_grad_()]
    with poisoned_memory(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="accumulation='unordered'")  # the control is meant to be unordered
        out, lse = function(q, k, v, mask=mask, schedule=schedule, sinks=sinks[0] if sinks else None, return_lse=True)
        used, gradients_of_used = ([out], [dout]) if extras is None else ([out, lse], [dout, extras.dlse])
        gradients = torch.autograd.grad(used, [q, k, v, *sinks], gradients_of_used)
    return results_of(out, lse, *gradients)


def results_of(*tensors: Tensor) -> Results:
    return Results(*(x.detach().cpu() for x in tensors))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """PyTorch fills new memory only while deterministic algorithms are on."""
    settings: Any = import_module("torch.utils.deterministic")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # warn_only: else the unordered control would raise
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def difference(actual: Results, expected: Results) -> str | None:
    """The first element whose bits differ, with both values; None if there is none. -0.0 differs from 0.0, NaN equals itself."""
    if actual.named.keys() != expected.named.keys():
        return f"results are {', '.join(actual.named)} against {', '.join(expected.named)}"
    for name, a in actual.named.items():
        b = expected.named[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{name} is {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
        differs = _integers(a) != _integers(b)
        if differs.any():
            place = tuple(differs.nonzero()[0].tolist())
            values = f"{a[place].item()!r} against {b[place].item()!r}"
            return f"{name}{list(place)}: {values}; {int(differs.sum())} of {differs.numel()} elements differ"
    return None


def not_a_number(results: Results) -> str | None:
    """Where poison came through: our inputs lead to NaN nowhere."""
    for name, x in results.named.items():
        if x.isnan().any():
            return f"{name}{x.isnan().nonzero()[0].tolist()} is NaN"
    return None


def _integers(x: Tensor) -> Tensor:
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def sha256(tensors: Iterable[Tensor]) -> str:
    """Of the elements in memory order (row by row, as the machine stores them: little-endian)."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hashes(results: Results) -> dict[str, str]:
    return {name: sha256([x]) for name, x in results.named.items()}
