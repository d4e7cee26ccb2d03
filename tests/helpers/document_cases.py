"""Rows of documents that ranks share: cases, and what each document alone makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from dash_attn import Documents, flash_attn_func, flash_attn_varlen_func
from dash_attn.distributed import Sharding
from shared_cases import BF16, CAUSAL, F16, F32, F64, NAMES, Case, Inputs


@dataclass(frozen=True)
class RowCase:
    """case.call: that of each document. as_mask: they are given by a mask. Some may be empty."""

    case: Case
    lengths: tuple[int, ...]
    as_mask: bool = False

    @property
    def shared(self) -> Case:
        """With the documents in its call."""
        if self.as_mask:
            call: dict[str, Any] = {"mask": Documents(self.lengths, causal=self.case.call == CAUSAL)}
        else:
            call = {**self.case.call, "cu_seqlens": [0, *accumulate(self.lengths)]}
        return replace(self.case, call=call)


def row(ranks: int, lengths: tuple[int, ...], *rest: Any, as_mask: bool = False, **more: Any) -> RowCase:
    return RowCase(Case(ranks, sum(lengths), *rest, **more), lengths, as_mask)


def each_alone(given: RowCase) -> dict[str, Tensor]:
    """flash_attn_func of every document of every sequence by itself. The gradient of sinks is that of packed sequences."""
    case, inputs = given.case, Inputs.of(given.case)
    found: dict[str, list[list[Tensor]]] = {name: [] for name in NAMES[:5]}
    for sequence in range(case.batch):
        parts = [_alone(case, inputs, sequence, slice(*ends)) for ends in pairwise([0, *accumulate(filter(None, given.lengths))])]
        for name in found:
            found[name].append([part[name] for part in parts])
    truth = {name: torch.cat([torch.cat(one, dim=2 if name == "lse" else 1) for one in each]) for name, each in found.items()}
    return {**truth, "dsinks": packed(given)["dsinks"]} if case.sinks else truth


def _alone(case: Case, inputs: Inputs, sequence: int, rows: slice) -> dict[str, Tensor]:
    q, k, v = (x[sequence : sequence + 1, rows].clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = flash_attn_func(q, k, v, sinks=inputs.sinks, return_lse=True, **case.call)  # type: ignore[misc]
    of_out = inputs.dout[sequence : sequence + 1, rows], inputs.dlse[sequence : sequence + 1, :, rows]
    used = 2 if case.lse_gradient else 1
    gradients = torch.autograd.grad((out, lse)[:used], (q, k, v), of_out[:used])
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=False))


def packed(given: RowCase) -> dict[str, Tensor]:
    """flash_attn_varlen_func of all documents of all sequences."""
    case, inputs = given.case, Inputs.of(given.case)
    ends = torch.tensor([0, *accumulate(given.lengths * case.batch)], dtype=torch.int32)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    flat, longest = [x.flatten(0, 1) for x in (q, k, v)], max(given.lengths)
    out, lse = flash_attn_varlen_func(*flat, ends, ends, longest, longest, sinks=inputs.sinks, return_lse=True, **case.call)  # type: ignore[misc]
    out, lse = out.unflatten(0, (case.batch, case.rows)), lse.view(-1, case.batch, case.rows).transpose(0, 1)
    leaves, used = [q, k, v] + ([] if inputs.sinks is None else [inputs.sinks]), 2 if case.lse_gradient else 1
    gradients = torch.autograd.grad((out, lse)[:used], leaves, (inputs.dout, inputs.dlse)[:used])
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=False))


BOTH: dict[str, Any] = {"sinks": True, "lse_gradient": True}
FEW = (300, 21, 455, 13, 235)  # 1024 rows
LONG_AND_SHORT = (1, 900, 127, 128, 3, 41)  # 1200
SHORT = (23, 17, 5, 19) * 12  # 768: no document is longer than a tile
LONG = (2300, 40, 700, 300, 9)
SLOPES = torch.tensor([0.5, 0.03])
WINDOW: dict[str, Any] = {"window_size": (100, 0)}
OWN = Sharding((100, 300, 57, 400, 343), (2, 0, 1, 2, 0))  # 1200 rows; some chunk is shorter than a tile

# In `make test`: each choice at least once.
ROWS: dict[str, RowCase] = {
    "one rank": row(1, FEW, call=CAUSAL, **BOTH),
    "one rank, window": row(1, FEW, (2, 1), batch=2, sharding="contiguous", call={"window_size": (60, 30)}),
    "2 ranks": row(2, FEW, call=CAUSAL, **BOTH),
    "2 ranks, a mask": row(2, FEW, (4, 2), batch=2, as_mask=True, call=CAUSAL, **BOTH),
    "2 ranks, full": row(2, LONG_AND_SHORT, (2, 1), **BOTH),
    "2 ranks, full, gangs on one rank": row(2, (2200, 40, 1160, 1000), (1, 1), (8, 8), dtype=BF16),
    "2 ranks, full, gangs on both": row(2, (230, 2300, 70), (1, 1), (8, 8), sharding="contiguous"),
    "2 ranks, one document of any length": row(2, (1004,), dims=(16, 24), sharding="contiguous", call=CAUSAL),
    "3 ranks": row(3, LONG_AND_SHORT, (3, 3), dtype=F64, call={**CAUSAL, "head_offset": 1}),
    "3 ranks, full, a mask": row(3, LONG_AND_SHORT, sharding="contiguous", as_mask=True, **BOTH),
    "3 ranks, window": row(3, LONG_AND_SHORT, (2, 1), batch=2, call=WINDOW, **BOTH),
    "3 ranks, short documents": row(3, SHORT, call=CAUSAL, **BOTH),
    "3 ranks, ALiBi": row(3, FEW + (8,), (2, 1), batch=2, call={**CAUSAL, "alibi_slopes": SLOPES}),
    "one rank, ALiBi": row(1, FEW, (2, 1), batch=2, call={**CAUSAL, "alibi_slopes": SLOPES}),
    "3 ranks, chunks of their own": row(3, LONG_AND_SHORT, dtype=F16, sharding=OWN, call=CAUSAL),
    "4 ranks": row(4, FEW, (4, 2), batch=2, call=CAUSAL, **BOTH),
    "4 ranks, a rank without work": row(4, (90, 10, 300), (1, 1), sharding="contiguous", call=CAUSAL, **BOTH),
    "4 ranks, short documents": row(4, SHORT, (2, 1), sharding="contiguous", call={"softcap": 3.0}),
    "4 ranks, window of two sides": row(4, FEW, sharding="contiguous", dtype=BF16, call={"window_size": (150, 70)}),
    "4 ranks, dealt by document": row(
        4, (2300, 40, 700, 300, 9), (2, 1), sharding=Sharding.by_document((2300, 40, 700, 300, 9), 4), call=CAUSAL
    ),
    "4 ranks, empty documents": row(4, (0, 500, 0, 0, 524, 0), call=CAUSAL, **BOTH),
    "ulysses alone": row(4, FEW, (4, 4), ulysses=4, call=WINDOW, **BOTH),
    "ulysses and states": row(4, LONG_AND_SHORT, (4, 2), batch=2, ulysses=2, call=CAUSAL, **BOTH),
    "ulysses and states, full, a mask": row(4, FEW, (2, 2), ulysses=2, sharding="contiguous", as_mask=True),
}


def random_lengths(random: Random, rows: int) -> tuple[int, ...]:
    """Some long documents, some short ones."""
    lengths: list[int] = []
    while sum(lengths) < rows:
        lengths.append(min(rows - sum(lengths), random.choice([random.randint(1, 40), random.randint(40, 400), random.randint(400, 1500)])))
    random.shuffle(lengths)
    return tuple(lengths)


def random_row(seed: int, ranks: int, heads: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (4, 2), (3, 1))) -> RowCase:
    random = Random(f"documents {seed}/{ranks}")
    chunks = 2 * ranks
    lengths = random_lengths(random, chunks * random.randint(20, 1800 // chunks))
    width = random.randint(1, 500)
    call = random.choice([CAUSAL, CAUSAL, {}, {"window_size": (width, 0)}, {"window_size": (width, random.randint(0, 300))}])
    return row(
        ranks,
        lengths,
        random.choice(heads),
        random.choice([(8, 8), (16, 8), (8, 24)]),
        batch=random.choice([1, 1, 2]),
        dtype=random.choice([F32, F32, BF16, F16, F64]),
        sharding=random.choice(["zigzag", "contiguous", own_sharding(random, sum(lengths), ranks)]),  # none fits the documents
        sinks=random.random() < 0.5,
        lse_gradient=random.random() < 0.5,
        as_mask=random.random() < 0.3 and "window_size" not in call,
        call=call,
    )


def own_sharding(random: Random, rows: int, ranks: int) -> Sharding:
    """Chunks of any lengths, two per rank, in any order."""
    cuts = sorted(random.sample(range(1, rows), 2 * ranks - 1))
    owners = [*range(ranks)] * 2
    random.shuffle(owners)
    return Sharding(tuple(end - begin for begin, end in pairwise([0, *cuts, rows])), tuple(owners))


def wide_rows() -> dict[str, RowCase]:
    """For `make test-all`."""
    cases = {}
    for seed in range(60):
        random, ranks = Random(seed), seed % 4 + 1
        given = random_row(seed, ranks, ((2, 2), (4, 4), (4, 2), (8, 4), (5, 5)))
        factors = [factor for factor in (1, 2, 3, 4) if ranks % factor == 0 and given.case.heads[1] % factor == 0]
        cases[f"random {seed}"] = replace(given, case=replace(given.case, ulysses=random.choice(factors)))
    return cases
