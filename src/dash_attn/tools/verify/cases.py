"""What is verified: shapes, inputs that are the same on every machine, and results as bits: run, compared, hashed."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.functions import flash_attn_func
from ...call.options import in_words, is_given, read_given
from ...errors import did_you_mean
from ...masks import Mask, parse_mask
from ...scheduling.generators import SCHEDULES
from ...scheduling.problem import whole_number
from ..machine import bits_of, deterministic_algorithms

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("out", "lse", "dq", "dk", "dv")
SEED = 0
MOST_ELEMENTS = 2**31  # of a tensor: what a machine holds several times over
INPUT_GENERATOR = (
    "g = torch.Generator('cpu').manual_seed(seed); for q, k, v, dout in turn:"
    " torch.randint(-2**20, 2**20, (4, batch, seqlen, heads, head_dim), generator=g).sum(0).double() / 2**20, rounded to the dtype"
)
LARGEST_TILE = 128  # rows, in the backward of every backend


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Extras(NamedTuple):
    """What a call may have besides: sinks, and a gradient of its LSE."""

    sinks: Tensor
    dlse: Tensor


@dataclass(frozen=True)
class Case:
    """One call of flash_attn_func. Three KV tiles (128 keys each) in a row are the least at which the order of a sum can show.

    `schedule` is a name, or the JSON text of a schedule, which then stands in the certificate.
    """

    seqlen: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    batch: int = 2
    mask: str = "causal"
    dtype: str = "fp32"
    schedule: str = "auto"

    def __post_init__(self) -> None:
        for name in ("seqlen", "heads", "kv_heads", "head_dim", "batch"):
            whole_number(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if isinstance(self.schedule, str) and is_given(self.schedule):
            read_given(self.schedule)
        elif self.schedule not in SCHEDULES:
            meant = did_you_mean(self.schedule, SCHEDULES)
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, or the JSON text of one; got {self.schedule!r}{meant}")
        if self.batch * self.seqlen * self.heads * self.head_dim > MOST_ELEMENTS:
            raise ValueError(f"batch x seqlen x heads x head_dim must be at most {MOST_ELEMENTS}; got {self}")
        if not isinstance(self.mask, str):
            raise ValueError(f"mask must be text; got {self.mask!r}")
        self.read_mask().check(self.seqlen, self.seqlen)

    def read_mask(self) -> Mask:
        return parse_mask(self.mask)

    def __str__(self) -> str:
        schedule = "" if self.schedule == "auto" else f", {in_words(self.schedule)}"
        return (
            f"{self.mask} {self.seqlen}, {self.heads}/{self.kv_heads} heads x {self.head_dim}, batch {self.batch}, {self.dtype}{schedule}"
        )


def default_case(device: str) -> Case:
    """The shape that flags change: small on the CPU, large enough on a GPU that all SMs compete."""
    return Case() if device == "cpu" else Case(2048, heads=8, kv_heads=2, head_dim=128, batch=4, dtype="bf16")


def default_cases(device: str) -> tuple[Case, ...]:
    """Every kind of schedule `auto` chooses, every dtype of the backend, grouped and equal heads."""
    if device == "cpu":
        return (
            Case(),
            Case(mask="full", dtype="bf16", kv_heads=4),
            Case(500, mask="window:300,0", dtype="fp16", head_dim=40),
            Case(640, heads=2, kv_heads=1, mask="documents:150,490", dtype="fp64"),
            Case(17 * 128, heads=1, kv_heads=1, head_dim=16, batch=1, mask="full"),  # KV tiles wait for each other in a circle
        )
    return (
        default_case(device),
        Case(2048, 8, 8, 64, 4, "full", "bf16"),
        Case(2000, 8, 2, 128, 4, "window:1000,0", "fp16"),
        Case(2048, 8, 4, 64, 2, "documents:500,1548", "bf16"),
    )


def cases_to_share(device: str, ranks: Sequence[int]) -> tuple[Case, ...]:
    """The default cases that ranks can share, made longer until 2 x P chunks of whole tiles fit every P. Documents are left out: auto
    plans each by itself."""
    unit = LARGEST_TILE * math.lcm(*(2 * count for count in ranks))
    shared = [case for case in default_cases(device) if not case.mask.startswith("documents")]
    return tuple(replace(case, seqlen=-(-case.seqlen // unit) * unit) for case in shared)


def make_inputs(case: Case, device: str, seed: int = SEED, batch: int | None = None) -> Inputs:
    """q, k, v and dO. Sums of whole numbers, because the logarithms and cosines of `randn` are not the same everywhere."""
    source, dtype = torch.Generator("cpu").manual_seed(seed), DTYPES[case.dtype]
    lengths = (case.batch if batch is None else batch, case.seqlen)
    drawn = [_draw((*lengths, heads, case.head_dim), source) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    return Inputs(*(x.to(device, dtype) for x in drawn))


def make_extras(case: Case, device: str) -> Extras:
    """The same on every machine, too."""
    source, dtype = torch.Generator("cpu").manual_seed(SEED), DTYPES[case.dtype]
    sinks, dlse = _draw((case.heads,), source), _draw((case.batch, case.heads, case.seqlen), source)
    return Extras(sinks.to(device, dtype), dlse.to(device, torch.promote_types(dtype, torch.float32)))


def _draw(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Nearly normal, standard deviation 1.15, exact in fp64."""
    return torch.randint(-(2**20), 2**20, (4, *shape), generator=source).sum(0).double() / 2**20


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


def attend(case: Case, inputs: Inputs, function: Callable[..., Any] = flash_attn_func, extras: Extras | None = None) -> Results:
    """Forward and backward, with every new tensor filled with NaN before a kernel sees it."""
    *tensors, dout = inputs
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    sinks = [] if extras is None else [extras.sinks.detach().requires_grad_()]
    options: dict[str, Any] = {"mask": case.read_mask(), "schedule": case.schedule, "sinks": sinks[0] if sinks else None}
    with poisoned_memory(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="accumulation='unordered'")  # the control is meant to be unordered
        out, lse = function(q, k, v, **options, return_lse=True)
        used, gradients_of_used = ([out], [dout]) if extras is None else ([out, lse], [dout, extras.dlse])
        gradients = torch.autograd.grad(used, [q, k, v, *sinks], gradients_of_used)
    return results_of(out, lse, *gradients)


def results_of(*tensors: Tensor) -> Results:
    return Results(*(x.detach().cpu() for x in tensors))


def poisoned_memory() -> AbstractContextManager[None]:
    """Every new tensor is filled with NaN. warn_only: else the unordered control would raise."""
    return deterministic_algorithms(warn_only=True, fill=True)


def difference(actual: Results, expected: Results) -> str | None:
    """The first element whose bits differ, with both values; None if there is none."""
    if actual.named.keys() != expected.named.keys():
        return f"results are {', '.join(actual.named)} against {', '.join(expected.named)}"
    for name, a in actual.named.items():
        b = expected.named[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{name} is {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
        differs = bits_of(a) != bits_of(b)
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


def sha256(tensors: Iterable[Tensor]) -> str:
    """Of the elements in memory order (row by row, as the machine stores them: little-endian)."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
