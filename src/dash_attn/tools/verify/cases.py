"""What is verified: shapes, and inputs that are the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.options import SCHEDULES, in_words, is_given, read_given
from ...masks import Mask, parse_mask

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEED = 0
MOST_ELEMENTS = 2**31  # of a tensor: what a machine holds several times over
INPUT_GENERATOR = (
    "g = torch.Generator('cpu').manual_seed(seed); for q, k, v, dout in turn:"
    " torch.randint(-2**20, 2**20, (4, batch, seqlen, heads, head_dim), generator=g).sum(0).double() / 2**20, rounded to the dtype"
)
LARGEST_TILE = 128  # rows, in the backward of every backend
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1; got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        _check_schedule(self.schedule)
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


def _check_schedule(schedule: str) -> None:
    if isinstance(schedule, str) and is_given(schedule):
        read_given(schedule)
    elif schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, or the JSON text of a schedule; got {schedule!r}")


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
    base = default_case(device)
    return (
        base,
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
    source = torch.Generator("cpu").manual_seed(seed)
    lengths = (case.batch if batch is None else batch, case.seqlen)
    q, k, v, dout = (_draw((*lengths, heads, case.head_dim), source) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads))
    dtype = DTYPES[case.dtype]
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype), dout.to(device, dtype)


def make_extras(case: Case, device: str) -> Extras:
    """The same on every machine, too."""
    source, dtype = torch.Generator("cpu").manual_seed(SEED), DTYPES[case.dtype]
    sinks, dlse = _draw((case.heads,), source), _draw((case.batch, case.heads, case.seqlen), source)
    return Extras(sinks.to(device, dtype), dlse.to(device, torch.promote_types(dtype, torch.float32)))


def _draw(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Nearly normal, standard deviation 1.15, exact in fp64."""
    return torch.randint(-(2**20), 2**20, (4, *shape), generator=source).sum(0).double() / 2**20
