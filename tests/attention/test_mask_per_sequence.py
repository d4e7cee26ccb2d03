"""Packed sequences with a mask for each: the bits that each has alone."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import BooleanMask, Causal, flash_attn_func, flash_attn_varlen_func
from dense import random_inputs, same_bits

LENGTHS = ((70, 90), (0, 5), (130, 130), (1, 40))
HEADS = (4, 2)


def offsets(side: int) -> Tensor:
    return torch.tensor([0, *(lengths[side] for lengths in LENGTHS)]).cumsum(0).to(torch.int32)


ENDS = offsets(0), offsets(1)
LONGEST = 130, 130


def masks() -> list[Any]:
    """A tensor, numbers, a matrix per head that was made before, and a mask by name."""
    source = torch.Generator().manual_seed(0)
    first = torch.rand(70, 90, generator=source) < 0.5
    per_head = torch.rand(4, 130, 130, generator=source) < 0.4
    return [first, torch.zeros(0, 5), BooleanMask(per_head), Causal()]


def tokens(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    counts = [int(ends[-1]) for ends in ENDS]
    return [x[0] for x in random_inputs(*counts, HEADS, 8, dtype)]


def run(function: Any, leaves: list[Tensor], dout: Tensor, *arguments: Any, **named: Any) -> list[Tensor]:
    """Output, LSE and gradients, through both."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    sinks = [named.pop("sinks").detach().requires_grad_()] if "sinks" in named else []
    named |= {"sinks": sinks[0]} if sinks else {}
    out, lse = function(*leaves, *arguments, return_lse=True, **named)
    weight = torch.where(lse.isfinite(), 0.5, 0.0)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), [*leaves, *sinks], (dout, weight))]


@pytest.mark.parametrize("slopes", [None, (4,), (4, 4)], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_sequence_has_the_bits_that_it_has_alone(dtype: torch.dtype, dropout_p: float, slopes: tuple[int, ...] | None) -> None:
    *leaves, dout = tokens(dtype)
    options: dict[str, Any] = {"dropout_p": dropout_p, "softcap": 2.0}
    seeds = torch.arange(4) + 5 if dropout_p else None
    table = None if slopes is None else torch.rand(slopes, generator=torch.Generator().manual_seed(2))
    given = {**options, "dropout_seed": seeds, "alibi_slopes": table}
    together = run(flash_attn_varlen_func, leaves, dout, *ENDS, *LONGEST, mask=masks(), **given)
    for number, mask in enumerate(masks()):
        rows, columns = (slice(int(ends[number]), int(ends[number + 1])) for ends in ENDS)
        own = {**options, "dropout_seed": None if seeds is None else seeds[number : number + 1]}
        own["alibi_slopes"] = table if table is None or table.ndim == 1 else table[number]
        q, k, v = (x[None, part] for x, part in zip(leaves, (rows, columns, columns), strict=True))
        alone = [x[0] for x in run(flash_attn_func, [q, k, v], dout[None, rows], mask=mask, **own)]
        found = [together[0][rows], together[1][:, rows], together[2][rows], *(x[columns] for x in together[3:])]
        assert all(map(same_bits, found, alone)), number


def test_the_same_masks_in_another_order_are_other_masks() -> None:
    """The control."""
    *leaves, dout = tokens()
    first = run(flash_attn_varlen_func, leaves, dout, *ENDS, *LONGEST, mask=masks())
    other = [~masks()[0], *masks()[1:]]
    assert not same_bits(first[0][:70], run(flash_attn_varlen_func, leaves, dout, *ENDS, *LONGEST, mask=other)[0][:70])


def test_masks_by_name_are_those_of_the_packed_call() -> None:
    *leaves, dout = tokens()
    one = run(flash_attn_varlen_func, leaves, dout, *ENDS, *LONGEST, mask=Causal(), sinks=torch.ones(4))
    each = run(flash_attn_varlen_func, leaves, dout, *ENDS, *LONGEST, mask=[Causal()] * 4, sinks=torch.ones(4))
    assert all(map(same_bits, one[:-1], each[:-1]))
    torch.testing.assert_close(one[-1], each[-1])


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mask": masks()[:3]}, ValueError, r"must be one for each of the 4 sequences; got 3"),
    ({"mask": [masks()[0].T, *masks()[1:]]}, ValueError, r"a boolean mask must be \(70, 90\)"),
    ({"mask": [torch.ones(70, 90), *masks()[1:]]}, ValueError, r"-inf elsewhere; got 1\.0"),
    ({"mask": ["causal", *masks()[1:]]}, TypeError, r"mask must be a dash_attn mask"),
    ({"mask": masks(), "causal": True}, ValueError, r"give either mask or causal/window_size"),
    ({"mask": masks(), "block_table": torch.zeros(4, 1, dtype=torch.int32)}, ValueError, r"keys in pages take a full or causal mask"),
]


@pytest.mark.parametrize(("named", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_does_not_fit_raises(named: dict[str, Any], error: type[Exception], message: str) -> None:
    *leaves, _ = tokens()
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(*leaves, *ENDS, *LONGEST, **named)


def test_a_compiled_program_refuses_them() -> None:
    *leaves, _ = tokens()
    arguments = *leaves, *ENDS, *LONGEST
    with pytest.raises(Exception) as caught:  # noqa: PT011 (PyTorch wraps it)
        torch.compile(flash_attn_varlen_func, backend="eager", fullgraph=True)(*arguments, mask=masks())
    assert "a compiled program cannot take masks of packed sequences" in "".join(traceback.format_exception(caught.value))
